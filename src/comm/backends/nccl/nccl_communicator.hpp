// The contract over NCCL, with the library and the device given, so that a test can be both.
#pragma once

#include <memory>

#include "device.hpp"
#include "hopshard/comm/nccl.hpp"
#include "nccl_api.hpp"

namespace hopshard::detail {

/// See make_nccl_communicator().
[[nodiscard]] CommunicatorPtr connect_nccl(std::shared_ptr<NcclApi> api,
                                           std::shared_ptr<DeviceApi> device_api,
                                           const ConnectOptions& connect,
                                           const NcclOptions& options);

}  // namespace hopshard::detail
