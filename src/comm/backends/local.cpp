// Ranks deposit their buffers and go on; the one that arrives last moves the data of all and wakes
// the waiting. So a call never blocks, completion needs no thread of its own, nobody reads a buffer
// after the operation is done, and all ranks see one result. One mutex per group. Long, because
// hub, group and communicator share that one protocol and would only be read together.
#include "hopshard/comm/local.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../describe.hpp"
#include "../failure.hpp"
#include "../reduce_parts.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard {
namespace {

constexpr std::string_view kBackend = "local";

using Kind = CollectiveOp;
using detail::Failure;
using detail::FailureKind;
using detail::throw_failure;

/// One rank's part in an operation. All members but the buffers and `accumulate` must agree.
struct Call {
  Kind kind = Kind::kBarrier;
  std::string tag;
  ReduceOp reduce_op = ReduceOp::kSum;
  bool accumulate = false;  ///< A rank's own affair.
  int root = -1;
  std::int64_t numel = 0;  ///< Of the part: n of the contract.
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::Tensor output{};  ///< Or the one tensor of an in-place operation.
  at::Tensor input{};

  [[nodiscard]] bool agrees_with(const Call& other) const {
    return kind == other.kind && tag == other.tag && reduce_op == other.reduce_op &&
           root == other.root && numel == other.numel && dtype == other.dtype;
  }

  [[nodiscard]] std::string text() const {
    const bool reduces = kind == Kind::kReduceScatter || kind == Kind::kAllReduce;
    return detail::to_string(
        detail::OperationText{.op = to_string(kind),
                              .tag = tag,
                              .numel = numel,
                              .dtype = dtype,
                              .reduce_op = reduces ? std::optional(reduce_op) : std::nullopt,
                              .root = root});
  }
};

/// The i-th operation of a group.
struct Operation {
  enum class State { kGathering, kRunning, kDone, kFailed };

  explicit Operation(std::size_t size) : calls(size) {}

  std::vector<std::optional<Call>> calls;
  std::size_t num_arrived = 0;
  State state = State::kGathering;
  Failure failure;

  [[nodiscard]] bool disagrees() const {
    const Call* first = nullptr;
    for (const auto& call : calls) {
      if (call && first != nullptr && !call->agrees_with(*first)) {
        return true;
      }
      if (call && first == nullptr) {
        first = &*call;
      }
    }
    return false;
  }
};

/// What the members of one group share.
class LocalGroup {
 public:
  explicit LocalGroup(const Group& group)
      : ranks_(group.ranks),
        next_sequence_(group.ranks.size(), 0),
        left_(group.ranks.size(), false) {
    for (int member = 0; member < group.size(); ++member) {
      slots_.push_back(static_cast<std::size_t>(group.slot_of(member)));
    }
  }

  [[nodiscard]] bool has_slots_of(const Group& group) const {
    for (int member = 0; member < group.size(); ++member) {
      if (slots_[static_cast<std::size_t>(member)] !=
          static_cast<std::size_t>(group.slot_of(member))) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] bool has_member(int global_rank) const {
    return std::find(ranks_.begin(), ranks_.end(), global_rank) != ranks_.end();
  }

  std::shared_ptr<Operation> deposit(std::size_t member, Call call, const std::string& call_text) {
    std::unique_lock lock(mutex_);
    if (poison_) {
      throw_failure(*poison_, call_text);
    }
    const std::int64_t sequence = next_sequence_[member]++;
    auto& entry = pending_[sequence];
    if (!entry) {
      entry = std::make_shared<Operation>(ranks_.size());
      for (std::size_t other = 0; other < ranks_.size(); ++other) {
        if (left_[other] && next_sequence_[other] <= sequence) {
          fail(*entry, {FailureKind::kComm, left_text(other)});
        }
      }
    }
    const std::shared_ptr<Operation> operation = entry;
    operation->calls[member] = std::move(call);
    if (++operation->num_arrived < ranks_.size()) {
      return operation;
    }
    pending_.erase(sequence);
    if (operation->state != Operation::State::kGathering) {
      return operation;
    }
    if (operation->disagrees()) {
      fail(*operation, {FailureKind::kSchedule, disagreement_text(*operation)});
      return operation;
    }
    operation->state = Operation::State::kRunning;
    lock.unlock();
    std::optional<Failure> failure;
    try {
      run(*operation);
    } catch (const std::exception& error) {
      failure = Failure{FailureKind::kComm, error.what()};
    }
    lock.lock();
    operation->state = failure ? Operation::State::kFailed : Operation::State::kDone;
    operation->failure = failure.value_or(Failure{});
    release_buffers(*operation);
    changed_.notify_all();
    return operation;
  }

  void wait(Operation& operation, std::chrono::milliseconds timeout, std::size_t member,
            const std::string& call_text) {
    std::unique_lock lock(mutex_);
    const bool in_time = changed_.wait_for(
        lock, timeout, [&] { return operation.state != Operation::State::kGathering; });
    if (!in_time) {
      give_up(operation, timeout, member);
    }
    // The copying rank uses this rank's buffers, and it needs nobody any more.
    changed_.wait(lock, [&] { return operation.state != Operation::State::kRunning; });
    if (operation.state == Operation::State::kFailed) {
      throw_failure(operation.failure, call_text);
    }
  }

  [[nodiscard]] bool test(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    return operation.state == Operation::State::kDone ||
           operation.state == Operation::State::kFailed;
  }

  /// A rank unwinds and drops its part: nobody should wait for it, and it waits for nobody.
  void withdraw(Operation& operation, std::size_t member) {
    std::unique_lock lock(mutex_);
    fail(operation,
         {FailureKind::kComm, detail::concatenate("global rank ", ranks_[member],
                                                  " dropped the operation while it handled an "
                                                  "error; see that rank's own message")});
    changed_.wait(lock, [&] { return operation.state != Operation::State::kRunning; });
  }

  /// Fails all that is pending or comes later. The first reason stays.
  void poison(Failure failure) {
    const std::lock_guard lock(mutex_);
    poison_locked(std::move(failure));
  }

  void leave(std::size_t member) {
    const std::lock_guard lock(mutex_);
    left_[member] = true;
    for (auto& [sequence, operation] : pending_) {
      if (sequence >= next_sequence_[member]) {
        fail(*operation, {FailureKind::kComm, left_text(member)});
      }
    }
  }

 private:
  void poison_locked(Failure failure) {
    for (auto& [sequence, operation] : pending_) {
      fail(*operation, failure);
    }
    if (!poison_) {
      poison_ = std::move(failure);
    }
  }

  void fail(Operation& operation, Failure failure) {
    if (operation.state != Operation::State::kGathering) {
      return;
    }
    operation.state = Operation::State::kFailed;
    operation.failure = std::move(failure);
    release_buffers(operation);
    changed_.notify_all();
  }

  static void release_buffers(Operation& operation) {
    for (auto& call : operation.calls) {
      if (call) {
        call->output.reset();
        call->input.reset();
      }
    }
  }

  void give_up(Operation& operation, std::chrono::milliseconds timeout, std::size_t member) {
    if (operation.disagrees()) {
      fail(operation, {FailureKind::kSchedule, disagreement_text(operation)});
    } else {
      std::vector<int> missing;
      for (std::size_t other = 0; other < ranks_.size(); ++other) {
        if (!operation.calls[other]) {
          missing.push_back(ranks_[other]);
        }
      }
      fail(operation,
           {FailureKind::kTimeout, detail::did_not_arrive(missing, timeout, ranks_[member])});
    }
    poison_locked({FailureKind::kComm,
                   detail::concatenate("the group is unusable since global rank ", ranks_[member],
                                       " gave up waiting: ", operation.failure.cause)});
  }

  [[nodiscard]] std::string left_text(std::size_t member) const {
    return detail::concatenate("global rank ", ranks_[member],
                               " left the group (its communicator was destroyed) without issuing "
                               "this operation");
  }

  [[nodiscard]] std::string disagreement_text(const Operation& operation) const {
    std::string text = "the ranks issued different operations:";
    for (std::size_t member = 0; member < ranks_.size(); ++member) {
      const auto& call = operation.calls[member];
      text += detail::concatenate(member == 0 ? " " : "; ", "global rank ", ranks_[member], ": ",
                                  call ? call->text() : "nothing yet");
    }
    return text + ". All ranks must issue the same operations in the same order";
  }

  /// Moves everybody's data. Runs without the lock: state kRunning keeps the others away.
  void run(const Operation& operation) const {
    const Call& first = *operation.calls.front();
    const std::size_t size = ranks_.size();
    const auto numel = static_cast<std::size_t>(first.numel);
    if (first.kind == Kind::kBarrier || numel == 0) {
      return;
    }
    const std::size_t bytes = numel * c10::elementSize(first.dtype);
    const auto output_of = [&](std::size_t member) {
      return static_cast<char*>(operation.calls[member]->output.mutable_data_ptr());
    };
    const auto input_of = [&](std::size_t member) {
      return static_cast<const char*>(operation.calls[member]->input.const_data_ptr());
    };
    switch (first.kind) {
      case Kind::kAllGather:
        for (std::size_t from = 0; from < size; ++from) {
          for (std::size_t to = 0; to < size; ++to) {
            copy(output_of(to) + slots_[from] * bytes, input_of(from), bytes);
          }
        }
        break;
      case Kind::kReduceScatter:
        for (std::size_t to = 0; to < size; ++to) {
          std::vector<const void*> parts;
          for (std::size_t from = 0; from < size; ++from) {
            parts.push_back(input_of(from) + slots_[to] * bytes);
          }
          detail::reduce_parts(output_of(to), parts, first.numel, first.dtype, first.reduce_op,
                               operation.calls[to]->accumulate);
        }
        break;
      case Kind::kAllReduce: {
        std::vector<const void*> parts;
        for (std::size_t from = 0; from < size; ++from) {
          parts.push_back(output_of(from));
        }
        detail::reduce_parts(output_of(0), parts, first.numel, first.dtype, first.reduce_op);
        for (std::size_t to = 1; to < size; ++to) {
          copy(output_of(to), output_of(0), bytes);
        }
        break;
      }
      case Kind::kBroadcast:
        for (std::size_t to = 0; to < size; ++to) {
          copy(output_of(to), output_of(static_cast<std::size_t>(first.root)), bytes);
        }
        break;
      case Kind::kBarrier:
        break;
    }
  }

  static void copy(char* to, const char* from, std::size_t bytes) {
    if (to != from) {
      std::memcpy(to, from, bytes);
    }
  }

  const std::vector<int> ranks_;
  std::vector<std::size_t> slots_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> next_sequence_;  ///< By member: operations issued so far.
  std::vector<bool> left_;
  std::map<std::int64_t, std::shared_ptr<Operation>> pending_;
  std::optional<Failure> poison_;
};

class LocalWork final : public Work {
 public:
  LocalWork(std::shared_ptr<LocalGroup> group, std::shared_ptr<Operation> operation,
            std::size_t member, std::chrono::milliseconds timeout, std::string call_text)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        member_(member),
        timeout_(timeout),
        call_text_(std::move(call_text)),
        num_exceptions_(std::uncaught_exceptions()) {}

  ~LocalWork() override {
    if (waited_) {
      return;
    }
    try {
      if (std::uncaught_exceptions() > num_exceptions_) {
        group_->withdraw(*operation_, member_);
      } else {
        wait();
      }
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kError, "a work was dropped without wait() and failed: ", error.what());
    }
  }

  void wait() override {
    waited_ = true;
    group_->wait(*operation_, timeout_, member_, call_text_);
  }

  bool test() override { return group_->test(*operation_); }

 private:
  std::shared_ptr<LocalGroup> group_;
  std::shared_ptr<Operation> operation_;
  std::size_t member_;
  std::chrono::milliseconds timeout_;
  std::string call_text_;
  int num_exceptions_;
  bool waited_ = false;
};

using MakeCommunicator = std::function<CommunicatorPtr(Group)>;

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(Group group, std::shared_ptr<LocalGroup> shared,
                    std::chrono::milliseconds timeout, MakeCommunicator split)
      : Communicator(std::move(group)),
        shared_(std::move(shared)),
        timeout_(timeout),
        split_(std::move(split)) {}

  ~LocalCommunicator() override { shared_->leave(member()); }

  [[nodiscard]] std::string_view backend() const noexcept override { return kBackend; }

  void abort(std::string_view reason) override {
    shared_->poison({FailureKind::kComm, detail::concatenate("aborted by global rank ",
                                                             group().global_rank(), ": ", reason)});
  }

 private:
  [[nodiscard]] std::size_t member() const { return static_cast<std::size_t>(rank()); }

  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    Call call{.kind = Kind::kAllGather, .tag = options.tag};
    call.numel = input.numel();
    return issue(std::move(call), std::move(output), std::move(input), options);
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    Call call{.kind = Kind::kReduceScatter, .tag = options.tag, .reduce_op = op};
    call.accumulate = options.accumulate;
    call.numel = output.numel();
    return issue(std::move(call), std::move(output), std::move(input), options);
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    Call call{.kind = Kind::kAllReduce, .tag = options.tag, .reduce_op = op};
    call.numel = tensor.numel();
    return issue(std::move(call), std::move(tensor), at::Tensor(), options);
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    Call call{.kind = Kind::kBroadcast, .tag = options.tag, .root = root};
    call.numel = tensor.numel();
    return issue(std::move(call), std::move(tensor), at::Tensor(), options);
  }

  void do_barrier(const CommOptions& options) override {
    issue(Call{.kind = Kind::kBarrier, .tag = options.tag}, at::Tensor(), at::Tensor(), options)
        ->wait();
  }

  CommunicatorPtr do_split(Group part) override { return split_(std::move(part)); }

  WorkPtr issue(Call call, at::Tensor output, at::Tensor input, const CommOptions& options) {
    std::string call_text =
        detail::describe_call(kBackend, to_string(call.kind), options.tag, group());
    if (output.defined()) {
      HOPSHARD_CHECK(output.device().is_cpu(), InvalidArgument, call_text, ": a tensor on ",
                     output.device(), " cannot be moved; this backend moves CPU memory only");
      call.dtype = output.scalar_type();
    }
    call.output = std::move(output);
    call.input = std::move(input);
    auto operation = shared_->deposit(member(), std::move(call), call_text);
    const auto timeout = options.timeout.count() > 0 ? options.timeout : timeout_;
    return std::make_unique<LocalWork>(shared_, std::move(operation), member(), timeout,
                                       std::move(call_text));
  }

  std::shared_ptr<LocalGroup> shared_;
  std::chrono::milliseconds timeout_;
  MakeCommunicator split_;
};

}  // namespace

struct LocalHub::State {
  /// All groups that were made for one name and list of ranks, oldest first.
  struct Generations {
    std::vector<std::size_t> num_requests;  ///< By member.
    std::vector<std::shared_ptr<LocalGroup>> groups;
  };
  using Key = std::pair<std::string, std::vector<int>>;

  int world_size = 0;
  std::chrono::milliseconds timeout{0};
  std::mutex mutex;
  std::map<Key, Generations> groups;
  std::optional<std::string> aborted;
  std::map<int, std::string> failed_ranks;  ///< Global rank and why.

  static CommunicatorPtr communicator(const std::shared_ptr<State>& state, Group group);
};

namespace {

std::string failed_rank_text(int global_rank, std::string_view reason) {
  return detail::concatenate("global rank ", global_rank, " failed: ", reason);
}

}  // namespace

LocalHub::LocalHub(int world_size, std::chrono::milliseconds timeout)
    : state_(std::make_shared<State>()) {
  HOPSHARD_CHECK(world_size >= 1, InvalidArgument, "a LocalHub needs at least one rank, got ",
                 world_size);
  HOPSHARD_CHECK(timeout.count() > 0, InvalidArgument,
                 "the time limit of a LocalHub must be positive, got ", timeout.count(), " ms");
  state_->world_size = world_size;
  state_->timeout = timeout;
}

LocalHub::~LocalHub() = default;

int LocalHub::world_size() const noexcept { return state_->world_size; }

CommunicatorPtr LocalHub::State::communicator(const std::shared_ptr<State>& state, Group group) {
  group.validate();
  for (const int rank : group.ranks) {
    HOPSHARD_CHECK(rank < state->world_size, InvalidArgument, "group '", group.name,
                   "' holds rank ", rank, ", but the hub has ranks 0..", state->world_size - 1);
  }
  const std::lock_guard lock(state->mutex);
  auto& generations = state->groups[{group.name, group.ranks}];
  generations.num_requests.resize(group.ranks.size(), 0);
  const std::size_t generation = generations.num_requests[static_cast<std::size_t>(group.rank)];
  if (generation == generations.groups.size()) {
    generations.groups.push_back(std::make_shared<LocalGroup>(group));
  }
  const std::shared_ptr<LocalGroup> shared = generations.groups[generation];
  HOPSHARD_CHECK(shared->has_slots_of(group), InvalidArgument, "group '", group.name,
                 "': global rank ", group.global_rank(),
                 " gives other slots than the member that came first; all must give the same");
  ++generations.num_requests[static_cast<std::size_t>(group.rank)];
  if (state->aborted) {
    shared->poison({FailureKind::kComm, *state->aborted});
  }
  for (const auto& [rank, reason] : state->failed_ranks) {
    if (shared->has_member(rank)) {
      shared->poison({FailureKind::kComm, failed_rank_text(rank, reason)});
    }
  }
  return std::make_shared<LocalCommunicator>(
      std::move(group), shared, state->timeout,
      [state](Group part) { return communicator(state, std::move(part)); });
}

CommunicatorPtr LocalHub::communicator(Group group) {
  return State::communicator(state_, std::move(group));
}

void LocalHub::abort(std::string_view reason) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->aborted) {
    state_->aborted = detail::concatenate("aborted: ", reason);
  }
  for (auto& [key, generations] : state_->groups) {
    for (const auto& group : generations.groups) {
      group->poison({FailureKind::kComm, *state_->aborted});
    }
  }
}

void LocalHub::rank_failed(int global_rank, std::string_view reason) {
  const std::lock_guard lock(state_->mutex);
  state_->failed_ranks.emplace(global_rank, reason);
  for (auto& [key, generations] : state_->groups) {
    for (const auto& group : generations.groups) {
      if (group->has_member(global_rank)) {
        group->poison({FailureKind::kComm, failed_rank_text(global_rank, reason)});
      }
    }
  }
}

}  // namespace hopshard
