// Stands in for the backend in builds without libfabric.
#include "../backends.hpp"
#include "hopshard/comm/ofi.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {
namespace detail {

BackendInfo describe_ofi() {
  return {"ofi", "libfabric: EFA between nodes on AWS, tcp elsewhere", HOPSHARD_BACKEND_MISSING,
          nullptr};
}

}  // namespace detail

OfiOptions ofi_options_from_env() { return {}; }

CommunicatorPtr connect_ofi(const ConnectOptions& /*options*/, const OfiOptions& /*ofi*/) {
  throw ConfigError("backend 'ofi' is not available: " HOPSHARD_BACKEND_MISSING);
}

}  // namespace hopshard
