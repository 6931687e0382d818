// One thread that runs tasks in the order in which they came. Next: log.hpp.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace hopshard {

/// Threads: all members may be called from any thread but the worker's own.
class OrderedWorker {
 public:
  /// @param name  of the thread, for debuggers; at most 15 characters are kept.
  explicit OrderedWorker(const std::string& name);
  /// Runs what was submitted, then ends the thread.
  ~OrderedWorker();
  OrderedWorker(const OrderedWorker&) = delete;
  OrderedWorker& operator=(const OrderedWorker&) = delete;

  /// @param task  must not throw.
  void submit(std::function<void()> task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hopshard
