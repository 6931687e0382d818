#include "hopshard/core/stream.hpp"

#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "hopshard/core/ordered_worker.hpp"

namespace hopshard {

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;

  void finish() {
    {
      const std::lock_guard lock(mutex);
      done = true;
    }
    changed.notify_all();
  }
};

bool Event::is_done() const {
  if (!state_) {
    return true;
  }
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Event::wait() const {
  if (state_) {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->done; });
  }
}

struct Stream::State {
  explicit State(const StreamOptions& options)
      : max_delay(options.max_delay), random(options.seed), worker(options.name) {}

  /// On the stream's thread alone.
  void delay() {
    if (max_delay.count() > 0) {
      std::uniform_int_distribution<std::int64_t> delay(0, max_delay.count());
      std::this_thread::sleep_for(std::chrono::microseconds{delay(random)});
    }
  }

  std::chrono::microseconds max_delay;
  std::mt19937_64 random;
  OrderedWorker worker;  // Last: its thread uses the others until it ends.
};

Stream::Stream(StreamOptions options) : state_(std::make_unique<State>(options)) {}

Stream::~Stream() = default;

void Stream::submit(std::function<void()> task) {
  state_->worker.submit([state = state_.get(), task = std::move(task)] {
    state->delay();
    task();
  });
}

Event Stream::record() {
  auto place = std::make_shared<Event::State>();
  submit([place] { place->finish(); });
  return Event(std::move(place));
}

void Stream::wait(const Event& event) {
  submit([event] { event.wait(); });
}

}  // namespace hopshard
