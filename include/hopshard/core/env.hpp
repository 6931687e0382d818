// Every HOPSHARD_* environment variable: name, legal values, default, in one table. No other file
// calls getenv. docs/environment.md is checked against this file. Next: log.hpp.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace hopshard {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// The settings that the environment can change; members hold the defaults.
struct Env {
  /// HOPSHARD_LOG_LEVEL: the least severe messages that are printed.
  LogLevel log_level = LogLevel::kInfo;
  /// HOPSHARD_TIMEOUT_S: how long a collective waits for its peers.
  std::chrono::milliseconds timeout{300'000};
  /// HOPSHARD_RANKS_PER_NODE: overrides what the launcher says, e.g. to play several nodes on one.
  std::optional<int> ranks_per_node;
};

/// One line of docs/environment.md.
struct EnvVariable {
  std::string_view name;
  std::string_view legal;
  std::string_view default_value;
  std::string_view meaning;
};

/// All variables, in the order of Env's members.
[[nodiscard]] const std::array<EnvVariable, 3>& env_variables() noexcept;

/// Yields a variable's value, or nothing if it is not set.
using EnvLookup = std::function<std::optional<std::string>(std::string_view name)>;

/// An empty value counts as not set.
/// @throws ConfigError  naming the variable, its value and what is legal.
[[nodiscard]] Env parse_env(const EnvLookup& lookup);

/// The process's environment, read at the first call and kept.
/// @throws ConfigError  as parse_env(); the next call reads again.
[[nodiscard]] const Env& env();

}  // namespace hopshard
