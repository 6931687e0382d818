#include "progress.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "futex.hpp"
#include "shared_group.hpp"

namespace hopshard::detail::shm {
namespace {

using std::chrono::microseconds;

constexpr microseconds kPollInterval{200};
constexpr int kRoundsPerExamination = 25;
constexpr int kIdleRoundsBeforeSleep = 50;

std::atomic<Progress*> g_progress = nullptr;

}  // namespace

Progress& Progress::of_process() {
  Progress* progress = g_progress.load(std::memory_order_acquire);
  if (progress == nullptr) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    progress = g_progress.load(std::memory_order_acquire);
    if (progress == nullptr) {
      // The thread does not survive a fork, nor can its locks be trusted in the child. Never
      // destroyed: the thread runs until the process ends.
      static const int kRegistered =
          ::pthread_atfork(nullptr, nullptr, [] { g_progress.store(nullptr); });
      static_cast<void>(kRegistered);
      progress = new Progress;
      g_progress.store(progress, std::memory_order_release);
    }
  }
  return *progress;
}

void Progress::add(const std::shared_ptr<SharedGroup>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& other) { return other.expired(); });
  groups_.push_back(group);
}

void Progress::notice() {
  if (is_asleep_.load(std::memory_order_seq_cst) == 0) {
    return;
  }
  is_asleep_.store(0, std::memory_order_seq_cst);
  futex_wake(is_asleep_);
  const std::lock_guard lock(mutex_);
  if (!is_started_) {
    is_started_ = true;
    std::thread([this] { run(); }).detach();
  }
}

bool Progress::drive_unattended(bool examine) {
  std::vector<std::shared_ptr<SharedGroup>> unattended;
  bool any_pending = false;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& group : groups_) {
      auto alive = group.lock();
      if (alive == nullptr || !alive->has_pending()) {
        continue;
      }
      any_pending = true;
      if (!alive->is_attended()) {
        unattended.push_back(std::move(alive));
      }
    }
  }
  for (const auto& group : unattended) {
    group->try_drive();
    if (examine) {
      group->try_examine();
    }
  }
  return any_pending;
}

void Progress::run() {
  int num_idle_rounds = 0;
  for (unsigned round = 0;; ++round) {
    if (drive_unattended(/*examine=*/round % kRoundsPerExamination == 0)) {
      num_idle_rounds = 0;
    } else if (++num_idle_rounds > kIdleRoundsBeforeSleep) {
      // Say so first and look once more then: an operation issued meanwhile either is seen here,
      // or sees that it must wake this thread.
      is_asleep_.store(1, std::memory_order_seq_cst);
      if (!drive_unattended()) {
        futex_wait(is_asleep_, 1, std::chrono::seconds(3600));
      }
      is_asleep_.store(0, std::memory_order_seq_cst);
      num_idle_rounds = 0;
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace hopshard::detail::shm
