// A file of its own, without pybind11, because the generated header changes with every source.
#include "build_id.hpp"

#include <string_view>

namespace hopshard::python {

std::string_view build_id() noexcept { return HOPSHARD_BUILD_ID; }

}  // namespace hopshard::python
