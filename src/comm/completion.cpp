#include "completion.hpp"

#include <utility>

#include "hopshard/core/log.hpp"

namespace hopshard::detail {
namespace {

class CompletionWork final : public Work {
 public:
  CompletionWork(std::shared_ptr<Completion> completion, std::chrono::milliseconds limit,
                 std::function<void(bool)> give_up)
      : completion_(std::move(completion)),
        deadline_(std::chrono::steady_clock::now() + limit),
        give_up_(std::move(give_up)),
        num_exceptions_(std::uncaught_exceptions()) {}

  ~CompletionWork() override {
    if (waited_) {
      return;
    }
    try {
      if (std::uncaught_exceptions() > num_exceptions_ && !completion_->is_done()) {
        give_up_(/*unwinding=*/true);
      }
      wait();
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kError, "a work was dropped without wait() and failed: ", error.what());
    }
  }

  void wait() override {
    if (!waited_) {
      waited_ = true;
      wait_once();
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  bool test() override { return completion_->is_done(); }

 private:
  void wait_once() {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
    if (!completion_->wait_for(std::max(left, std::chrono::milliseconds{0}))) {
      give_up_(/*unwinding=*/false);
      // The buffers belong to the thread that moves the data until it says otherwise.
      while (!completion_->wait_for(std::chrono::hours(1))) {
      }
    }
    error_ = completion_->take_error();
  }

  std::shared_ptr<Completion> completion_;
  std::chrono::steady_clock::time_point deadline_;
  std::function<void(bool)> give_up_;
  int num_exceptions_;
  std::exception_ptr error_;
  bool waited_ = false;
};

}  // namespace

void Completion::finish() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
}

void Completion::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (done_) {
      return;
    }
    done_ = true;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

bool Completion::is_done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool Completion::wait_for(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return done_; });
}

std::exception_ptr Completion::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, nullptr);
}

WorkPtr make_completion_work(std::shared_ptr<Completion> completion,
                             std::chrono::milliseconds limit,
                             std::function<void(bool unwinding)> give_up) {
  return std::make_unique<CompletionWork>(std::move(completion), limit, std::move(give_up));
}

}  // namespace hopshard::detail
