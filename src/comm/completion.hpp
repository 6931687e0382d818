// The end of an operation that another thread carries out, and the Work that waits for it: for
// backends with a progress thread, so that each has the same rules for dropped and repeated waits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "hopshard/comm/work.hpp"

namespace hopshard::detail {

/// Finished or failed once; the first of both counts.
///
/// Threads: all members may be called from any thread.
class Completion {
 public:
  void finish();
  void fail(std::exception_ptr error);
  [[nodiscard]] bool is_done() const;
  /// Waits at most for `limit`; true once done. Does not throw the error.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds limit);
  /// Requires is_done(). The error that it failed with, or null; the caller's from here on. One
  /// thread ends what it caught: references to exceptions are counted where race detectors are
  /// blind.
  [[nodiscard]] std::exception_ptr take_error();

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

/// A Work that ends with `completion`, which has to come within `limit`.
/// @param give_up  called once if it did not: must make the completion fail, at once or soon, with
///                 a TimeoutError that says who did not arrive. Also called (with true) if the Work
///                 is dropped while an exception unwinds: then nobody should wait for the peers.
[[nodiscard]] WorkPtr make_completion_work(std::shared_ptr<Completion> completion,
                                           std::chrono::milliseconds limit,
                                           std::function<void(bool unwinding)> give_up);

}  // namespace hopshard::detail
