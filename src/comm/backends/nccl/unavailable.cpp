// Stands in where nccl.h was not there at build time.
#include "../backends.hpp"
#include "hopshard/comm/nccl.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {

CommunicatorPtr make_nccl_communicator(const ConnectOptions& /*connect*/,
                                       const NcclOptions& /*options*/) {
  throw ConfigError("backend 'nccl' is not available: " HOPSHARD_BACKEND_MISSING);
}

namespace detail {

BackendInfo describe_nccl() {
  return {"nccl", "NVIDIA GPUs over NCCL", HOPSHARD_BACKEND_MISSING, nullptr};
}

}  // namespace detail
}  // namespace hopshard
