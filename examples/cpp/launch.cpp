#include "launch.hpp"

#include <charconv>
#include <csignal>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hopshard/comm/c10d.hpp"
#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"

namespace example {

namespace {

std::string require_variable(std::string_view name) {
  const std::optional<std::string> value = hopshard::launcher_variable(name);
  HOPSHARD_CHECK(value && !value->empty(), ConfigError, "RANK is set but ", name,
                 " is not; start the program with 'hopshard run' or torchrun, which set both");
  return *value;
}

int require_number(std::string_view name) {
  const std::string text = require_variable(name);
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  HOPSHARD_CHECK(error == std::errc() && stop == end && number >= 0, ConfigError, name, "='", text,
                 "' is not a number");
  return number;
}

}  // namespace

Launch join_launch() {
  Launch launch;
  if (!hopshard::launcher_variable("RANK")) {
    launch.store = hopshard::make_memory_store();
    return launch;
  }
  launch.rank = require_number("RANK");
  launch.size = require_number("WORLD_SIZE");
  launch.ranks_per_node =
      hopshard::env().ranks_per_node.value_or(require_number("LOCAL_WORLD_SIZE"));

  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(require_number("MASTER_PORT"));
  // torchrun's agent, which `hopshard run` uses too, serves a store for the ranks.
  const bool agent_serves = hopshard::launcher_variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  options.isServer = launch.rank == 0 && !agent_serves;
  options.waitWorkers = false;
  options.timeout = hopshard::env().timeout;
  launch.store =
      hopshard::make_prefix_store(hopshard::make_c10d_store(c10::make_intrusive<c10d::TCPStore>(
                                      require_variable("MASTER_ADDR"), options)),
                                  "hopshard_cpp");
  return launch;
}

void restore_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGABRT, SIGBUS, SIGILL, SIGSEGV}) {
    std::signal(signal, SIG_DFL);
  }
}

}  // namespace example
