// Sleeping on a word of memory, within a process or between several.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace hopshard::detail::shm {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

/// Sleeps while `word` is `seen`, for `limit` at most; may return for no reason.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::microseconds limit) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = seconds.count();
  time.tv_nsec = std::chrono::nanoseconds(limit - seconds).count();
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

inline void futex_wake(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hopshard::detail::shm
