// Every HOPSHARD_* environment variable: name, legal values, default, in one table. No other file
// calls getenv. docs/environment.md is checked against this file. Next: log.hpp.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <span>
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
  /// HOPSHARD_BACKEND: the transport; names are checked against the registry by who uses it.
  std::string backend = "auto";
  /// HOPSHARD_NODE_ID: the name of this rank's node instead of its host name.
  std::string node_id;
  /// HOPSHARD_LINK_COSTS: a file that `hopshard tune` wrote.
  std::string link_costs;
  /// HOPSHARD_TRACE_FOLDER: where ranks write traces; used by the Python package.
  std::string trace_folder;
  /// HOPSHARD_OFI_PROVIDER: libfabric's provider; empty: chosen by the `ofi` backend.
  std::string ofi_provider;
  /// HOPSHARD_OFI_INTERFACE: names or addresses, separated by commas; one network card each.
  std::string ofi_interface;
  /// HOPSHARD_OFI_ALLOW_TCP: whether a machine with EFA devices may use sockets instead.
  bool ofi_allow_tcp = false;
};

/// One line of docs/environment.md.
struct EnvVariable {
  std::string_view name;
  std::string_view legal;
  std::string_view default_value;
  std::string_view meaning;
};

/// All variables, in the order of Env's members.
[[nodiscard]] std::span<const EnvVariable> env_variables() noexcept;

/// Yields a variable's value, or nothing if it is not set.
using EnvLookup = std::function<std::optional<std::string>(std::string_view name)>;

/// An empty value counts as not set.
/// @throws ConfigError  naming the variable, its value and what is legal.
[[nodiscard]] Env parse_env(const EnvLookup& lookup);

/// The process's environment, read at the first call and kept.
/// @throws ConfigError  as parse_env(); the next call reads again.
[[nodiscard]] const Env& env();

/// A variable that a launcher such as mpirun sets, e.g. to tell whether it started this process.
[[nodiscard]] std::optional<std::string> launcher_variable(std::string_view name);

}  // namespace hopshard
