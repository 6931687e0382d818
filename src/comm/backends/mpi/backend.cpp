// The `mpi` backend: communicators over Open MPI (or another MPI). Checks and words are here; the
// progress thread does the rest. Sums are taken in the order of the group's ranks, bf16 and fp16 in
// fp32, as `local` does, because MPI's own reduce-scatter takes several times as long.
#include <chrono>
#include <string>
#include <utility>

#include "../backends.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "progress.hpp"

namespace hopshard::detail {
namespace mpi {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kBackend = "mpi";

class MpiCommunicator final : public Communicator {
 public:
  /// @param comm_ranks  the global ranks of `comm`, which may hold more than the group.
  /// @param state       null for a group of one rank.
  MpiCommunicator(Group group, MPI_Comm comm, std::vector<int> comm_ranks,
                  std::shared_ptr<GroupState> state, milliseconds timeout)
      : Communicator(std::move(group)),
        comm_(comm),
        comm_ranks_(std::move(comm_ranks)),
        state_(std::move(state)),
        timeout_(timeout) {}

  ~MpiCommunicator() override {
    try_submit([state = state_] { state->leave(); });
  }

  [[nodiscard]] std::string_view backend() const noexcept override { return kBackend; }

  void abort(std::string_view reason) override {
    try_submit([state = state_, text = std::string(reason)] { state->abort(text); });
  }

  /// The first operation of a group: all members are there and agree on its slots.
  static CommunicatorPtr open(Group group, MPI_Comm comm, const std::vector<int>& comm_ranks,
                              std::uint64_t parent, milliseconds timeout) {
    std::shared_ptr<GroupState> state;
    if (group.size() > 1) {
      state = Progress::get().open(comm, comm_ranks, group, parent);
    }
    const auto communicator = std::make_shared<MpiCommunicator>(std::move(group), comm, comm_ranks,
                                                                std::move(state), timeout);
    if (communicator->state_) {
      MpiCall call{.kind = MpiKind::kConnect, .tag = communicator->group().name};
      if (!communicator->group().has_identity_slots()) {
        call.remark = " with slots";
        for (const int slot : communicator->group().slots) {
          call.remark += concatenate(' ', slot);
        }
      }
      communicator->issue(std::move(call), at::Tensor(), at::Tensor(), {})->wait();
    }
    return communicator;
  }

 private:
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    MpiCall call{.kind = MpiKind::kAllGather, .numel = input.numel()};
    return issue(std::move(call), std::move(output), std::move(input), options);
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    MpiCall call{.kind = MpiKind::kReduceScatter,
                 .reduce_op = op,
                 .accumulate = options.accumulate,
                 .numel = output.numel()};
    return issue(std::move(call), std::move(output), std::move(input), options);
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    MpiCall call{.kind = MpiKind::kAllReduce, .reduce_op = op, .numel = tensor.numel()};
    return issue(std::move(call), std::move(tensor), at::Tensor(), options);
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    MpiCall call{.kind = MpiKind::kBroadcast, .root = root, .numel = tensor.numel()};
    return issue(std::move(call), std::move(tensor), at::Tensor(), options);
  }

  void do_barrier(const CommOptions& options) override {
    issue(MpiCall{.kind = MpiKind::kBarrier}, at::Tensor(), at::Tensor(), options)->wait();
  }

  CommunicatorPtr do_split(Group part) override {
    return open(std::move(part), comm_, comm_ranks_, state_ ? state_->key() : 0, timeout_);
  }

  WorkPtr issue(MpiCall call, at::Tensor output, at::Tensor input, const CommOptions& options) {
    if (call.kind != MpiKind::kConnect) {
      call.tag = options.tag;
    }
    const auto operation = std::make_shared<Operation>();
    operation->call_text = describe_call(kBackend, to_string(call.kind), call.tag, group());
    if (output.defined()) {
      HOPSHARD_CHECK(output.device().is_cpu(), InvalidArgument, operation->call_text,
                     ": a tensor on ", output.device(),
                     " cannot be moved; this backend moves CPU memory only");
      call.dtype = output.scalar_type();
    }
    call.output = std::move(output);
    call.input = std::move(input);
    operation->call = std::move(call);
    submit([state = state_, operation] { state->issue(operation); });
    const milliseconds limit = options.timeout.count() > 0 ? options.timeout : timeout_;
    return make_completion_work(
        operation->completion, limit, [state = state_, operation, limit](bool is_unwinding) {
          Progress::get().submit(state, [state, operation, limit, is_unwinding] {
            state->give_up(operation, limit, is_unwinding);
          });
        });
  }

  void try_submit(std::function<void()> task) {
    if (state_) {
      try {
        submit(std::move(task));
      } catch (const CommError&) {
        // MPI has ended, and told the peers that this rank leaves.
      }
    }
  }

  void submit(std::function<void()> task) { Progress::get().submit(state_, std::move(task)); }

  MPI_Comm comm_;
  std::vector<int> comm_ranks_;
  std::shared_ptr<GroupState> state_;
  milliseconds timeout_;
};

void check_world(const Progress& progress, const Group& group) {
  const auto require = [&](bool holds, const auto&... parts) {
    HOPSHARD_CHECK(holds, ConfigError, "mpi: group '", group.name, "': ", concatenate(parts...),
                   "; start all ranks by one mpirun (or srun --mpi=pmix), and take rank and world "
                   "size from it, e.g. OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE");
  };
  for (const int rank : group.ranks) {
    require(rank < progress.world_size(), "it holds global rank ", rank,
            ", but MPI was started with ranks 0..", progress.world_size() - 1);
  }
  require(group.global_rank() == progress.world_rank(), "this process is global rank ",
          group.global_rank(), " in it, but rank ", progress.world_rank(), " of MPI");
}

/// Returns when all members have come here: a member that does not is named, and MPI's own
/// meeting, which has no time limit, is not begun without it.
void meet(const ConnectOptions& options) {
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  const auto key_of = [](int rank) { return concatenate("mpi/", rank); };
  options.store->set(key_of(options.group.global_rank()), "here");
  std::vector<int> missing;
  for (const int rank : options.group.ranks) {
    try {
      const auto left =
          std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() > 0) {
        static_cast<void>(options.store->get(key_of(rank), left));
      } else if (!options.store->has(key_of(rank))) {
        missing.push_back(rank);
      }
    } catch (const TimeoutError&) {
      missing.push_back(rank);
    }
  }
  HOPSHARD_CHECK(missing.empty(), TimeoutError,
                 describe_call(kBackend, "connect", options.group.name, options.group), ": ",
                 did_not_arrive(missing, options.timeout, options.group.global_rank()));
}

CommunicatorPtr connect(const ConnectOptions& options) {
  const Group& group = options.group;
  if (group.size() == 1) {
    return MpiCommunicator::open(group, MPI_COMM_NULL, group.ranks, 0, options.timeout);
  }
  Progress& progress = Progress::get();
  check_world(progress, group);
  if (options.store != nullptr) {
    meet(options);
  }
  MPI_Comm comm = progress.communicator_of(group.ranks, options.timeout);
  return MpiCommunicator::open(group, comm, group.ranks, 0, options.timeout);
}

}  // namespace
}  // namespace mpi

BackendInfo describe_mpi() {
  return {"mpi", "Open MPI, for ranks that mpirun or srun started; CPU memory", std::nullopt,
          &mpi::connect};
}

}  // namespace hopshard::detail
