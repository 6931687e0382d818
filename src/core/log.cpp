#include "hopshard/core/log.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

namespace hopshard {
namespace {

constexpr int kNoRank = -1;
constexpr int kLevelFromEnvironment = -1;
constexpr std::array<std::string_view, 5> kLevelNames{"debug", "info", "warning", "error", "off"};

thread_local int t_rank = kNoRank;
std::atomic<int> g_rank{kNoRank};
std::atomic<int> g_level{kLevelFromEnvironment};

struct State {
  std::mutex mutex;
  LogSink sink;
  std::set<std::string, std::less<>> seen_keys;
};

// Never destroyed: destructors of other static objects may still log.
State& state() {
  static State* const kState = new State;
  return *kState;
}

LogLevel level_of_environment() noexcept {
  try {
    return env().log_level;
  } catch (const Error&) {
    return Env{}.log_level;
  }
}

LogLevel current_level() noexcept {
  int level = g_level.load(std::memory_order_relaxed);
  if (level == kLevelFromEnvironment) {
    level = static_cast<int>(level_of_environment());
    int expected = kLevelFromEnvironment;
    if (!g_level.compare_exchange_strong(expected, level)) level = expected;
  }
  return static_cast<LogLevel>(level);
}

std::string make_line(LogLevel level, std::string_view message) {
  const int rank = t_rank == kNoRank ? g_rank.load(std::memory_order_relaxed) : t_rank;
  const std::string_view name = kLevelNames[static_cast<std::size_t>(level)];
  if (rank == kNoRank) return detail::concatenate("[hopshard ", name, "] ", message);
  return detail::concatenate("[hopshard ", name, " rank ", rank, "] ", message);
}

void write_line(State& log, LogLevel level, std::string line) {
  if (log.sink) {
    log.sink(level, line);
    return;
  }
  // One write per line, so that lines of several processes on one terminal do not mix.
  line.push_back('\n');
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void set_thread_log_rank(int global_rank) noexcept {
  t_rank = global_rank < 0 ? kNoRank : global_rank;
}

void set_process_log_rank(int global_rank) noexcept {
  g_rank.store(global_rank < 0 ? kNoRank : global_rank, std::memory_order_relaxed);
}

bool is_logged(LogLevel level) noexcept {
  return level != LogLevel::kOff && level >= current_level();
}

void log_message(LogLevel level, std::string_view message) noexcept {
  if (!is_logged(level)) return;
  try {
    std::string line = make_line(level, message);
    State& log = state();
    const std::lock_guard lock(log.mutex);
    write_line(log, level, std::move(line));
  } catch (...) {  // Out of memory or a sink that throws: a lost line must not become a crash.
  }
}

void log_message_once(LogLevel level, std::string_view key, std::string_view message) noexcept {
  if (!is_logged(level)) return;
  try {
    std::string line = make_line(level, message);
    State& log = state();
    const std::lock_guard lock(log.mutex);
    if (!log.seen_keys.emplace(key).second) return;
    write_line(log, level, std::move(line));
  } catch (...) {  // As in log_message().
  }
}

LogSink set_log_sink(LogSink sink) {
  State& log = state();
  const std::lock_guard lock(log.mutex);
  return std::exchange(log.sink, std::move(sink));
}

void set_log_level(LogLevel level) noexcept {
  g_level.store(static_cast<int>(level), std::memory_order_relaxed);
}

}  // namespace hopshard
