// A collective in flight. Next: communicator.hpp.
#pragma once

#include <exception>
#include <memory>

namespace hopshard {

/// A collective in flight; used by one thread.
///
/// Lifetime: dropping a Work that was not waited for waits in its destructor, logs what went
/// wrong and never throws, because the peers may still read this rank's buffers.
class Work {
 public:
  Work() = default;
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Makes the caller (CPU: this thread) wait for the result. Idempotent.
  /// @throws TimeoutError, CommError  naming backend, op, tag, group and rank.
  virtual void wait() = 0;

  /// True once wait() would return, or throw, without waiting for another rank. Never blocks.
  [[nodiscard]] virtual bool test() = 0;
};
using WorkPtr = std::unique_ptr<Work>;

/// For works of a group that has failed: waits, and returns the work's error if it is a reason
/// (ScheduleError, TimeoutError) and `cause` is null, else `cause`. Calls that come after a failure
/// only say that there was one.
[[nodiscard]] std::exception_ptr find_cause(Work& work, std::exception_ptr cause) noexcept;

/// A Work whose result is already there.
[[nodiscard]] WorkPtr make_finished_work();

}  // namespace hopshard
