#include "hopshard/comm/decorators.hpp"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "describe.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

class DelayedWork final : public Work {
 public:
  DelayedWork(WorkPtr inner, std::chrono::microseconds delay)
      : inner_(std::move(inner)), delay_(delay) {}

  void wait() override {
    std::this_thread::sleep_for(std::exchange(delay_, std::chrono::microseconds{0}));
    inner_->wait();
  }

  bool test() override { return inner_->test(); }

 private:
  WorkPtr inner_;
  std::chrono::microseconds delay_;
};

class DelayedCommunicator final : public Communicator {
 public:
  DelayedCommunicator(CommunicatorPtr inner, DelayedOptions options)
      : Communicator(inner->group()),
        inner_(std::move(inner)),
        options_(options),
        random_(options.seed * 1'000'003u + static_cast<std::uint64_t>(group().global_rank())) {}

  [[nodiscard]] std::string_view backend() const noexcept override { return inner_->backend(); }
  [[nodiscard]] Algorithm algorithm(CollectiveOp op, std::int64_t num_bytes) const override {
    return inner_->algorithm(op, num_bytes);
  }
  void group_begin() override { inner_->group_begin(); }
  void group_end() override { inner_->group_end(); }

  void abort(std::string_view reason) override {
    {
      const std::lock_guard lock(mutex_);
      if (!aborted_) {
        aborted_ = std::string(reason);
      }
    }
    changed_.notify_all();
    inner_->abort(reason);
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    before_call("all_gather", options);
    return delayed(inner_->all_gather(std::move(output), std::move(input), options));
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    before_call("reduce_scatter", options);
    return delayed(inner_->reduce_scatter(std::move(output), std::move(input), op, options));
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    before_call("all_reduce", options);
    return delayed(inner_->all_reduce(std::move(tensor), op, options));
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    before_call("broadcast", options);
    return delayed(inner_->broadcast(std::move(tensor), root, options));
  }

  void do_barrier(const CommOptions& options) override {
    before_call("barrier", options);
    inner_->barrier(options);
  }

  CommunicatorPtr do_split(Group part) override {
    return make_delayed_communicator(inner_->split(std::move(part)), options_);
  }

  at::Tensor do_allocate(std::int64_t num_bytes) override { return inner_->allocate(num_bytes); }

  void do_register_memory(const at::Tensor& memory) override { inner_->register_memory(memory); }

  WorkPtr delayed(WorkPtr work) {
    return std::make_unique<DelayedWork>(std::move(work), next_delay());
  }

  std::chrono::microseconds next_delay() {
    std::uniform_int_distribution<std::int64_t> delay(0, options_.max_delay.count());
    return std::chrono::microseconds{delay(random_)};
  }

  void before_call(std::string_view op, const CommOptions& options) {
    const std::int64_t call = num_calls_++;
    std::this_thread::sleep_for(next_delay());
    const auto text = [&] { return detail::describe_call(backend(), op, options.tag, group()); };
    HOPSHARD_CHECK(call != options_.fail_at_call, CommError, text(), ": injected failure at call ",
                   call);
    if (call != options_.hang_at_call) {
      return;
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, options_.hang_limit, [&] { return aborted_.has_value(); });
    throw CommError(detail::concatenate(
        text(), ": injected hang at call ", call,
        aborted_ ? " was aborted: " + *aborted_ : std::string(" ended after its time limit")));
  }

  CommunicatorPtr inner_;
  DelayedOptions options_;
  std::mt19937_64 random_;
  std::int64_t num_calls_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> aborted_;
};

}  // namespace

CommunicatorPtr make_delayed_communicator(CommunicatorPtr inner, DelayedOptions options) {
  HOPSHARD_CHECK(inner != nullptr, InvalidArgument,
                 "a delayed communicator needs the communicator that it delays");
  HOPSHARD_CHECK(options.max_delay.count() >= 0 && options.hang_limit.count() >= 0, InvalidArgument,
                 "delays cannot be negative: max_delay ", options.max_delay.count(),
                 " us, hang_limit ", options.hang_limit.count(), " ms");
  return std::make_shared<DelayedCommunicator>(std::move(inner), options);
}

}  // namespace hopshard
