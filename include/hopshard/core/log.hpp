// Messages for people, on stderr, one line each, with level and rank. Not for metrics.
// The level comes from HOPSHARD_LOG_LEVEL. Next: topology/group_layout.hpp.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {

/// Receives finished lines without a line break; called under a lock, one at a time.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

/// The rank that lines of this thread carry; negative removes it. Ranks as threads each set their
/// own; a thread that has none uses the one given to set_process_log_rank().
void set_thread_log_rank(int global_rank) noexcept;
void set_process_log_rank(int global_rank) noexcept;

/// An illegal HOPSHARD_LOG_LEVEL is no reason to fail here: it counts as the default, because
/// start-up reads env() too and reports it there.
[[nodiscard]] bool is_logged(LogLevel level) noexcept;

/// Prints "[hopshard <level> rank <r>] <message>". Thread-safe; never throws, so destructors may
/// use it.
void log_message(LogLevel level, std::string_view message) noexcept;

/// As log_message(), but only the first time that this process sees `key`.
void log_message_once(LogLevel level, std::string_view key, std::string_view message) noexcept;

/// Replaces where lines go and returns what was there; an empty sink means stderr.
LogSink set_log_sink(LogSink sink);

/// Replaces the level of the environment for this process.
void set_log_level(LogLevel level) noexcept;

/// Logs the concatenated parts; they are evaluated only if the level is printed.
#define HOPSHARD_LOG(level, ...)                                             \
  do {                                                                       \
    if (::hopshard::is_logged(::hopshard::LogLevel::level)) {                \
      ::hopshard::log_message(::hopshard::LogLevel::level,                   \
                              ::hopshard::detail::concatenate(__VA_ARGS__)); \
    }                                                                        \
  } while (false)

}  // namespace hopshard
