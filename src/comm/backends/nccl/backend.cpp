// The registry's entry: what a user can see of this backend without a GPU.
#include "../backends.hpp"
#include "hopshard/core/error.hpp"
#include "nccl_communicator.hpp"

namespace hopshard {
namespace {

CommunicatorPtr connect(const ConnectOptions& options) { return make_nccl_communicator(options); }

}  // namespace

CommunicatorPtr make_nccl_communicator(const ConnectOptions& connect, const NcclOptions& options) {
  auto device_api = detail::make_cuda_device_api();
  return detail::connect_nccl(detail::load_nccl(), std::move(device_api), connect, options);
}

namespace detail {

BackendInfo describe_nccl() {
  BackendInfo info{"nccl", "NVIDIA GPUs over NCCL", std::nullopt, connect};
  try {
    // The GPU first: without one the library is not even loaded.
    static_cast<void>(make_cuda_device_api());
    static_cast<void>(check_nccl_version(*load_nccl()));
  } catch (const std::exception& error) {
    info.why_not = error.what();
  }
  return info;
}

}  // namespace detail
}  // namespace hopshard
