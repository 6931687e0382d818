// The other processes of a group: whether they live, and reading and writing their private memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memory.hpp"

namespace hopshard::detail::shm {

/// Who a rank's process is, for ranks on the same host.
struct ProcessIdentity {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< In clock ticks since boot; tells a reused pid.

  [[nodiscard]] static ProcessIdentity of_self();
  [[nodiscard]] static ProcessIdentity of(std::int64_t pid);
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

/// Sees the end of one process, at once even if it is not reaped yet. Through a pidfd; where that
/// is refused or pids mean nothing (another pid namespace), through a lock on a file that the
/// kernel drops when the process ends.
class LifeLine {
 public:
  /// @param lock_file  shared by all, each rank with an open() of its own; rank `member` holds a
  ///                   lock on byte `member`.
  LifeLine(ProcessIdentity process, bool use_pid, int lock_file, std::size_t member);
  [[nodiscard]] bool is_dead() const;
  [[nodiscard]] std::int64_t pid() const { return process_.pid; }

 private:
  ProcessIdentity process_;
  bool is_self_ = false;
  bool is_gone_ = false;
  File pidfd_;
  int lock_file_ = -1;
  std::size_t member_ = 0;
};

/// Holds the lock that LifeLine looks at, as long as `lock_file` is open.
void hold_life_lock(int lock_file, std::size_t member);

/// Whole or not at all. @throws CommError
void read_process_memory(std::int64_t pid, void* to, std::uint64_t from, std::size_t num_bytes);
void write_process_memory(std::int64_t pid, std::uint64_t to, const void* from,
                          std::size_t num_bytes);

}  // namespace hopshard::detail::shm
