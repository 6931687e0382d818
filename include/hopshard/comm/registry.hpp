// Which backends this build has, and why not the others. An explicit list: no backend registers
// itself from a static initialiser. Next: process_groups.hpp.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hopshard {

struct BackendInfo {
  std::string name;
  std::string summary;                 ///< One line for a user who chooses.
  std::optional<std::string> why_not;  ///< Empty: available.
};

/// All known backends, the reference first.
[[nodiscard]] const std::vector<BackendInfo>& backends();

/// Returns the backend's entry.
/// @throws ConfigError  unknown name (lists the known ones), or not available (says why).
const BackendInfo& require_backend(std::string_view name);

}  // namespace hopshard
