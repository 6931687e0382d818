// shm as ranks in threads meet it, and as it is where more and more is refused to it.
#include "backends.hpp"
#include "comm/backends/shm/connect.hpp"

namespace hopshard::testing {
namespace {

using detail::shm::Restrictions;

CommunicatorPtr connect_restricted(ThreadWorld& world, const Group& group,
                                   const Restrictions& restrictions) {
  std::string prefix = "restricted/" + group.name;
  for (const int rank : group.ranks) {
    prefix += detail::concatenate("/", rank);
  }
  return detail::shm::connect({.store = make_prefix_store(world.store(), prefix),
                               .group = group,
                               .timeout = std::chrono::seconds(30)},
                              restrictions);
}

}  // namespace

std::vector<Backend> shm_backends() {
  return {
      {.name = "shm",
       .make = [](ThreadWorld& world,
                  const Group& group) { return connect_in(world, "shm", group); }},
      // Each rank maps its peers' memory, and reads private memory through the kernel.
      {.name = "shm_as_processes",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return connect_restricted(world, group, {.no_own_process = true});
           },
       .is_variant = true},
      {.name = "shm_staged",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return connect_restricted(world, group,
                                       {.no_process_memory = true, .no_own_process = true});
           },
       .is_variant = true},
      {.name = "shm_posix",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return connect_restricted(world, group,
                                       {.no_memory_files = true, .no_own_process = true});
           },
       .is_variant = true},
  };
}

}  // namespace hopshard::testing
