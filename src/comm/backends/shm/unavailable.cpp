#include "../backends.hpp"

namespace hopshard::detail {

BackendInfo describe_shm() {
  return {"shm", "ranks of one host over shared memory", "this build does not have it", nullptr};
}

}  // namespace hopshard::detail
