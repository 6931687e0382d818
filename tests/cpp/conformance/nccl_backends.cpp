// NCCL's place is taken by one that moves CPU memory between rank threads; the GPU itself is for
// tools/gpu_check.sh.
#include "backends.hpp"

#ifdef HOPSHARD_HAS_NCCL

#include "comm/backends/nccl/nccl_communicator.hpp"
#include "hopshard/core/error.hpp"
#include "support/fake_nccl.hpp"

namespace hopshard::testing {
namespace {

CommunicatorPtr connect_fake(ThreadWorld& world, const Group& group, int num_busy_looks) {
  std::string prefix = group.name;
  for (const int rank : group.ranks) {
    prefix += hopshard::detail::concatenate('/', rank);
  }
  FakeNcclFaults faults;
  faults.num_busy_looks = num_busy_looks;
  return detail::connect_nccl(
      std::make_shared<FakeNccl>(faults), std::make_shared<FakeDevice>(),
      {.store = make_prefix_store(world.store(), prefix),
       .group = group,
       .timeout = std::chrono::seconds(30)},
      {.check_calls = true, .watch_interval = std::chrono::milliseconds(2)});
}

}  // namespace

std::vector<Backend> nccl_backends() {
  return {
      {.name = "nccl",
       .make = [](ThreadWorld& world,
                  const Group& group) { return connect_fake(world, group, /*num_busy_looks=*/0); }},
      // Every connect and launch returns early, as real NCCL's do when it first connects ranks.
      {.name = "nccl_busy",
       .make = [](ThreadWorld& world,
                  const Group& group) { return connect_fake(world, group, /*num_busy_looks=*/3); },
       .is_variant = true},
  };
}

}  // namespace hopshard::testing

#else

namespace hopshard::testing {

std::vector<Backend> nccl_backends() { return {}; }

}  // namespace hopshard::testing

#endif
