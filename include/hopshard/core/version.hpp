// The version of the library, as in CMakeLists.txt.
#pragma once

#include <string_view>

namespace hopshard {

/// "major.minor.patch".
[[nodiscard]] std::string_view version() noexcept;

}  // namespace hopshard
