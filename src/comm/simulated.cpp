// The device `sim`: collectives on a stream with delays, over memory that says when it is used too
// early or too late. On a GPU the same mistakes are silent, and rare.
//   issue      outputs are filled with NaN: who does not wait reads them
//   later      inputs are read then, not at issue: who changes them, or gives their memory away
//              (BufferPool fills it with NaN), sends something else
//   at its end inputs that hold no defined value afterwards are filled with NaN
#include <algorithm>
#include <exception>
#include <utility>

#include "completion.hpp"
#include "hopshard/comm/decorators.hpp"
#include "hopshard/comm/memory.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/stream.hpp"

namespace hopshard {
namespace {

/// A call without a time limit of its own ends by that of the inner communicator.
constexpr std::chrono::hours kNoLimit{1};

struct Bytes {
  explicit Bytes(const at::Tensor& tensor)
      : begin(static_cast<char*>(tensor.data_ptr())), end(begin + tensor.nbytes()) {}
  char* begin;
  char* end;
};

/// With NaN.
void fill_all_but(const at::Tensor& kept, const at::Tensor& tensor) {
  const Bytes all(tensor);
  const Bytes spared(kept);
  char* const first = std::clamp(spared.begin, all.begin, all.end);
  char* const last = std::clamp(spared.end, first, all.end);
  fill_with_nan(all.begin, first - all.begin);
  fill_with_nan(last, all.end - last);
}

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(CommunicatorPtr inner, SimulatedOptions options)
      : Communicator(inner->group()),
        inner_(std::move(inner)),
        options_(options),
        num_exceptions_(std::uncaught_exceptions()),
        stream_(
            {.name = "hs-sim",
             .seed = options.seed * 1'000'003u + static_cast<std::uint64_t>(group().global_rank()),
             .max_delay = options.max_delay}) {}

  ~SimulatedCommunicator() override {
    if (std::uncaught_exceptions() > num_exceptions_) {
      inner_->abort("dropped while an error is handled");
    }
  }

  [[nodiscard]] std::string_view backend() const noexcept override { return inner_->backend(); }
  [[nodiscard]] Algorithm algorithm(CollectiveOp op, std::int64_t num_bytes) const override {
    return inner_->algorithm(op, num_bytes);
  }
  void abort(std::string_view reason) override { inner_->abort(reason); }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    fill_all_but(input, output);
    return launch(options, [this, output, input, options] {
      inner_->all_gather(output, input, options)->wait();
    });
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    if (!options.accumulate) {
      fill_all_but(input, output);
    }
    return launch(options, [this, output, input, op, options] {
      inner_->reduce_scatter(output, input, op, options)->wait();
      fill_all_but(output, input);
    });
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    return launch(options,
                  [this, tensor, op, options] { inner_->all_reduce(tensor, op, options)->wait(); });
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    if (rank() != root) {
      fill_with_nan(static_cast<char*>(tensor.data_ptr()),
                    static_cast<std::int64_t>(tensor.nbytes()));
    }
    return launch(options, [this, tensor, root, options] {
      inner_->broadcast(tensor, root, options)->wait();
    });
  }

  void do_barrier(const CommOptions& options) override {
    launch(options, [this, options] { inner_->barrier(options); })->wait();
  }

  // One thread at a time may call `inner`: what does not run on the stream waits for it.
  CommunicatorPtr do_split(Group part) override {
    stream_.synchronize();
    return make_simulated_communicator(inner_->split(std::move(part)), options_);
  }
  at::Tensor do_allocate(std::int64_t num_bytes) override {
    stream_.synchronize();
    return inner_->allocate(num_bytes);
  }
  void do_register_memory(const at::Tensor& memory) override {
    stream_.synchronize();
    inner_->register_memory(memory);
  }

  template <typename Task>
  WorkPtr launch(const CommOptions& options, Task task) {
    auto completion = std::make_shared<detail::Completion>();
    stream_.submit([completion, task = std::move(task)]() mutable {
      std::exception_ptr error;
      try {
        const Task run = std::move(task);
        run();
      } catch (const std::exception&) {
        error = std::current_exception();
      }
      // Handed over when nothing here refers to it any more: see Completion::take_error().
      if (error) {
        completion->fail(std::move(error));
      } else {
        completion->finish();
      }
    });
    const auto limit =
        options.timeout.count() > 0 ? 2 * options.timeout : std::chrono::milliseconds(kNoLimit);
    return detail::make_completion_work(std::move(completion), limit, [this](bool unwinding) {
      inner_->abort(unwinding ? "a work was dropped while an error was handled"
                              : "an operation of the simulated stream did not end");
    });
  }

  CommunicatorPtr inner_;
  SimulatedOptions options_;
  int num_exceptions_;
  Stream stream_;  // Last: its tasks use the others.
};

}  // namespace

CommunicatorPtr make_simulated_communicator(CommunicatorPtr inner, SimulatedOptions options) {
  HOPSHARD_CHECK(inner != nullptr, InvalidArgument,
                 "a simulated communicator needs the communicator that it carries");
  HOPSHARD_CHECK(options.max_delay.count() >= 0, InvalidArgument, "max_delay is ",
                 options.max_delay.count(), " us; delays cannot be negative");
  return std::make_shared<SimulatedCommunicator>(std::move(inner), options);
}

}  // namespace hopshard
