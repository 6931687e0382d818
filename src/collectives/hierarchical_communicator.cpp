// Each level has a lane: one thread that runs the stages of that level in the order in which their
// operations were issued, each after the stage before it of its own operation. So both inner
// communicators see the same order on all ranks, no wait can be part of a circle (a stage waits
// only for earlier stages of its operation and for operations issued before), and while one lane
// works at an operation, the other is already at the next.
//
// [Note: whose buffers] A failed operation completes only when both lanes have passed it. Until
// then an inner communicator may still move its data, so its Work must not return; what makes the
// lanes come soon is that a failure aborts both inner communicators.
//
// Long, because the stages of all operations, their lanes and their failures are one protocol.
#include "hopshard/collectives/hierarchical_communicator.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/completion.hpp"
#include "comm/describe.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "hopshard/core/ordered_worker.hpp"
#include "hopshard/layout/slice_order.hpp"
#include "peer_watch.hpp"

namespace hopshard {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using detail::Failure;
using detail::FailureKind;

/// Below this the parts of an all_reduce are too small to be worth two more operations.
constexpr std::int64_t kUndividedBytes = 4096;
/// An inner communicator's own time limit says more than ours, so it gets the first word.
constexpr milliseconds kGrace{250};
/// Stands for "no operation in particular" where the number of one is expected.
constexpr std::int64_t kAll = -1;

using Works = std::vector<WorkPtr>;
/// Issues a stage's inner operations, all at once.
using Issue = std::function<void(Communicator&, const CommOptions&, Works&)>;

enum class Level { kIntraNode, kInterNode };

struct Stage {
  Level level;
  Issue issue;
};

struct Operation {
  struct Step {
    Stage stage;
    detail::Completion passed{};
  };

  std::int64_t number = 0;
  std::string name;  ///< "all_reduce 'norm'"
  std::string call_text;
  std::string tag;
  milliseconds limit{0};
  Clock::time_point deadline;
  std::deque<Step> steps;
  std::exception_ptr error;  ///< Handed from step to step, like the buffers.
  std::shared_ptr<detail::Completion> completion = std::make_shared<detail::Completion>();
};

struct Lane {
  Lane(std::string_view lane_name, CommunicatorPtr inner)
      : name(lane_name),
        communicator(std::move(inner)),
        worker(std::make_unique<OrderedWorker>("hs-" + std::string(lane_name))) {}

  std::string_view name;
  CommunicatorPtr communicator;
  std::mutex calls;  ///< A communicator is called by one thread at a time.
  std::unique_ptr<OrderedWorker> worker;
};

/// Where the members of a part of the group lie.
struct Places {
  int num_nodes = 0;
  int ranks_per_node = 0;
  std::vector<int> nodes;         ///< In the part's order.
  std::vector<int> local_places;  ///< On each of them.
};

at::Tensor flat_view(const at::Tensor& tensor) { return tensor.view({tensor.numel()}); }

void wait_until_done(detail::Completion& completion) {
  while (!completion.wait_for(std::chrono::hours(1))) {  // A failure ends it: see fail().
  }
}

class HierarchicalCommunicator final : public Communicator {
 public:
  HierarchicalCommunicator(Group group, CommunicatorPtr intra_node, CommunicatorPtr inter_node,
                           HierarchicalOptions options)
      : Communicator(std::move(group)),
        name_(detail::concatenate("hierarchical(", intra_node->backend(), "+",
                                  inter_node->backend(), ")")),
        timeout_(options.timeout),
        store_(std::move(options.store)),
        num_nodes_(inter_node->size()),
        ranks_per_node_(intra_node->size()),
        gathers_in_place_(has_slice_order(this->group(), num_nodes_, ranks_per_node_)),
        num_exceptions_(std::uncaught_exceptions()),
        intra_node_("intra-node", std::move(intra_node)),
        inter_node_("inter-node", std::move(inter_node)) {
    for (Lane* lane : {&intra_node_, &inter_node_}) {
      lane->worker->submit(
          [global_rank = this->group().global_rank()] { set_thread_log_rank(global_rank); });
    }
    watch_ = std::make_unique<detail::PeerWatch>(
        this->group(), "hierarchical", store_,
        [this](const Failure& failure) { fail(failure, kAll); });
  }

  ~HierarchicalCommunicator() override {
    if (std::uncaught_exceptions() > num_exceptions_ && num_in_flight_ > 0) {
      fail({FailureKind::kComm,
            detail::concatenate("global rank ", group().global_rank(),
                                " dropped its communicator while it handled an error; see that "
                                "rank's own message")},
           kAll);
    }
    // In this order: lanes may need the watch to come to an end, and the watch aborts the inner
    // communicators.
    intra_node_.worker.reset();
    inter_node_.worker.reset();
    watch_->stop();  // Its callback uses it.
    watch_.reset();
  }

  [[nodiscard]] std::string_view backend() const noexcept override { return name_; }

  [[nodiscard]] Algorithm algorithm(CollectiveOp /*op*/,
                                    std::int64_t /*num_bytes*/) const override {
    return Algorithm::kHierarchical;
  }

  void abort(std::string_view reason) override {
    fail({FailureKind::kComm,
          detail::concatenate("aborted by global rank ", group().global_rank(), ": ", reason)},
         kAll);
  }

 private:
  [[nodiscard]] int node() const { return inter_node_.communicator->rank(); }
  [[nodiscard]] int local_place() const { return intra_node_.communicator->rank(); }
  [[nodiscard]] Lane& lane_of(Level level) {
    return level == Level::kIntraNode ? intra_node_ : inter_node_;
  }

  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    const std::string call_text = text_of("all_gather", options);
    check_slots(call_text);
    const at::Tensor whole = flat_view(output);
    const at::Tensor block = block_of(whole);
    const detail::OperationText operation{.op = "all_gather",
                                          .tag = options.tag,
                                          .numel = input.numel(),
                                          .dtype = input.scalar_type()};
    return issue(
        operation, call_text, options,
        {{Level::kInterNode,
          [block, input](Communicator& inner, const CommOptions& inner_options, Works& works) {
            works.push_back(inner.all_gather(block, input, inner_options));
          }},
         {Level::kIntraNode,
          [whole, block](Communicator& inner, const CommOptions& inner_options, Works& works) {
            works.push_back(inner.all_gather(whole, block, inner_options));
          }}});
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    const std::string call_text = text_of("reduce_scatter", options);
    check_slots(call_text);
    const at::Tensor whole = flat_view(input);
    const at::Tensor block = block_of(whole);
    const detail::OperationText operation{.op = "reduce_scatter",
                                          .tag = options.tag,
                                          .numel = output.numel(),
                                          .dtype = output.scalar_type(),
                                          .reduce_op = op};
    return issue(
        operation, call_text, options,
        {{Level::kIntraNode,
          [whole, block, op](Communicator& inner, const CommOptions& inner_options, Works& works) {
            works.push_back(inner.reduce_scatter(block, whole, op, inner_options));
          }},
         {Level::kInterNode, [block, output, op, accumulate = options.accumulate](
                                 Communicator& inner, CommOptions inner_options, Works& works) {
            inner_options.accumulate = accumulate;
            works.push_back(inner.reduce_scatter(output, block, op, inner_options));
          }}});
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    const detail::OperationText operation{.op = "all_reduce",
                                          .tag = options.tag,
                                          .numel = tensor.numel(),
                                          .dtype = tensor.scalar_type(),
                                          .reduce_op = op};
    return issue(operation, text_of("all_reduce", options), options,
                 all_reduce_stages(flat_view(tensor), op));
  }

  /// [Note: the rest] What k does not divide, and all of a small tensor, goes over one rail only:
  /// the last, whose part lies in front of it. Other rails would have to come to bit-equal sums by
  /// themselves, which no backend promises for different groups.
  [[nodiscard]] std::vector<Stage> all_reduce_stages(const at::Tensor& all, ReduceOp op) const {
    const std::int64_t numel = all.numel();
    const std::int64_t bytes = numel * static_cast<std::int64_t>(all.element_size());
    const std::int64_t part_numel = bytes < kUndividedBytes ? 0 : numel / ranks_per_node_;
    const std::int64_t divided_numel = part_numel * ranks_per_node_;
    const at::Tensor divided = all.narrow(0, 0, divided_numel);
    const at::Tensor part = divided.narrow(0, local_place() * part_numel, part_numel);
    const at::Tensor rest = all.narrow(0, divided_numel, numel - divided_numel);
    const bool is_last = local_place() == ranks_per_node_ - 1;
    const at::Tensor between_nodes =
        is_last ? all.narrow(0, divided_numel - part_numel, part_numel + rest.numel()) : part;

    std::vector<Stage> stages;
    stages.push_back(
        {Level::kIntraNode,
         [divided, part, rest, op](Communicator& inner, const CommOptions& options, Works& works) {
           if (divided.numel() > 0) {
             works.push_back(inner.reduce_scatter(part, divided, op, options));
           }
           if (rest.numel() > 0 || divided.numel() == 0) {
             works.push_back(inner.all_reduce(rest, op, options));
           }
         }});
    if (is_last || part_numel > 0) {
      stages.push_back(
          {Level::kInterNode,
           [between_nodes, op](Communicator& inner, const CommOptions& options, Works& works) {
             works.push_back(inner.all_reduce(between_nodes, op, options));
           }});
    }
    stages.push_back(
        {Level::kIntraNode,
         [divided, part, rest](Communicator& inner, const CommOptions& options, Works& works) {
           if (divided.numel() > 0) {
             works.push_back(inner.all_gather(divided, part, options));
           }
           if (rest.numel() > 0 || divided.numel() == 0) {
             works.push_back(inner.broadcast(rest, inner.size() - 1, options));
           }
         }});
    return stages;
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    const int root_node = root / ranks_per_node_;
    const int root_place = root % ranks_per_node_;
    std::vector<Stage> stages;
    if (local_place() == root_place) {
      stages.push_back(
          {Level::kInterNode, [tensor, root_node](Communicator& inner,
                                                  const CommOptions& inner_options, Works& works) {
             works.push_back(inner.broadcast(tensor, root_node, inner_options));
           }});
    }
    stages.push_back(
        {Level::kIntraNode,
         [tensor, root_place](Communicator& inner, const CommOptions& inner_options, Works& works) {
           works.push_back(inner.broadcast(tensor, root_place, inner_options));
         }});
    const detail::OperationText operation{.op = "broadcast",
                                          .tag = options.tag,
                                          .numel = tensor.numel(),
                                          .dtype = tensor.scalar_type(),
                                          .root = root};
    return issue(operation, text_of("broadcast", options), options, std::move(stages));
  }

  /// Who has met its node and then its rail has met all. With one byte instead of inner barriers,
  /// which would block inside the call and so keep allocate() waiting.
  void do_barrier(const CommOptions& options) override {
    const at::Tensor byte = at::zeros({1}, at::kByte);
    const Issue meet = [byte](Communicator& inner, const CommOptions& inner_options, Works& works) {
      works.push_back(inner.all_reduce(byte, ReduceOp::kMax, inner_options));
    };
    const detail::OperationText operation{.op = "barrier", .tag = options.tag};
    issue(operation, text_of("barrier", options), options,
          {{Level::kIntraNode, meet}, {Level::kInterNode, meet}})
        ->wait();
  }

  CommunicatorPtr do_split(Group part) override {
    const Places places = places_of(part);
    Group on_node{.name = part.name, .ranks = {}, .rank = 0, .slots = {}};
    Group on_rail = on_node;
    for (std::size_t member = 0; member < part.ranks.size(); ++member) {
      const auto place = static_cast<int>(member) % places.ranks_per_node;
      const auto node_place = static_cast<int>(member) / places.ranks_per_node;
      if (node_place == part.rank / places.ranks_per_node) {
        on_node.ranks.push_back(part.ranks[member]);
      }
      if (place == part.rank % places.ranks_per_node) {
        on_rail.ranks.push_back(part.ranks[member]);
      }
    }
    on_node.rank = part.rank % places.ranks_per_node;
    on_rail.rank = part.rank / places.ranks_per_node;
    // Parts of one level are that level's affair, with any slots.
    if (places.num_nodes == 1) {
      on_node.slots = part.slots;
      return split_on(intra_node_, std::move(on_node));
    }
    if (places.ranks_per_node == 1) {
      on_rail.slots = part.slots;
      return split_on(inter_node_, std::move(on_rail));
    }
    on_node.name += "_intra_node";
    on_rail.name += "_inter_node";
    CommunicatorPtr intra_node = split_on(intra_node_, std::move(on_node));
    CommunicatorPtr inter_node = split_on(inter_node_, std::move(on_rail));
    StorePtr store;
    if (store_) {
      const int generation = num_splits_[{part.name, part.ranks}]++;
      store = make_prefix_store(store_, detail::concatenate("split", generation));
    }
    return make_hierarchical_communicator(std::move(part), std::move(intra_node),
                                          std::move(inter_node),
                                          {.timeout = timeout_, .store = std::move(store)});
  }

  at::Tensor do_allocate(std::int64_t num_bytes) override {
    const std::lock_guard lock(intra_node_.calls);
    return intra_node_.communicator->allocate(num_bytes);
  }

  void do_register_memory(const at::Tensor& memory) override {
    for (Lane* lane : {&intra_node_, &inter_node_}) {
      const std::lock_guard lock(lane->calls);
      lane->communicator->register_memory(memory);
    }
  }

  /// In its turn among the lane's stages: it is collective, too.
  static CommunicatorPtr split_on(Lane& lane, Group part) {
    auto result = std::make_shared<std::promise<CommunicatorPtr>>();
    std::future<CommunicatorPtr> made = result->get_future();
    lane.worker->submit([&lane, part = std::move(part), result] {
      try {
        result->set_value(lane.communicator->split(part));
      } catch (...) {
        result->set_exception(std::current_exception());
      }
    });
    return made.get();
  }

  [[nodiscard]] Places places_of(const Group& part) const {
    Places places;
    std::vector<int> members;
    for (const int global_rank : part.ranks) {
      const auto found = std::find(group().ranks.begin(), group().ranks.end(), global_rank);
      members.push_back(static_cast<int>(found - group().ranks.begin()));
    }
    for (const int member : members) {
      const int node_of_member = member / ranks_per_node_;
      if (places.nodes.empty() || places.nodes.back() != node_of_member) {
        places.nodes.push_back(node_of_member);
      }
      if (places.nodes.size() == 1) {
        places.local_places.push_back(member % ranks_per_node_);
      }
    }
    places.num_nodes = static_cast<int>(places.nodes.size());
    places.ranks_per_node = static_cast<int>(places.local_places.size());
    bool fits = part.size() == places.num_nodes * places.ranks_per_node;
    for (std::size_t i = 0; fits && i < members.size(); ++i) {
      const std::size_t k = places.local_places.size();
      fits = members[i] == places.nodes[i / k] * ranks_per_node_ + places.local_places[i % k];
    }
    HOPSHARD_CHECK(fits, InvalidArgument, name_, " split of group '", group().name, "': the part '",
                   part.name,
                   "' does not take the same places on some of the nodes, node after node; split "
                   "it from a flat communicator of the group");
    return places;
  }

  [[nodiscard]] std::string text_of(std::string_view op, const CommOptions& options) const {
    return detail::describe_call(name_, op, options.tag, group());
  }

  void check_slots(const std::string& call_text) const {
    HOPSHARD_CHECK(gathers_in_place_, InvalidArgument, call_text,
                   ": its slots are in the order of the ranks, but two levels need slot l * ",
                   num_nodes_,
                   " + j for local place l on node j; use a flat communicator for this "
                   "operation, or make_selecting_communicator");
  }

  /// The slices of this rank's rail: neighbours, by slice order.
  [[nodiscard]] at::Tensor block_of(const at::Tensor& whole) const {
    const std::int64_t block_numel = whole.numel() / ranks_per_node_;
    return whole.narrow(0, local_place() * block_numel, block_numel);
  }

  WorkPtr issue(const detail::OperationText& text, std::string call_text,
                const CommOptions& options, std::vector<Stage> stages) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) {
        detail::throw_unusable(*failure_, call_text);
      }
    }
    auto operation = std::make_shared<Operation>();
    operation->number = num_operations_++;
    operation->name = detail::concatenate(text.op, ' ', detail::describe_tag(text.tag));
    operation->call_text = std::move(call_text);
    operation->tag = options.tag;
    operation->limit = options.timeout.count() > 0 ? options.timeout : timeout_;
    operation->deadline = Clock::now() + operation->limit;
    for (Stage& stage : stages) {
      operation->steps.emplace_back(std::move(stage));
    }
    ++num_in_flight_;
    watch_->begin(operation->number, detail::to_string(text));
    for (std::size_t step = 0; step < operation->steps.size(); ++step) {
      lane_of(operation->steps[step].stage.level).worker->submit([this, operation, step] {
        run_step(*operation, step);
      });
    }
    // Without the operation: it would keep the buffers. All works are done before `this` is gone.
    return detail::make_completion_work(
        operation->completion, operation->limit + kGrace,
        [this, number = operation->number, name = operation->name,
         limit = operation->limit](bool unwinding) { give_up(number, name, limit, unwinding); });
  }

  void give_up(std::int64_t number, const std::string& name, milliseconds limit, bool unwinding) {
    if (unwinding) {
      fail({FailureKind::kComm,
            detail::concatenate("global rank ", group().global_rank(), " dropped ", name,
                                " while it handled an error; see that rank's own message")},
           number);
      return;
    }
    fail({FailureKind::kTimeout,
          detail::concatenate(name, " did not end within its time limit of ", limit.count(),
                              " ms: on global rank ", group().global_rank(),
                              " it waits for operations that were issued before it; look at what "
                              "the other ranks do instead, or raise the time limit")},
         number);
  }

  /// On a lane.
  void run_step(Operation& operation, std::size_t index) {
    Operation::Step& step = operation.steps[index];
    if (index > 0) {
      wait_until_done(operation.steps[index - 1].passed);
    }
    if (!operation.error) {
      run_stage(operation, step.stage);
    }
    step.stage.issue = nullptr;  // Its tensors end here, not when the peers are done.
    if (index + 1 < operation.steps.size()) {
      step.passed.finish();
      return;
    }
    watch_->end(operation.number);
    --num_in_flight_;
    if (operation.error) {
      operation.completion->fail(std::move(operation.error));
    } else {
      operation.completion->finish();
    }
  }

  void run_stage(Operation& operation, Stage& stage) {
    const at::NoGradGuard no_grad;
    Lane& lane = lane_of(stage.level);
    Works works;
    bool failed = is_failed();
    const auto failed_by = [&](const std::exception& error) {
      failed = true;
      const bool timed_out = dynamic_cast<const TimeoutError*>(&error) != nullptr;
      const std::string how = timed_out
                                  ? detail::concatenate(" did not end within its time limit of ",
                                                        operation.limit.count(), " ms: ")
                                  : std::string(" failed: ");
      Failure failure = detail::failure_of(
          error, detail::concatenate("the ", lane.name, " stage of ", operation.name, how));
      if (failure.kind == FailureKind::kComm && !is_failed()) {
        failure = watch_->heard().value_or(std::move(failure));
      }
      fail(failure, operation.number);
    };
    try {
      if (!failed) {
        const std::lock_guard lock(lane.calls);
        stage.issue(*lane.communicator, {.timeout = left_of(operation), .tag = operation.tag},
                    works);
      }
    } catch (const std::exception& error) {
      failed_by(error);
    }
    for (const WorkPtr& work : works) {
      try {
        work->wait();
      } catch (const std::exception& error) {
        failed_by(error);
      }
    }
    if (failed) {
      operation.error = error_of(operation);
    }
  }

  /// At least a moment, so that an operation whose peers are all there still counts.
  static milliseconds left_of(const Operation& operation) {
    return std::max(std::chrono::ceil<milliseconds>(operation.deadline - Clock::now()),
                    milliseconds{1});
  }

  [[nodiscard]] bool is_failed() {
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
  }

  [[nodiscard]] std::exception_ptr error_of(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    try {
      if (failed_number_ == kAll || failed_number_ == operation.number) {
        detail::throw_failure(*failure_, operation.call_text);
      }
      detail::throw_unusable(*failure_, operation.call_text);
    } catch (const std::exception&) {
      return std::current_exception();
    }
  }

  /// The first failure counts, whoever found it. Wakes both lanes and the peers.
  void fail(const Failure& failure, std::int64_t number) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) {
        return;
      }
      failure_ = failure;
      failed_number_ = number;
    }
    watch_->tell(failure);  // First, so that whom the abort wakes can ask what it was about.
    for (Lane* lane : {&intra_node_, &inter_node_}) {
      try {
        lane->communicator->abort(failure.cause);
      } catch (const std::exception& error) {
        HOPSHARD_LOG(kError, name_, " in group '", group().name, "': the ", lane->name,
                     " communicator could not be aborted: ", error.what());
      }
    }
  }

  const std::string name_;
  const milliseconds timeout_;
  const StorePtr store_;
  const int num_nodes_;
  const int ranks_per_node_;
  const bool gathers_in_place_;
  const int num_exceptions_;
  std::int64_t num_operations_ = 0;
  std::map<std::pair<std::string, std::vector<int>>, int> num_splits_;
  std::atomic<std::int64_t> num_in_flight_ = 0;
  std::mutex mutex_;
  std::optional<Failure> failure_;
  std::int64_t failed_number_ = kAll;  ///< The operation that it is about.
  Lane intra_node_;
  Lane inter_node_;
  std::unique_ptr<detail::PeerWatch> watch_;
};

void check_inner(const Group& group, const CommunicatorPtr& inner, std::string_view level,
                 const std::vector<int>& expected, int expected_rank) {
  HOPSHARD_CHECK(
      inner->group().ranks == expected && inner->rank() == expected_rank, InvalidArgument, "the ",
      level, " communicator of group '", group.name, "' on global rank ", group.global_rank(),
      " must be of ", detail::name_global_ranks(expected), " with this rank at place ",
      expected_rank, ", but is of ", detail::name_global_ranks(inner->group().ranks), " at place ",
      inner->rank(), "; give the group's ranks node after node, ", "the same number on each");
  HOPSHARD_CHECK(inner->group().has_identity_slots(), InvalidArgument, "the ", level,
                 " communicator of group '", group.name,
                 "' has slots of its own; it must have none");
}

}  // namespace

bool has_slice_order(const Group& group, int num_nodes, int ranks_per_node) {
  if (num_nodes < 1 || ranks_per_node < 1 || group.size() != num_nodes * ranks_per_node) {
    return false;
  }
  const std::vector<int> slots = SliceOrder(num_nodes, ranks_per_node).slots();
  for (int member = 0; member < group.size(); ++member) {
    if (group.slot_of(member) != slots[static_cast<std::size_t>(member)]) {
      return false;
    }
  }
  return true;
}

CommunicatorPtr make_hierarchical_communicator(Group group, CommunicatorPtr intra_node,
                                               CommunicatorPtr inter_node,
                                               HierarchicalOptions options) {
  group.validate();
  HOPSHARD_CHECK(intra_node && inter_node, InvalidArgument, "the two-level communicator of group '",
                 group.name, "' needs an intra-node and an inter-node communicator; one is null");
  HOPSHARD_CHECK(options.timeout.count() > 0, InvalidArgument,
                 "the time limit of the two-level communicator of group '", group.name,
                 "' must be positive, got ", options.timeout.count(), " ms");
  const int ranks_per_node = intra_node->size();
  const int num_nodes = inter_node->size();
  HOPSHARD_CHECK(group.size() == num_nodes * ranks_per_node, InvalidArgument, "group '", group.name,
                 "' has ", group.size(), " ranks, but ", ranks_per_node, " on each of ", num_nodes,
                 " nodes make ", num_nodes * ranks_per_node,
                 "; all nodes must have the same number");
  std::vector<int> on_node;
  std::vector<int> on_rail;
  const int node = group.rank / ranks_per_node;
  const int local_place = group.rank % ranks_per_node;
  for (int member = 0; member < group.size(); ++member) {
    const int global_rank = group.ranks[static_cast<std::size_t>(member)];
    if (member / ranks_per_node == node) {
      on_node.push_back(global_rank);
    }
    if (member % ranks_per_node == local_place) {
      on_rail.push_back(global_rank);
    }
  }
  check_inner(group, intra_node, "intra-node", on_node, local_place);
  check_inner(group, inter_node, "inter-node", on_rail, node);
  HOPSHARD_CHECK(
      group.has_identity_slots() || has_slice_order(group, num_nodes, ranks_per_node),
      InvalidArgument, "the slots of group '", group.name, "' are neither those of ", num_nodes,
      " nodes with ", ranks_per_node,
      " ranks in slice order (slot l * N + j for local place l on node j) nor the order of its "
      "ranks; two levels cannot place its slices, use a flat communicator");
  return std::make_shared<HierarchicalCommunicator>(std::move(group), std::move(intra_node),
                                                    std::move(inter_node), std::move(options));
}

}  // namespace hopshard
