// Over a torch ProcessGroup, by the virtuals of its base class only. What Gloo does badly is done
// here: its reduce-scatter is a whole all-reduce, it sums bf16 in bf16, refuses some dtypes, and
// leaves ranks that wait for a failed rank's neighbour alone until their limit. Long, because
// health, work and communicator share one protocol and would only be read together.
//
// [Note: who issues]
// Ranks compare what they are about to issue, and the transport gets the data only then. A thread
// of the communicator waits for that answer, so the caller goes on. The transport pairs operations
// by their order: with a process group that others use too, only the caller's thread knows the
// order that all ranks have in common, so there the caller waits.
//
// [Note: after a disagreement]
// The ranks used up the same comparison and moved no data, so they are still in step. A rank may
// have issued more meanwhile, its peers less; none of that may reach the transport. So everything
// fails that was issued before the rank learned of the disagreement, by a wait() that threw it, and
// what it issues from then on is compared again.
#include "hopshard/comm/c10d.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "../call_record.hpp"
#include "../completion.hpp"
#include "../describe.hpp"
#include "../reduce_parts.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "hopshard/core/ordered_worker.hpp"

namespace hopshard {
namespace {

using TorchWork = c10::intrusive_ptr<c10d::Work>;

// torch 2.15 renamed these two and deprecated the names that 2.11 knows. Templates, so that only
// the branch that exists is compiled. Goes with support for torch before 2.15.
template <typename ProcessGroup>
TorchWork all_gather_single(ProcessGroup& group, at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

template <typename ProcessGroup>
TorchWork all_to_all_single(ProcessGroup& group, at::Tensor& output, at::Tensor& input,
                            std::vector<std::int64_t>& equal_parts,
                            const c10d::AllToAllOptions& options) {
  if constexpr (requires {
                  group.all_to_all_single(output, input, equal_parts, equal_parts, options);
                }) {
    return group.all_to_all_single(output, input, equal_parts, equal_parts, options);
  } else {
    return group.alltoall_base(output, input, equal_parts, equal_parts, options);
  }
}

using std::chrono::milliseconds;

constexpr std::string_view kBackend = "c10d";

// Up to this many gathered bytes an all-reduce is one all-gather, summed by everybody: one message
// latency instead of two, and the order of the ranks.
constexpr std::int64_t kGatheredSumLimitBytes = 1 << 20;

// How long a wait stays quiet before it asks whether another rank failed, and how often it asks.
constexpr milliseconds kQuietWait{200};
constexpr milliseconds kPollInterval{200};

// Added to the process group's own limit, so that its error, which says more, comes first.
constexpr milliseconds kGrace{1000};

// How long a rank whose operation failed waits for the others to notice, to name those that do not.
// One silent rank is the usual death of one: the shorter limit. More may just be slow to notice.
constexpr milliseconds kNoticeLimit{1500};
constexpr milliseconds kNoticeLimitOfLast{600};

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text =
      torch_error != nullptr ? torch_error->what_without_backtrace() : std::string(error.what());
  return text.substr(0, text.find('\n'));
}

bool says_timed_out(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return text.find("timed out") != std::string::npos;
}

/// What all works of one communicator share: has it failed, here or on another rank?
class GroupHealth {
 public:
  GroupHealth(c10::intrusive_ptr<c10d::Store> store, StorePtr world_store, const Group& group)
      : store_(std::move(store)), world_store_(std::move(world_store)), group_(group) {
    key_ = "hopshard/failed/" + group.name;
    for (const int rank : group.ranks) {
      key_ += detail::concatenate("/", rank);
    }
    if (!world_store_ && store_) {
      world_store_ = make_prefix_store(make_c10d_store(store_), key_);
    }
  }

  /// Marks the group as failed on this rank and tells the others. The first reason stays.
  void fail(const std::string& reason) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (reason_) {
        return;
      }
      reason_ = reason;
      failed_ = true;
    }
    const std::lock_guard lock(store_mutex_);
    try {
      if (!store_) {
        return;
      }
      world_store_->set(noticed_key(group_.global_rank()), "yes");
      if (!store_->check({key_})) {
        store_->set(key_, detail::concatenate("global rank ", group_.global_rank(), ": ", reason));
      }
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kDebug, "could not tell group '", group_.name,
                   "' about a failure: ", error.what());
    }
  }

  /// Members that noticed no failure of any group for a while, though it was told to all: those
  /// that are dead, hang or compute. Call after fail().
  [[nodiscard]] std::vector<int> silent_ranks() noexcept {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<int> silent = group_.ranks;
    for (bool has_looked = false;; has_looked = true) {
      try {
        const std::lock_guard lock(store_mutex_);
        std::erase_if(silent, [&](int rank) {
          return rank == group_.global_rank() ||
                 (world_store_ && world_store_->has(noticed_key(rank)));
        });
      } catch (const std::exception&) {
        // The rank that serves the store has ended meanwhile; what was seen until then counts.
        return has_looked ? silent : std::vector<int>{};
      }
      const auto limit = silent.size() > 1 ? kNoticeLimit : kNoticeLimitOfLast;
      if (silent.empty() || std::chrono::steady_clock::now() > begin + limit) {
        return silent;
      }
      std::this_thread::sleep_for(kPollInterval / 4);
    }
  }

  [[nodiscard]] std::optional<std::string> reason() const {
    if (!failed_) {
      return std::nullopt;
    }
    const std::lock_guard lock(mutex_);
    return reason_;
  }

  /// Asks the store whether another rank of the group failed.
  [[nodiscard]] std::optional<std::string> reason_of_others() {
    const std::lock_guard lock(store_mutex_);
    try {
      if (store_ && store_->check({key_})) {
        const std::vector<std::uint8_t> value = store_->get(key_);
        return "the group failed on " + std::string(value.begin(), value.end());
      }
    } catch (const std::exception& error) {
      return detail::concatenate(
          "the rendezvous store is gone, so the process that serves it (usually rank 0 or the "
          "launcher) has probably died: ",
          text_of(error));
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] static std::string noticed_key(int rank) {
    return detail::concatenate("a failure was noticed by/", rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  StorePtr world_store_;
  const Group group_;
  std::string key_;
  std::mutex store_mutex_;
  mutable std::mutex mutex_;
  std::atomic<bool> failed_{false};
  std::optional<std::string> reason_;
};

/// ". No answer from global rank 2: dead, hanging or computing", or nothing. After fail().
std::string describe_silent_ranks(GroupHealth& health) {
  const std::vector<int> silent = health.silent_ranks();
  return silent.empty()
             ? std::string()
             : detail::concatenate(". No answer from ", detail::name_global_ranks(silent),
                                   ": dead, hanging or computing");
}

/// Throws what `error` means for this call, after marking the group as failed. What another rank
/// reported first comes along: its failure is often the cause of this one.
[[noreturn]] void throw_failed(GroupHealth& health, const std::string& call_text,
                               const std::exception& error, milliseconds timeout) {
  const std::string cause = text_of(error);
  const auto others = health.reason_of_others();
  const std::string first_report = others ? ". Before that, " + *others : "";
  health.fail(cause + first_report);
  const std::string silent = describe_silent_ranks(health);
  if (says_timed_out(cause)) {
    throw TimeoutError(detail::concatenate(
        call_text, ": not all ranks of the group took part within ", timeout.count(), " ms", silent,
        "; look at what the others do instead, or raise the time limit. The transport says: ",
        cause, first_report));
  }
  throw CommError(detail::concatenate(
      call_text, ": a peer has probably died or issued another operation", silent,
      "; look at the output of the other ranks first. The transport says: ", cause, first_report));
}

/// See [Note: after a disagreement]. Threads: any.
class Disagreement {
 public:
  /// The number of an operation that is issued now.
  [[nodiscard]] std::int64_t next_number() {
    const std::lock_guard lock(mutex_);
    return next_number_++;
  }

  void found(std::int64_t number, const std::string& text) {
    const std::lock_guard lock(mutex_);
    text_ = text;
    found_at_ = number;
    first_allowed_ = std::numeric_limits<std::int64_t>::max();
  }

  /// The caller was told by this operation; what it issues from here on takes that into account.
  void was_told(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number >= found_at_) {  // Else it was stopped by an earlier disagreement.
      first_allowed_ = std::min(first_allowed_, next_number_);
    }
  }

  /// The text of the disagreement after which this operation was issued unknowingly.
  [[nodiscard]] std::optional<std::string> stops(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (text_ && number >= first_allowed_) {
      text_.reset();
    }
    return text_;
  }

 private:
  std::mutex mutex_;
  std::int64_t next_number_ = 0;
  std::int64_t found_at_ = 0;
  std::int64_t first_allowed_ = 0;
  std::optional<std::string> text_;
};

/// What a communicator and its works share.
struct Shared {
  Shared(c10::intrusive_ptr<c10d::Store> store, StorePtr world_store, const Group& group)
      : health(std::move(store), std::move(world_store), group) {}

  GroupHealth health;
  Disagreement disagreement;
};

/// An operation on its way to the transport. What stands below `completion` is written before that
/// is finished, and the work's from then on.
struct Launch {
  std::int64_t number = 0;
  detail::Completion completion;
  TorchWork work;
  std::function<void()> finish;  ///< Also keeps scratch memory and buffers alive.
  std::chrono::steady_clock::time_point deadline;
};

class C10dWork final : public Work {
 public:
  C10dWork(std::shared_ptr<Shared> shared, std::string call_text, milliseconds timeout,
           bool is_on_cpu, std::shared_ptr<Launch> launch)
      : shared_(std::move(shared)),
        call_text_(std::move(call_text)),
        timeout_(timeout),
        is_on_cpu_(is_on_cpu),
        launch_(std::move(launch)) {}

  ~C10dWork() override {
    if (waited_) {
      return;
    }
    try {
      wait();
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kError, "a work was dropped without wait() and failed: ", error.what());
    }
  }

  bool test() override {
    return waited_ || shared_->health.reason().has_value() ||
           (launch_->completion.is_done() && (!launch_->work || launch_->work->isCompleted()));
  }

  void wait() override {
    if (waited_) {
      if (error_) {
        std::rethrow_exception(error_);
      }
      return;
    }
    waited_ = true;
    try {
      wait_for_launch();
      wait_for_transport();
      if (launch_->finish) {
        launch_->finish();
      }
    } catch (const ScheduleError&) {
      shared_->disagreement.was_told(launch_->number);
      error_ = std::current_exception();
    } catch (const Error&) {
      error_ = std::current_exception();
    } catch (const std::exception& error) {
      try {
        throw_failed(shared_->health, call_text_, error, timeout_);
      } catch (const Error&) {
        error_ = std::current_exception();
      }
    }
    // The transport may still write into the buffers after a failure; its own work keeps those.
    launch_.reset();
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  /// The buffers belong to the thread that issues until it says otherwise. It ends by itself: its
  /// comparisons have time limits, and no later one starts after a failure.
  void wait_for_launch() {
    while (!launch_->completion.wait_for(std::chrono::hours(1))) {
    }
    if (const std::exception_ptr error = launch_->completion.take_error()) {
      std::rethrow_exception(error);
    }
  }

  void wait_for_transport() {
    c10d::Work& work = *launch_->work;
    if (!is_on_cpu_) {
      // Orders the device's stream; the process group's watchdog keeps the time limit.
      HOPSHARD_CHECK(work.wait(), CommError, call_text_, ": the process group was aborted");
      return;
    }
    GroupHealth& health = shared_->health;
    milliseconds slice = kQuietWait;
    while (!completes_within(work, slice)) {
      slice = kPollInterval;
      if (const auto reason = health.reason()) {
        throw CommError(detail::concatenate(call_text_, ": the group has failed: ", *reason));
      }
      if (const auto reason = health.reason_of_others()) {
        health.fail(*reason);
        throw CommError(
            detail::concatenate(call_text_, ": ", *reason, describe_silent_ranks(health)));
      }
      if (std::chrono::steady_clock::now() > launch_->deadline) {
        const std::string cause = "the operation timed out in the transport's queue";
        health.fail(cause);
        throw TimeoutError(detail::concatenate(call_text_, ": not finished within ",
                                               timeout_.count(), " ms: ", cause,
                                               describe_silent_ranks(health)));
      }
    }
  }

  /// True once finished; a failed transport throws its error. Waiting for a slice has no side
  /// effect on the work: it throws if the slice ended first, which isCompleted() tells apart.
  bool completes_within(c10d::Work& work, milliseconds slice) const {
    try {
      HOPSHARD_CHECK(work.wait(slice), CommError, call_text_, ": the process group was aborted");
      return true;
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      if (!work.isCompleted()) {
        return false;
      }
    }
    HOPSHARD_CHECK(work.wait(), CommError, call_text_, ": the process group was aborted");
    return true;
  }

  std::shared_ptr<Shared> shared_;
  std::string call_text_;
  milliseconds timeout_;
  bool is_on_cpu_;
  std::shared_ptr<Launch> launch_;
  bool waited_ = false;
  std::exception_ptr error_;
};

/// One-dimensional and as bytes: every transport moves uint8, not every one moves bool or bf16.
at::Tensor as_bytes(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.view({tensor.numel()});
  return flat.scalar_type() == at::kByte ? flat : flat.view(at::kByte);
}

/// output = chunk 0 op chunk 1 op ..., chunk i from rank i of the group.
void reduce_chunks(const at::Tensor& output, const at::Tensor& chunks, int size, ReduceOp op,
                   bool accumulate = false) {
  const std::int64_t numel = output.numel();
  std::vector<at::Tensor> parts;
  for (int member = 0; member < size; ++member) {
    parts.push_back(chunks.narrow(0, member * numel, numel));
  }
  detail::reduce_tensors(output.view({numel}), parts, op, accumulate);
}

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, Group group,
                   milliseconds timeout, MakeProcessGroup make_part, StorePtr world_store,
                   bool is_sole_user)
      : Communicator(std::move(group)),
        process_group_(std::move(process_group)),
        timeout_(timeout),
        make_part_(std::move(make_part)),
        world_store_(std::move(world_store)),
        shared_(std::make_shared<Shared>(process_group_->getStore(), world_store_, this->group())) {
    if (is_sole_user && size() > 1) {
      issuer_.emplace("hopshard-c10d");
    }
  }

  [[nodiscard]] std::string_view backend() const noexcept override { return kBackend; }

  void abort(std::string_view reason) override {
    shared_->health.fail(detail::concatenate("aborted: ", reason));
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    return issue({.op = "all_gather", .numel = input.numel(), .dtype = input.scalar_type()},
                 options, output.is_cpu(), [this, output, input](milliseconds timeout, auto&) {
                   const at::Tensor part = as_bytes(input);
                   return start_all_gather(as_bytes(output), part, timeout, /*in_slots=*/true);
                 });
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    return issue({.op = "reduce_scatter",
                  .numel = output.numel(),
                  .dtype = output.scalar_type(),
                  .reduce_op = op},
                 options, input.is_cpu(),
                 [this, output, input, op, accumulate = options.accumulate](milliseconds timeout,
                                                                            auto& finish) {
                   at::Tensor to_send = input.view({input.numel()});
                   if (!group().has_identity_slots()) {
                     to_send = in_rank_order(to_send);
                   }
                   const at::Tensor received = at::empty({input.numel()}, input.options());
                   finish = [to_send, received, output, op, size = size(), accumulate] {
                     reduce_chunks(output, received, size, op, accumulate);
                   };
                   c10d::AllToAllOptions torch_options;
                   torch_options.timeout = timeout;
                   at::Tensor received_bytes = as_bytes(received);
                   at::Tensor sent_bytes = as_bytes(to_send);
                   std::vector<std::int64_t> equal_parts;
                   return all_to_all_single(*process_group_, received_bytes, sent_bytes,
                                            equal_parts, torch_options);
                 });
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    return issue({.op = "all_reduce",
                  .numel = tensor.numel(),
                  .dtype = tensor.scalar_type(),
                  .reduce_op = op},
                 options, tensor.is_cpu(), [this, tensor, op](milliseconds timeout, auto& finish) {
                   const auto gathered_bytes = static_cast<std::int64_t>(tensor.nbytes()) * size();
                   if (op == ReduceOp::kMax || gathered_bytes <= kGatheredSumLimitBytes) {
                     // Maxima always go this way: transports do not agree on what a maximum with
                     // NaN is.
                     const at::Tensor gathered =
                         at::empty({tensor.numel() * size()}, tensor.options());
                     finish = [gathered, tensor, op, size = size()] {
                       reduce_chunks(tensor, gathered, size, op);
                     };
                     return start_all_gather(as_bytes(gathered), as_bytes(tensor), timeout,
                                             /*in_slots=*/false);
                   }
                   c10d::AllreduceOptions torch_options;
                   torch_options.timeout = timeout;
                   std::vector<at::Tensor> tensors = {tensor};
                   const at::ScalarType dtype = tensor.scalar_type();
                   if (dtype == at::kBFloat16 || dtype == at::kHalf) {
                     tensors.front() = tensor.to(at::kFloat);
                     finish = [wide = tensors.front(), tensor] {
                       const at::NoGradGuard no_grad;
                       tensor.copy_(wide);
                     };
                   }
                   return process_group_->allreduce(tensors, torch_options);
                 });
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    return issue(
        {.op = "broadcast", .numel = tensor.numel(), .dtype = tensor.scalar_type(), .root = root},
        options, tensor.is_cpu(), [this, tensor, root](milliseconds timeout, auto&) {
          c10d::BroadcastOptions torch_options;
          torch_options.rootRank = root;
          torch_options.timeout = timeout;
          std::vector<at::Tensor> tensors = {as_bytes(tensor)};
          return process_group_->broadcast(tensors, torch_options);
        });
  }

  void do_barrier(const CommOptions& options) override {
    const std::vector<c10::Device> devices = process_group_->getDeviceTypes();
    const bool has_cpu = std::any_of(devices.begin(), devices.end(),
                                     [](const c10::Device& device) { return device.is_cpu(); });
    issue({.op = "barrier"}, options, has_cpu, [this, has_cpu](milliseconds timeout, auto&) {
      c10d::BarrierOptions torch_options;
      torch_options.timeout = timeout;
      if (has_cpu) {
        torch_options.device = c10::Device(at::kCPU);
      }
      return process_group_->barrier(torch_options);
    })->wait();
  }

  CommunicatorPtr do_split(Group part) override {
    HOPSHARD_CHECK(make_part_, ConfigError, "c10d split of group '", group().name,
                   "': this communicator was made without a function that makes process groups");
    if (part.size() == 1) {
      return std::make_shared<C10dCommunicator>(process_group_, std::move(part), timeout_,
                                                make_part_, world_store_, /*is_sole_user=*/false);
    }
    c10::intrusive_ptr<c10d::ProcessGroup> process_group = make_part_(part);
    return make_c10d_communicator(std::move(process_group), std::move(part), timeout_, make_part_,
                                  world_store_, /*is_sole_user=*/true);
  }

  /// Has `start(timeout, finish) -> TorchWork` run once all ranks are known to issue `operation`.
  /// The transport keeps its own buffers alive, `finish` the others.
  template <typename Start>
  WorkPtr issue(detail::OperationText operation, const CommOptions& options, bool is_on_cpu,
                Start start) {
    operation.tag = options.tag;
    const std::string call_text =
        detail::describe_call(kBackend, operation.op, options.tag, group());
    check_usable(call_text);
    const milliseconds timeout = options.timeout.count() > 0 ? options.timeout : timeout_;
    const auto launch = std::make_shared<Launch>();
    launch->number = shared_->disagreement.next_number();
    auto work = std::make_unique<C10dWork>(shared_, call_text, timeout, is_on_cpu, launch);
    std::function<void()> task = [this, launch, call_text, timeout, is_on_cpu,
                                  description = detail::to_string(operation),
                                  start = std::move(start)] {
      const at::NoGradGuard no_grad;
      try {
        if (is_on_cpu) {
          check_usable(call_text);
          agree_on(description, call_text, timeout, launch->number);
        }
        launch->work = start(timeout, launch->finish);
        launch->deadline = std::chrono::steady_clock::now() + timeout + kGrace;
        launch->completion.finish();
      } catch (const Error&) {
        launch->completion.fail(std::current_exception());
      } catch (const std::exception& error) {
        try {
          throw_failed(shared_->health, call_text, error, timeout);
        } catch (const Error&) {
          launch->completion.fail(std::current_exception());
        }
      }
    };
    if (issuer_ && is_on_cpu) {
      issuer_->submit(std::move(task));
    } else {
      task();
      if (!launch->work) {
        work->wait();  // Throws.
      }
    }
    return work;
  }

  void check_usable(const std::string& call_text) const {
    const auto reason = shared_->health.reason();
    HOPSHARD_CHECK(!reason, CommError, call_text,
                   ": the group is unusable since an earlier failure: ", *reason);
  }

  /// Throws ScheduleError on every rank unless all are about to do the same. One message of a few
  /// bytes per rank, before the data.
  void agree_on(const std::string& description, const std::string& call_text, milliseconds timeout,
                std::int64_t number) {
    const auto earlier = shared_->disagreement.stops(number);
    HOPSHARD_CHECK(!earlier, ScheduleError, call_text,
                   ": not carried out, because of an operation before it: ", *earlier);
    const detail::CallRecord record = detail::make_call_record(description);
    constexpr auto kBytes = static_cast<std::int64_t>(detail::kCallRecordBytes);
    if (!my_record_.defined()) {
      my_record_ = at::empty({kBytes}, at::TensorOptions().dtype(at::kByte));
      records_ = at::empty({kBytes * size()}, my_record_.options());
    }
    std::copy(record.begin(), record.end(), my_record_.mutable_data_ptr<std::uint8_t>());
    const auto launch = std::make_shared<Launch>();
    launch->work = start_all_gather(records_, my_record_, timeout, /*in_slots=*/false);
    launch->deadline = std::chrono::steady_clock::now() + timeout + kGrace;
    launch->completion.finish();
    C10dWork(shared_, call_text, timeout, /*is_on_cpu=*/true, launch).wait();
    const auto difference = detail::explain_difference(
        {records_.const_data_ptr<std::uint8_t>(), static_cast<std::size_t>(records_.numel())},
        group());
    if (difference) {
      const std::string text = detail::concatenate(
          "the ranks issued different collectives, no data was moved: ", *difference,
          ". All ranks must run the same program; a rank may only skip a unit inside a training "
          "forward");
      shared_->disagreement.found(number, text);
      throw ScheduleError(detail::concatenate(call_text, ": ", text));
    }
  }

  TorchWork start_all_gather(at::Tensor output, at::Tensor input, milliseconds timeout,
                             bool in_slots) {
    c10d::AllgatherOptions torch_options;
    torch_options.timeout = timeout;
    if (!in_slots || group().has_identity_slots()) {
      return all_gather_single(*process_group_, output, input, torch_options);
    }
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int member = 0; member < size(); ++member) {
      outputs.front().push_back(
          output.narrow(0, group().slot_of(member) * input.numel(), input.numel()));
    }
    std::vector<at::Tensor> inputs = {input};
    return process_group_->allgather(outputs, inputs, torch_options);
  }

  /// A copy of `whole` with the chunks in the order of the ranks that they go to.
  [[nodiscard]] at::Tensor in_rank_order(const at::Tensor& whole) const {
    const at::Tensor ordered = at::empty({whole.numel()}, whole.options());
    const std::int64_t numel = whole.numel() / size();
    for (int member = 0; member < size(); ++member) {
      ordered.narrow(0, member * numel, numel)
          .copy_(whole.narrow(0, group().slot_of(member) * numel, numel));
    }
    return ordered;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  milliseconds timeout_;
  MakeProcessGroup make_part_;
  StorePtr world_store_;
  std::shared_ptr<Shared> shared_;
  // Of the thread that issues. Unchanged after a failure, when the transport may still write there.
  at::Tensor my_record_;
  at::Tensor records_;
  std::optional<OrderedWorker> issuer_;  // The last: its tasks use all of the above.
};

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, std::string_view value) override {
    try {
      store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
    } catch (const std::exception& error) {
      throw CommError(
          detail::concatenate("the rendezvous store lost '", key, "': ", text_of(error)));
    }
  }

  std::string get(const std::string& key, milliseconds timeout) override {
    try {
      store_->wait({key}, timeout);
      const std::vector<std::uint8_t> value = store_->get(key);
      return {value.begin(), value.end()};
    } catch (const std::exception& error) {
      const std::string cause = text_of(error);
      HOPSHARD_CHECK(!says_timed_out(cause), TimeoutError, "no rank wrote '", key, "' within ",
                     timeout.count(), " ms");
      throw CommError(detail::concatenate("the rendezvous store failed at '", key, "': ", cause));
    }
  }

  bool has(const std::string& key) override {
    try {
      return store_->check({key});
    } catch (const std::exception& error) {
      throw CommError(
          detail::concatenate("the rendezvous store failed at '", key, "': ", text_of(error)));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

StorePtr make_c10d_store(c10::intrusive_ptr<c10d::Store> store) {
  HOPSHARD_CHECK(store, InvalidArgument, "the store is None");
  return std::make_shared<C10dStore>(std::move(store));
}

CommunicatorPtr make_c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                       Group group, std::chrono::milliseconds timeout,
                                       MakeProcessGroup make_part, StorePtr world_store,
                                       bool is_sole_user) {
  group.validate();
  HOPSHARD_CHECK(process_group, InvalidArgument, "group '", group.name,
                 "': the process group is None; this process is not a member of it");
  HOPSHARD_CHECK(process_group->getRank() == group.rank && process_group->getSize() == group.size(),
                 InvalidArgument, "group '", group.name, "' says rank ", group.rank, " of ",
                 group.size(), ", but the process group says rank ", process_group->getRank(),
                 " of ", process_group->getSize(),
                 "; make it with torch.distributed.new_group(group.ranks)");
  HOPSHARD_CHECK(timeout.count() > 0, InvalidArgument, "group '", group.name,
                 "': the time limit must be positive, got ", timeout.count(), " ms");
  return std::make_shared<C10dCommunicator>(std::move(process_group), std::move(group), timeout,
                                            std::move(make_part), std::move(world_store),
                                            is_sole_user);
}

}  // namespace hopshard
