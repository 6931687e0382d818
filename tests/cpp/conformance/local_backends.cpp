// The reference, and the decorators over it.
#include <memory>

#include "backends.hpp"
#include "hopshard/comm/decorators.hpp"
#include "hopshard/comm/recording.hpp"

namespace hopshard::testing {

std::vector<Backend> local_backends() {
  return {
      {.name = "local",
       .make = [](ThreadWorld& world, const Group& group) { return world.communicator(group); },
       .is_reference = true},
      {.name = "recording",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return make_recording_communicator(world.communicator(group), group,
                                                std::make_shared<Meter>(), /*ranks_per_node=*/2);
           },
       .is_reference = true,
       .is_variant = true},
      {.name = "delayed",
       .make =
           [](ThreadWorld& world, const Group& group) {
             DelayedOptions options;
             options.seed = 7;
             options.max_delay = std::chrono::microseconds(200);
             return make_delayed_communicator(world.communicator(group), options);
           },
       .is_reference = true,
       .is_variant = true},
      {.name = "simulated",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return make_simulated_communicator(
                 world.communicator(group),
                 {.seed = 7, .max_delay = std::chrono::microseconds(200)});
           },
       .is_reference = true,
       .is_variant = true},
  };
}

std::vector<Backend> conforming_backends() {
  std::vector<Backend> all = local_backends();
  for (auto* const more :
       {shm_backends, mpi_backends, nccl_backends, ofi_backends, hierarchical_backends}) {
    for (Backend& backend : more()) {
      all.push_back(std::move(backend));
    }
  }
  return all;
}

}  // namespace hopshard::testing
