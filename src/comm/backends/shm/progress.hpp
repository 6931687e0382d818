// Keeps operations going that nobody waits for: one thread per process, started with the first such
// operation, which polls while there are any and sleeps while there are none.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace hopshard::detail::shm {

class SharedGroup;

/// Threads: all members may be called from any thread.
class Progress {
 public:
  /// Of this process; a forked child starts with none.
  static Progress& of_process();

  void add(const std::shared_ptr<SharedGroup>& group);
  /// An operation is in flight.
  void notice();
  /// Drives all groups of the process that nobody waits for; true if any has operations in flight.
  /// @param examine  look for dead peers too.
  bool drive_unattended(bool examine = false);

 private:
  void run();

  std::mutex mutex_;
  std::vector<std::weak_ptr<SharedGroup>> groups_;
  bool is_started_ = false;
  std::atomic<std::uint32_t> is_asleep_ = 1;  ///< A futex; "not started yet" counts as asleep.
};

}  // namespace hopshard::detail::shm
