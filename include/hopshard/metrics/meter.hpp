// Named integer counters: calls, bytes, microseconds, peaks. One Meter per rank; whoever counts is
// handed the Meter, there is no global one. Next: comm/recording.hpp, its main writer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace hopshard {

/// Counters by name; names are paths such as "comm/sharding/all_gather/unshard/calls".
///
/// Threads: all members may be called from any thread.
class Meter {
 public:
  Meter() = default;
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  /// Adds to a counter, which starts at 0.
  void add(std::string_view name, std::int64_t amount = 1);

  /// Raises a counter to `value` if that is more.
  void record_peak(std::string_view name, std::int64_t value);

  /// The counter's value; 0 if nobody wrote it.
  [[nodiscard]] std::int64_t value(std::string_view name) const;

  /// A copy of all counters, sorted by name.
  [[nodiscard]] std::map<std::string, std::int64_t> counters() const;

  /// Forgets all counters.
  void reset();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::int64_t, std::less<>> counters_;
};

/// Adds the microseconds of its own life to `<name>_us` and 1 to `<name>_calls`.
///
/// Lifetime: the Meter must outlive it.
class ScopedTimer {
 public:
  ScopedTimer(Meter& meter, std::string_view name);
  ~ScopedTimer();
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  Meter& meter_;
  std::string name_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace hopshard
