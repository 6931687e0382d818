#include "hopshard/core/env.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

constexpr double kMaxTimeoutS = 86'400.0;
constexpr int kMaxRanksPerNode = 65'536;

constexpr auto kVariables = std::to_array<EnvVariable>({
    {"HOPSHARD_LOG_LEVEL", "debug, info, warning, error, off", "info",
     "The least severe messages that are printed to stderr."},
    {"HOPSHARD_TIMEOUT_S", "a number of seconds above 0, at most 86400", "300",
     "How long a collective waits for its peers before it raises TimeoutError."},
    {"HOPSHARD_RANKS_PER_NODE", "a whole number from 1 to 65536", "what the launcher says",
     "Ranks per node; on one machine it lets several nodes be played."},
    {"HOPSHARD_BACKEND", "auto, a backend's name, or one inside nodes and one between: shm+c10d",
     "auto", "The transport of the collectives; hopshard doctor lists them."},
    {"HOPSHARD_NODE_ID", "any text", "the host name",
     "The node that this rank is on: ranks with equal ids share a node."},
    {"HOPSHARD_LINK_COSTS", "a path", "built-in costs",
     "A file that hopshard tune wrote: flat or two-level collectives are chosen by it."},
    {"HOPSHARD_TRACE_FOLDER", "a path", "no traces",
     "Where every rank writes a trace of its steps; set by hopshard trace."},
    {"HOPSHARD_OFI_PROVIDER", "auto, or a name that fi_info prints: efa, tcp, net, shm", "auto",
     "The libfabric provider of the ofi backend; auto takes efa where there is one, else tcp."},
    {"HOPSHARD_OFI_INTERFACE", "interface names or addresses, separated by commas",
     "all EFA cards; else one interface",
     "The network cards of the ofi backend; large messages are spread over them."},
    {"HOPSHARD_OFI_ALLOW_TCP", "0, 1", "0",
     "1 lets the ofi backend use sockets on a machine that has EFA devices."},
});

constexpr std::array<std::string_view, 5> kLevelNames{"debug", "info", "warning", "error", "off"};

[[noreturn]] void reject(const EnvVariable& variable, std::string_view value) {
  throw ConfigError(
      detail::concatenate(variable.name, "='", value, "': legal is ", variable.legal));
}

LogLevel parse_level(const EnvVariable& variable, std::string_view value) {
  for (std::size_t i = 0; i < kLevelNames.size(); ++i) {
    if (value == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  reject(variable, value);
}

// The whole text must be one number: "5s" or "1 2" is a mistake, not a 5 or a 1.
template <typename Number>
Number parse_number(const EnvVariable& variable, std::string_view value) {
  Number number{};
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{} || stop != end) reject(variable, value);
  return number;
}

std::chrono::milliseconds parse_seconds(const EnvVariable& variable, std::string_view value) {
  const double seconds = parse_number<double>(variable, value);
  if (!(seconds > 0.0) || seconds > kMaxTimeoutS) reject(variable, value);
  return std::chrono::milliseconds{static_cast<long>(std::ceil(seconds * 1000.0))};
}

int parse_ranks(const EnvVariable& variable, std::string_view value) {
  const int ranks = parse_number<int>(variable, value);
  if (ranks < 1 || ranks > kMaxRanksPerNode) reject(variable, value);
  return ranks;
}

bool parse_flag(const EnvVariable& variable, std::string_view value) {
  if (value != "0" && value != "1") reject(variable, value);
  return value == "1";
}

std::optional<std::string> read_process_environment(std::string_view name) {
  // Nothing in this process calls setenv. NOLINTNEXTLINE(concurrency-mt-unsafe)
  const char* value = std::getenv(std::string(name).c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

std::span<const EnvVariable> env_variables() noexcept { return kVariables; }

Env parse_env(const EnvLookup& lookup) {
  const auto& [log_level, timeout, ranks_per_node, backend, node_id, link_costs, trace_folder,
               ofi_provider, ofi_interface, ofi_allow_tcp] = kVariables;
  const auto value_of = [&](const EnvVariable& variable) {
    std::optional<std::string> value = lookup(variable.name);
    if (value && value->empty()) value.reset();
    return value;
  };
  Env result;
  if (const auto value = value_of(log_level)) result.log_level = parse_level(log_level, *value);
  if (const auto value = value_of(timeout)) result.timeout = parse_seconds(timeout, *value);
  if (const auto value = value_of(ranks_per_node)) {
    result.ranks_per_node = parse_ranks(ranks_per_node, *value);
  }
  result.backend = value_of(backend).value_or(result.backend);
  result.node_id = value_of(node_id).value_or("");
  result.link_costs = value_of(link_costs).value_or("");
  result.trace_folder = value_of(trace_folder).value_or("");
  result.ofi_provider = value_of(ofi_provider).value_or("");
  result.ofi_interface = value_of(ofi_interface).value_or("");
  if (const auto value = value_of(ofi_allow_tcp)) {
    result.ofi_allow_tcp = parse_flag(ofi_allow_tcp, *value);
  }
  return result;
}

const Env& env() {
  static const Env kEnv = parse_env(read_process_environment);
  return kEnv;
}

std::optional<std::string> launcher_variable(std::string_view name) {
  return read_process_environment(name);
}

}  // namespace hopshard
