// What each backend that may be missing says about itself; its stand-in says why it is missing.
#pragma once

#include "hopshard/comm/registry.hpp"

namespace hopshard::detail {

BackendInfo describe_mpi();
BackendInfo describe_nccl();
BackendInfo describe_ofi();
BackendInfo describe_shm();

}  // namespace hopshard::detail
