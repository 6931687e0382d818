#include "backends.hpp"

namespace hopshard::testing {

std::vector<Backend> shm_backends() { return {}; }

}  // namespace hopshard::testing
