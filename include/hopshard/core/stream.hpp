// Order between what runs beside the caller: streams and events as on a GPU, on threads (D11).
// A stream with delays is the device `sim`: whatever is not ordered by an event will sooner or
// later happen in the wrong order. Next: comm/decorators.hpp, which puts collectives on one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace hopshard {

/// A place in a stream. Copies are the same place; a new one has been passed.
///
/// Threads: any.
class Event {
 public:
  Event() = default;
  /// Everything that was submitted before record() has run.
  [[nodiscard]] bool is_done() const;
  /// Makes the calling thread wait until it has.
  void wait() const;

 private:
  friend class Stream;
  struct State;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

struct StreamOptions {
  std::string name = "hs-stream";  ///< Of the thread, for debuggers.
  std::uint64_t seed = 0;
  std::chrono::microseconds max_delay{0};  ///< Uniform, before each task and each event.
};

/// Runs tasks one after the other, in the order of their submission.
///
/// Threads: all members may be called from any thread but the stream's own.
class Stream {
 public:
  explicit Stream(StreamOptions options = {});
  /// Runs what was submitted.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// @param task  must not throw.
  void submit(std::function<void()> task);
  [[nodiscard]] Event record();
  /// What is submitted from here on runs after `event`, of any stream. Does not block the caller.
  void wait(const Event& event);
  void synchronize() { record().wait(); }

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hopshard
