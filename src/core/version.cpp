#include "hopshard/core/version.hpp"

namespace hopshard {

std::string_view version() noexcept { return HOPSHARD_VERSION; }

}  // namespace hopshard
