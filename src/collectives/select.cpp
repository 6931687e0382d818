// The two communicators are separate groups of the transport, so calls of one kind need no order
// among those of the other. What a flat communicator finds by itself - ranks that issued different
// operations - can here put ranks on different communicators, where each waits for the others; the
// watch over the store finds those.
#include "hopshard/collectives/select.hpp"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/describe.hpp"
#include "hopshard/collectives/hierarchical_communicator.hpp"
#include "hopshard/core/error.hpp"
#include "peer_watch.hpp"

namespace hopshard {
namespace {

using detail::Failure;
using detail::FailureKind;

/// What the communicator and its works share; works may end after the communicator.
class Shared {
 public:
  Shared(CommunicatorPtr flat, CommunicatorPtr hierarchical, const StorePtr& store)
      : flat_(std::move(flat)),
        hierarchical_(std::move(hierarchical)),
        watch_(std::make_unique<detail::PeerWatch>(
            flat_->group(), "selecting", store,
            [this](const Failure& failure) { fail(failure); })) {}

  [[nodiscard]] Communicator& of(Algorithm algorithm) const {
    return algorithm == Algorithm::kFlat ? *flat_ : *hierarchical_;
  }
  [[nodiscard]] bool has_hierarchical() const { return hierarchical_ != nullptr; }

  void begin(std::int64_t number, const detail::OperationText& operation) {
    watch_->begin(number, detail::to_string(operation));
  }
  void end(std::int64_t number) {
    if (watch_) {
      watch_->end(number);
    }
  }

  /// The first failure counts; wakes all that wait, here and elsewhere.
  void fail(const Failure& failure) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) {
        return;
      }
      failure_ = failure;
    }
    if (watch_) {
      watch_->tell(failure);  // First: see PeerWatch::heard().
    }
    for (const CommunicatorPtr& inner : {flat_, hierarchical_}) {
      if (inner) {
        inner->abort(failure.cause);
      }
    }
  }

  [[nodiscard]] std::optional<Failure> failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  /// The first failure as this call's error: `error` itself if nothing was known before it.
  [[noreturn]] void rethrow(const std::exception& error, const std::string& call_text) {
    Failure of_this_call = detail::failure_of(error, "");
    if (of_this_call.kind == FailureKind::kComm && watch_ && !failure()) {
      of_this_call = watch_->heard().value_or(std::move(of_this_call));
    }
    fail(of_this_call);
    const std::optional<Failure> first = failure();
    // A disagreement or an abort is what made the inner one fail, so it says more.
    detail::throw_failure(first->kind == FailureKind::kSchedule ? *first : of_this_call, call_text);
  }

  /// The inner communicators leave their groups, although works may still hold this.
  void leave() {
    watch_->stop();  // Its callback uses all of these.
    watch_.reset();
    hierarchical_.reset();
    flat_.reset();
  }

 private:
  CommunicatorPtr flat_;
  CommunicatorPtr hierarchical_;
  std::mutex mutex_;
  std::optional<Failure> failure_;
  std::unique_ptr<detail::PeerWatch> watch_;
};

class SelectedWork final : public Work {
 public:
  SelectedWork(WorkPtr inner, std::shared_ptr<Shared> shared, std::int64_t number,
               std::string call_text)
      : inner_(std::move(inner)),
        shared_(std::move(shared)),
        number_(number),
        call_text_(std::move(call_text)) {}

  /// The inner one knows what a dropped work has to do.
  ~SelectedWork() override {
    inner_.reset();
    shared_->end(number_);
  }

  void wait() override {
    try {
      inner_->wait();
    } catch (const Error& error) {
      shared_->end(number_);
      shared_->rethrow(error, call_text_);
    }
    shared_->end(number_);
  }

  bool test() override { return inner_->test(); }

 private:
  WorkPtr inner_;
  std::shared_ptr<Shared> shared_;
  std::int64_t number_;
  std::string call_text_;
};

std::int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

class SelectingCommunicator final : public Communicator {
 public:
  SelectingCommunicator(const CommunicatorPtr& flat, const CommunicatorPtr& hierarchical,
                        std::string name, SelectOptions options)
      : Communicator(flat->group()),
        name_(std::move(name)),
        options_(std::move(options)),
        shared_(std::make_shared<Shared>(flat, hierarchical, options_.store)) {}

  ~SelectingCommunicator() override { shared_->leave(); }

  [[nodiscard]] std::string_view backend() const noexcept override { return name_; }

  [[nodiscard]] Algorithm algorithm(CollectiveOp op, std::int64_t num_bytes) const override {
    return select_algorithm(op, num_bytes, group(), shared_->has_hierarchical(), options_);
  }

  void group_begin() override {
    shared_->of(Algorithm::kFlat).group_begin();
    if (shared_->has_hierarchical()) {
      shared_->of(Algorithm::kHierarchical).group_begin();
    }
  }
  void group_end() override {
    if (shared_->has_hierarchical()) {
      shared_->of(Algorithm::kHierarchical).group_end();
    }
    shared_->of(Algorithm::kFlat).group_end();
  }

  void abort(std::string_view reason) override {
    shared_->fail({FailureKind::kComm, detail::concatenate("aborted by global rank ",
                                                           group().global_rank(), ": ", reason)});
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    return issue(CollectiveOp::kAllGather, bytes_of(output),
                 {.op = "all_gather",
                  .tag = options.tag,
                  .numel = input.numel(),
                  .dtype = input.scalar_type()},
                 [&](Communicator& inner) { return inner.all_gather(output, input, options); });
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    return issue(
        CollectiveOp::kReduceScatter, bytes_of(input),
        {.op = "reduce_scatter",
         .tag = options.tag,
         .numel = output.numel(),
         .dtype = output.scalar_type(),
         .reduce_op = op},
        [&](Communicator& inner) { return inner.reduce_scatter(output, input, op, options); });
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    return issue(CollectiveOp::kAllReduce, bytes_of(tensor),
                 {.op = "all_reduce",
                  .tag = options.tag,
                  .numel = tensor.numel(),
                  .dtype = tensor.scalar_type(),
                  .reduce_op = op},
                 [&](Communicator& inner) { return inner.all_reduce(tensor, op, options); });
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    return issue(CollectiveOp::kBroadcast, bytes_of(tensor),
                 {.op = "broadcast",
                  .tag = options.tag,
                  .numel = tensor.numel(),
                  .dtype = tensor.scalar_type(),
                  .root = root},
                 [&](Communicator& inner) { return inner.broadcast(tensor, root, options); });
  }

  void do_barrier(const CommOptions& options) override {
    issue(CollectiveOp::kBarrier, 0, {.op = "barrier", .tag = options.tag},
          [&](Communicator& inner) {
            inner.barrier(options);
            return make_finished_work();
          })
        ->wait();
  }

  CommunicatorPtr do_split(Group part) override {
    SelectOptions options = options_;
    const NodeShape shape = shape_of(part);
    options.shape = shape;
    if (options.store) {
      const int generation = num_splits_[{part.name, part.ranks}]++;
      options.store = make_prefix_store(options.store, detail::concatenate("split", generation));
    }
    const CommunicatorPtr flat = shared_->of(Algorithm::kFlat).split(part);
    CommunicatorPtr hierarchical;
    if (shape.num_nodes > 1 && shape.ranks_per_node > 1) {
      hierarchical = shared_->of(Algorithm::kHierarchical).split(part);
    }
    // By the same backend, so by the same name, even where only the flat one serves the part.
    return std::make_shared<SelectingCommunicator>(flat, hierarchical, name_, std::move(options));
  }

  at::Tensor do_allocate(std::int64_t num_bytes) override {
    const bool two = shared_->has_hierarchical();
    return shared_->of(two ? Algorithm::kHierarchical : Algorithm::kFlat).allocate(num_bytes);
  }

  void do_register_memory(const at::Tensor& memory) override {
    shared_->of(Algorithm::kFlat).register_memory(memory);
    if (shared_->has_hierarchical()) {
      shared_->of(Algorithm::kHierarchical).register_memory(memory);
    }
  }

  template <typename Call>
  WorkPtr issue(CollectiveOp op, std::int64_t bytes, const detail::OperationText& operation,
                Call call) {
    std::string call_text = detail::describe_call(name_, operation.op, operation.tag, group());
    if (const std::optional<Failure> failure = shared_->failure()) {
      detail::throw_unusable(*failure, call_text);
    }
    const Algorithm chosen = algorithm(op, bytes);
    const std::int64_t number = num_operations_++;
    shared_->begin(number, operation);
    WorkPtr work;
    try {
      work = call(shared_->of(chosen));
    } catch (const InvalidArgument&) {
      shared_->end(number);
      throw;
    } catch (const Error& error) {
      shared_->end(number);
      shared_->rethrow(error, call_text);
    }
    if (options_.meter) {
      options_.meter->add(detail::concatenate("algorithm/", operation.op, '/', to_string(chosen)));
    }
    return std::make_unique<SelectedWork>(std::move(work), shared_, number, std::move(call_text));
  }

  /// How a part lies on the nodes; one rank per node where two levels do not apply.
  [[nodiscard]] NodeShape shape_of(const Group& part) const {
    const NodeShape flat{.num_nodes = part.size(), .ranks_per_node = 1};
    if (!shared_->has_hierarchical()) {
      return flat;
    }
    std::vector<int> nodes;
    std::vector<int> places;
    for (const int global_rank : part.ranks) {
      const auto& ranks = group().ranks;
      const auto member =
          static_cast<int>(std::find(ranks.begin(), ranks.end(), global_rank) - ranks.begin());
      nodes.push_back(member / options_.shape.ranks_per_node);
      places.push_back(member % options_.shape.ranks_per_node);
    }
    std::size_t k = 1;
    while (k < nodes.size() && nodes[k] == nodes[0]) {
      ++k;
    }
    if (nodes.size() % k != 0) {
      return flat;
    }
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const bool starts_node = i % k == 0 && i > 0;
      if (places[i] != places[i % k] || nodes[i] != nodes[i - i % k] ||
          (starts_node && nodes[i] == nodes[i - 1])) {
        return flat;
      }
    }
    const NodeShape shape{.num_nodes = static_cast<int>(nodes.size() / k),
                          .ranks_per_node = static_cast<int>(k)};
    const bool has_fitting_slots =
        part.has_identity_slots() || has_slice_order(part, shape.num_nodes, shape.ranks_per_node);
    return has_fitting_slots ? shape : flat;
  }

  const std::string name_;
  const SelectOptions options_;
  const std::shared_ptr<Shared> shared_;
  std::int64_t num_operations_ = 0;
  std::map<std::pair<std::string, std::vector<int>>, int> num_splits_;
};

bool same_slots(const Group& left, const Group& right) {
  for (int member = 0; member < left.size(); ++member) {
    if (left.slot_of(member) != right.slot_of(member)) {
      return false;
    }
  }
  return true;
}

}  // namespace

CommunicatorPtr make_selecting_communicator(CommunicatorPtr flat, CommunicatorPtr hierarchical,
                                            SelectOptions options) {
  HOPSHARD_CHECK(flat != nullptr, InvalidArgument,
                 "a selecting communicator needs a flat one for the calls that two levels cannot "
                 "serve");
  // Bad costs and shapes should be found here, not at the first call.
  static_cast<void>(choose_algorithm(CollectiveOp::kBarrier, options.shape, 0, options.costs));
  const Group& group = flat->group();
  std::string name = detail::concatenate("selecting(", flat->backend(), ")");
  if (hierarchical) {
    HOPSHARD_CHECK(hierarchical->group().ranks == group.ranks &&
                       hierarchical->rank() == group.rank &&
                       same_slots(hierarchical->group(), group),
                   InvalidArgument, "the flat communicator of group '", group.name,
                   "' and the hierarchical one of group '", hierarchical->group().name,
                   "' must have the same ranks and slots");
    HOPSHARD_CHECK(group.size() == options.shape.num_nodes * options.shape.ranks_per_node,
                   InvalidArgument, "group '", group.name, "' has ", group.size(), " ranks, but ",
                   options.shape.num_nodes, " nodes with ", options.shape.ranks_per_node,
                   " ranks were given");
    name = detail::concatenate("selecting(", flat->backend(), ", ", hierarchical->backend(), ")");
  }
  return std::make_shared<SelectingCommunicator>(flat, hierarchical, std::move(name),
                                                 std::move(options));
}

Algorithm select_algorithm(CollectiveOp op, std::int64_t bytes, const Group& group,
                           bool has_hierarchical, const SelectOptions& options) {
  if (!has_hierarchical || options.selection == Selection::kFlat) {
    return Algorithm::kFlat;
  }
  const bool needs_slice_order =
      op == CollectiveOp::kAllGather || op == CollectiveOp::kReduceScatter;
  if (needs_slice_order &&
      !has_slice_order(group, options.shape.num_nodes, options.shape.ranks_per_node)) {
    return Algorithm::kFlat;
  }
  return options.selection == Selection::kHierarchical
             ? Algorithm::kHierarchical
             : choose_algorithm(op, options.shape, bytes, options.costs);
}

}  // namespace hopshard
