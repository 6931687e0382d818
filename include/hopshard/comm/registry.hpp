// Which backends this build has, and why not the others. An explicit list: no backend registers
// itself from a static initialiser. Next: process_groups.hpp.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/store.hpp"

namespace hopshard {

/// What a backend needs to connect a group for the first time.
struct ConnectOptions {
  StorePtr store;  ///< Fresh keys: prefix it if a group is connected again.
  Group group;
  std::chrono::milliseconds timeout{0};  ///< Of connecting, and of calls that name none.
};

struct BackendInfo {
  std::string name;
  std::string summary;                 ///< One line for a user who chooses.
  std::optional<std::string> why_not;  ///< Empty: available.
  /// Collective: the group. Null for backends that are made otherwise; see their headers.
  CommunicatorPtr (*connect)(const ConnectOptions& options) = nullptr;
};

/// All known backends, the reference first.
[[nodiscard]] const std::vector<BackendInfo>& backends();

/// Returns the backend's entry.
/// @throws ConfigError  unknown name (lists the known ones), or not available (says why).
const BackendInfo& require_backend(std::string_view name);

/// The first communicator of a group; all others are split from it. Collective: the group.
/// @throws ConfigError  see require_backend, or the backend is made otherwise; InvalidArgument,
///                      CommError, TimeoutError.
[[nodiscard]] CommunicatorPtr connect_backend(std::string_view name, const ConnectOptions& options);

}  // namespace hopshard
