#include "../backends.hpp"

namespace hopshard::detail {

BackendInfo describe_nccl() {
  return {"nccl", "NVIDIA GPUs over NCCL", "this build does not have it", nullptr};
}

}  // namespace hopshard::detail
