// libfabric's `tcp` over loopback. Other providers, several rails and tagged messages:
// unit/comm/ofi_communicator_test.cpp.
#include "backends.hpp"
#include "hopshard/comm/ofi.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::testing {
namespace {

CommunicatorPtr connect(ThreadWorld& world, const Group& group) {
  OfiOptions options;
  options.provider = "tcp";
  options.interfaces = {"lo"};
  options.allow_tcp = true;
  std::string prefix = group.name;
  for (const int rank : group.ranks) {
    prefix = detail::concatenate(prefix, '/', rank);
  }
  return connect_ofi({.store = make_prefix_store(world.store(), prefix),
                      .group = group,
                      .timeout = std::chrono::seconds(30)},
                     options);
}

bool is_built() {
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "ofi") {
      return !backend.why_not;
    }
  }
  return false;
}

}  // namespace

std::vector<Backend> ofi_backends() {
  if (!is_built()) {
    return {};
  }
  return {{.name = "ofi_tcp", .make = connect, .max_ranks = 4}};
}

}  // namespace hopshard::testing
