#include "../backends.hpp"

namespace hopshard::detail {

BackendInfo describe_ofi() {
  return {"ofi", "libfabric: EFA between nodes on AWS, tcp elsewhere",
          "this build does not have it", nullptr};
}

}  // namespace hopshard::detail
