// Long, because it is a whole library: streams, communicators, collectives. Each part is read
// alone.
#include "support/fake_nccl.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "hopshard/core/error.hpp"
#include "hopshard/core/ordered_worker.hpp"

namespace hopshard::testing {
namespace {

using hopshard::detail::DeviceEvent;
using hopshard::detail::DeviceStream;

at::ScalarType dtype_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return at::kChar;
    case ncclUint8:
      return at::kByte;
    case ncclInt32:
      return at::kInt;
    case ncclInt64:
      return at::kLong;
    case ncclFloat16:
      return at::kHalf;
    case ncclBfloat16:
      return at::kBFloat16;
    case ncclFloat32:
      return at::kFloat;
    default:
      return at::kDouble;
  }
}

// ---- streams

class FakeEvent final : public DeviceEvent {
 public:
  explicit FakeEvent(DeviceStream* current) : current_(current) {}

  bool is_done() override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void make_current_stream_wait() override;

  void set() {
    // Notified under the lock: a waiter may destroy the event as soon as it sees it.
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  void block() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }

  std::weak_ptr<FakeEvent> self;

 private:
  DeviceStream* current_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

class FakeStream final : public DeviceStream {
 public:
  explicit FakeStream(DeviceStream* current) : current_(current), worker_("fake stream") {}

  [[nodiscard]] cudaStream_t native() const override {
    return reinterpret_cast<cudaStream_t>(const_cast<FakeStream*>(this));
  }
  void follow_current_stream() override {
    if (current_ != nullptr) {
      const auto event = std::static_pointer_cast<FakeEvent>(current_->record());
      run([event] { event->block(); });
    }
  }
  void run(std::function<void()> operations) override { worker_.submit(std::move(operations)); }
  std::shared_ptr<DeviceEvent> record() override {
    auto event = std::make_shared<FakeEvent>(current_ != nullptr ? current_ : nullptr);
    event->self = event;
    run([event] { event->set(); });
    return event;
  }

 private:
  DeviceStream* current_;
  OrderedWorker worker_;
};

void FakeEvent::make_current_stream_wait() {
  if (current_ == nullptr) {
    block();
    return;
  }
  current_->run([event = self.lock()] { event->block(); });
}

}  // namespace

FakeDevice::FakeDevice(bool has_streams)
    : current_stream_(has_streams ? std::make_shared<FakeStream>(nullptr) : nullptr) {}
FakeDevice::~FakeDevice() = default;

DeviceStream& FakeDevice::current_stream() { return *current_stream_; }

std::shared_ptr<DeviceStream> FakeDevice::make_stream(at::Device /*device*/) {
  return std::make_shared<FakeStream>(current_stream_.get());
}

// ---- communicators

struct FakeNccl::Collective {
  std::string function;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;
  int root = -1;

  [[nodiscard]] bool agrees_with(const Collective& other) const {
    return function == other.function && count == other.count && type == other.type &&
           op == other.op && root == other.root;
  }
};

/// The ranks of one communicator.
struct FakeNccl::Clique {
  struct Round {
    std::map<int, Collective> parts;
    bool is_broken = false;  ///< Somebody in it was aborted: it never ends.
    bool is_done = false;
  };
  struct Split {
    std::map<int, std::pair<int, int>> colors_and_keys;  ///< By parent's rank.
    std::map<int, std::shared_ptr<Clique>> parts;        ///< By color.
  };

  std::mutex mutex;
  std::condition_variable changed;
  int num_ranks = 0;
  std::set<int> joined;
  std::set<int> finished;  ///< Finalized or aborted.
  std::map<std::int64_t, Round> rounds;
  std::map<int, Split> splits;

  [[nodiscard]] bool has_all(const std::set<int>& ranks) const {
    return static_cast<int>(ranks.size()) == num_ranks;
  }
  void move_data(const Round& round) const;
};

/// One rank's handle.
struct FakeNccl::Comm {
  std::shared_ptr<Clique> clique;
  int rank = -1;

  // Of the clique's mutex.
  bool is_aborted = false;
  bool is_finalized = false;
  ncclResult_t async_error = ncclSuccess;

  // Of the library's mutex.
  bool is_gone = false;
  int num_busy_looks = 0;
  std::int64_t num_issued = 0;
  std::int64_t num_rounds = 0;
  int num_splits = 0;
  int num_registered = 0;
  std::vector<std::function<void()>> not_started;
  std::shared_ptr<Comm> parent;  ///< Of a split that is not complete yet.
  int split_number = -1;
  int split_color = 0;

  void run(std::int64_t number, const Collective& part);
  void hang();
};

void FakeNccl::Clique::move_data(const Round& round) const {
  const Collective& first = round.parts.begin()->second;
  const at::ScalarType dtype = dtype_of(first.type);
  const auto numel = static_cast<std::int64_t>(first.count);
  const std::size_t bytes = first.count * c10::elementSize(dtype);
  const at::NoGradGuard no_grad;
  const auto view = [&](const void* data) {
    return at::from_blob(const_cast<void*>(data), {numel}, at::TensorOptions().dtype(dtype));
  };
  const auto copy = [&](void* to, const void* from) {
    if (to != from) {
      std::memcpy(to, from, bytes);
    }
  };
  const auto chunk = [&](const void* data, int slot) {
    return static_cast<const char*>(data) + static_cast<std::size_t>(slot) * bytes;
  };
  const auto reduce = [&](int slot) {
    at::Tensor sum;
    for (const auto& [rank, part] : round.parts) {
      const at::Tensor next = view(chunk(part.input, slot));
      if (!sum.defined()) {
        sum = next.clone();
      } else if (first.op == ncclSum) {
        sum.add_(next);
      } else {
        sum = at::maximum(sum, next);
      }
    }
    return sum;
  };
  if (first.function == "all_gather") {
    for (const auto& [from, sender] : round.parts) {
      for (const auto& [to, receiver] : round.parts) {
        copy(static_cast<char*>(receiver.output) + static_cast<std::size_t>(from) * bytes,
             sender.input);
      }
    }
  } else if (first.function == "reduce_scatter") {
    for (const auto& [to, receiver] : round.parts) {
      view(receiver.output).copy_(reduce(to));
    }
  } else if (first.function == "all_reduce") {
    const at::Tensor sum = reduce(0);
    for (const auto& [to, receiver] : round.parts) {
      view(receiver.output).copy_(sum);
    }
  } else {
    for (const auto& [to, receiver] : round.parts) {
      copy(receiver.output, round.parts.at(first.root).input);
    }
  }
}

void FakeNccl::Comm::run(std::int64_t number, const Collective& part) {
  std::unique_lock lock(clique->mutex);
  if (is_aborted) {
    return;
  }
  Clique::Round& round = clique->rounds[number];
  round.parts[rank] = part;
  if (static_cast<int>(round.parts.size()) == clique->num_ranks && !round.is_broken) {
    bool agree = true;
    for (const auto& [other, others] : round.parts) {
      agree = agree && others.agrees_with(part);
    }
    if (agree) {
      clique->move_data(round);
      round.is_done = true;
      clique->changed.notify_all();
    }
  }
  clique->changed.wait(lock, [&] { return round.is_done || is_aborted; });
  round.parts.erase(rank);
  if (round.parts.empty() && round.is_done) {
    clique->rounds.erase(number);
  } else if (!round.is_done) {
    round.is_broken = true;  // Its buffers may be gone; nobody may finish the round any more.
  }
}

void FakeNccl::Comm::hang() {
  std::unique_lock lock(clique->mutex);
  clique->changed.wait(lock, [&] { return is_aborted; });
}

// ---- the library

struct FakeNccl::State {
  FakeNcclFaults faults;
  mutable std::mutex mutex;
  std::vector<std::string> calls;
  std::vector<std::string> misuses;
  std::map<ncclComm_t, std::shared_ptr<Comm>> comms;
};

namespace {

struct Cliques {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<FakeNccl::Clique>> by_id;
  std::int64_t num_ids = 0;
};
Cliques& cliques() {
  static Cliques all;
  return all;
}

// A group is a thread's, as in NCCL.
thread_local int group_depth = 0;

}  // namespace

// The collectives of the thread's group, by communicator, in order.
namespace {
template <typename Comm, typename Collective>
struct Held {
  std::vector<std::pair<std::shared_ptr<Comm>, std::vector<std::pair<Collective, cudaStream_t>>>>
      by_comm;
};
template <typename Comm, typename Collective>
Held<Comm, Collective>& held() {
  thread_local Held<Comm, Collective> of_thread;
  return of_thread;
}
}  // namespace

FakeNccl::FakeNccl(FakeNcclFaults faults) : state_(std::make_unique<State>()) {
  state_->faults = std::move(faults);
}
FakeNccl::~FakeNccl() = default;

std::vector<std::string> FakeNccl::calls() const {
  const std::lock_guard lock(state_->mutex);
  return state_->calls;
}

int FakeNccl::count(const std::string& function) const {
  const std::vector<std::string> all = calls();
  return static_cast<int>(std::count(all.begin(), all.end(), function));
}

std::vector<std::string> FakeNccl::misuses() const {
  const std::lock_guard lock(state_->mutex);
  return state_->misuses;
}

ncclResult_t FakeNccl::enter(const std::string& function) {
  const std::lock_guard lock(state_->mutex);
  state_->calls.push_back(function);
  const auto result = state_->faults.results.find(function);
  return result == state_->faults.results.end() ? ncclSuccess : result->second;
}

ncclResult_t FakeNccl::misuse(const std::string& what) {
  const std::lock_guard lock(state_->mutex);
  state_->misuses.push_back(what);
  return ncclInvalidArgument;
}

std::shared_ptr<FakeNccl::Comm> FakeNccl::find(ncclComm_t comm) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->comms.find(comm);
  return found == state_->comms.end() || found->second->is_gone ? nullptr : found->second;
}

ncclResult_t FakeNccl::get_version(int* version) {
  *version = state_->faults.version;
  return ncclSuccess;
}

ncclResult_t FakeNccl::get_unique_id(ncclUniqueId* id) {
  if (const ncclResult_t result = enter("get_unique_id"); result != ncclSuccess) {
    return result;
  }
  Cliques& all = cliques();
  const std::lock_guard lock(all.mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::string text = "fake-" + std::to_string(all.num_ids++);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

const char* FakeNccl::get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* FakeNccl::get_last_error(ncclComm_t /*comm*/) { return "the fake's last words"; }

ncclResult_t FakeNccl::comm_init_rank_config(ncclComm_t* comm, int num_ranks, ncclUniqueId id,
                                             int rank, ncclConfig_t* config) {
  if (const ncclResult_t result = enter("comm_init_rank_config"); result != ncclSuccess) {
    return result;
  }
  if (config->blocking != 0 || config->splitShare != 0) {
    return misuse("a communicator that blocks, or shares what an abort ends");
  }
  auto made = std::make_shared<Comm>();
  {
    Cliques& all = cliques();
    const std::lock_guard lock(all.mutex);
    std::weak_ptr<Clique>& known = all.by_id[id.internal];
    made->clique = known.lock();
    if (!made->clique) {
      made->clique = std::make_shared<Clique>();
      made->clique->num_ranks = num_ranks;
      known = made->clique;
    }
  }
  made->rank = rank;
  made->num_busy_looks = state_->faults.num_busy_looks;
  {
    const std::lock_guard lock(made->clique->mutex);
    if (rank < 0 || rank >= made->clique->num_ranks || num_ranks != made->clique->num_ranks ||
        !made->clique->joined.insert(rank).second) {
      return misuse("a rank twice or out of range");
    }
  }
  *comm = reinterpret_cast<ncclComm_t>(made.get());
  const std::lock_guard lock(state_->mutex);
  state_->comms[*comm] = std::move(made);
  return ncclInProgress;
}

ncclResult_t FakeNccl::comm_split(ncclComm_t handle, int color, int key, ncclComm_t* part,
                                  ncclConfig_t* config) {
  if (const ncclResult_t result = enter("comm_split"); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm || comm->num_busy_looks > 0 || config->blocking != 0 || config->splitShare != 0) {
    return misuse("split of a communicator that is gone or busy");
  }
  auto made = std::make_shared<Comm>();
  made->parent = comm;
  made->split_color = color;
  made->num_busy_looks = state_->faults.num_busy_looks;
  {
    const std::lock_guard lock(comm->clique->mutex);
    made->split_number = comm->num_splits++;
    Clique::Split& split = comm->clique->splits[made->split_number];
    split.colors_and_keys[comm->rank] = {color, key};
    auto& clique = split.parts[color];
    clique = clique ? clique : std::make_shared<Clique>();
    made->clique = clique;
  }
  *part = reinterpret_cast<ncclComm_t>(made.get());
  const std::lock_guard lock(state_->mutex);
  state_->comms[*part] = std::move(made);
  return ncclInProgress;
}

ncclResult_t FakeNccl::comm_get_async_error(ncclComm_t handle, ncclResult_t* error) {
  const auto comm = find(handle);
  if (!comm) {
    return misuse("async error of a communicator that is gone");
  }
  *error = ncclInProgress;
  if (comm->parent) {
    const std::lock_guard lock(comm->parent->clique->mutex);
    const Clique::Split& split = comm->parent->clique->splits[comm->split_number];
    if (static_cast<int>(split.colors_and_keys.size()) < comm->parent->clique->num_ranks) {
      return ncclSuccess;
    }
    std::map<int, int> by_key;
    for (const auto& [rank, color_and_key] : split.colors_and_keys) {
      if (color_and_key.first == comm->split_color) {
        by_key[color_and_key.second] = rank;
      }
    }
    int rank = 0;
    for (const auto& [key, parent_rank] : by_key) {
      comm->rank = parent_rank == comm->parent->rank ? rank : comm->rank;
      ++rank;
    }
    const std::lock_guard part_lock(comm->clique->mutex);
    comm->clique->num_ranks = rank;
    comm->clique->joined.insert(comm->rank);
  }
  comm->parent = nullptr;
  {
    const std::lock_guard lock(comm->clique->mutex);
    if (comm->async_error != ncclSuccess) {
      *error = comm->async_error;
      return ncclSuccess;
    }
    if (!comm->clique->has_all(comm->clique->joined) ||
        (comm->is_finalized && !comm->clique->has_all(comm->clique->finished))) {
      return ncclSuccess;
    }
  }
  std::vector<std::function<void()>> starting;
  {
    const std::lock_guard lock(state_->mutex);
    if (comm->num_busy_looks > 0) {
      --comm->num_busy_looks;
      return ncclSuccess;
    }
    starting.swap(comm->not_started);
  }
  for (const auto& start : starting) {
    start();
  }
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t FakeNccl::comm_finalize(ncclComm_t handle) {
  if (const ncclResult_t result = enter("comm_finalize"); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm || comm->is_finalized) {
    return misuse("finalize of a communicator that is gone or finalized");
  }
  if (comm->num_registered > 0) {
    return misuse("finalize with registered memory");
  }
  const std::lock_guard lock(comm->clique->mutex);
  comm->is_finalized = true;
  comm->clique->finished.insert(comm->rank);
  return ncclInProgress;
}

ncclResult_t FakeNccl::comm_destroy(ncclComm_t handle) {
  if (const ncclResult_t result = enter("comm_destroy"); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm || !comm->is_finalized) {
    return misuse("destroy of a communicator that is gone or was not finalized");
  }
  const std::lock_guard lock(state_->mutex);
  comm->is_gone = true;
  return ncclSuccess;
}

ncclResult_t FakeNccl::comm_abort(ncclComm_t handle) {
  if (const ncclResult_t result = enter("comm_abort"); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm) {
    return misuse("abort of a communicator that is gone");
  }
  {
    const std::lock_guard lock(comm->clique->mutex);
    comm->is_aborted = true;
    if (comm->rank >= 0) {
      comm->clique->finished.insert(comm->rank);
    }
    comm->clique->changed.notify_all();
  }
  const std::lock_guard lock(state_->mutex);
  comm->is_gone = true;
  comm->not_started.clear();
  return ncclSuccess;
}

ncclResult_t FakeNccl::comm_register(ncclComm_t handle, void* memory, std::size_t /*num_bytes*/,
                                     void** registration) {
  if (const ncclResult_t result = enter("comm_register"); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm) {
    return misuse("registration with a communicator that is gone");
  }
  *registration = memory;
  const std::lock_guard lock(state_->mutex);
  ++comm->num_registered;
  return ncclSuccess;
}

ncclResult_t FakeNccl::comm_deregister(ncclComm_t handle, void* /*registration*/) {
  if (const ncclResult_t result = enter("comm_deregister"); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm || comm->num_registered == 0) {
    return misuse("a registration that is not there");
  }
  const std::lock_guard lock(state_->mutex);
  --comm->num_registered;
  return ncclSuccess;
}

ncclResult_t FakeNccl::mem_alloc(void** memory, std::size_t num_bytes) {
  if (const ncclResult_t result = enter("mem_alloc"); result != ncclSuccess) {
    return result;
  }
  constexpr std::size_t kPage = 4096;
  *memory = std::aligned_alloc(kPage, (num_bytes + kPage - 1) / kPage * kPage);
  return *memory == nullptr ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t FakeNccl::mem_free(void* memory) {
  const ncclResult_t result = enter("mem_free");
  std::free(memory);
  return result;
}

ncclResult_t FakeNccl::group_start() {
  if (const ncclResult_t result = enter("group_start"); result != ncclSuccess) {
    return result;
  }
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t FakeNccl::group_end() {
  const ncclResult_t result = enter("group_end");
  if (group_depth == 0) {
    return misuse("group_end without group_start");
  }
  if (--group_depth > 0) {
    return result;
  }
  auto collectives = std::exchange(held<Comm, Collective>().by_comm, {});
  ncclResult_t worst = result;
  for (auto& [comm, of_comm] : collectives) {
    if (worst == ncclSuccess || worst == ncclInProgress) {
      const ncclResult_t launched = launch(comm, std::move(of_comm));
      worst = launched == ncclSuccess ? worst : launched;
    }
  }
  return worst;
}

ncclResult_t FakeNccl::collective(const std::string& function, ncclComm_t handle,
                                  cudaStream_t stream, Collective part) {
  if (const ncclResult_t result = enter(function); result != ncclSuccess) {
    return result;
  }
  const auto comm = find(handle);
  if (!comm || comm->num_busy_looks > 0 || !comm->not_started.empty() || comm->is_finalized) {
    return misuse(function + " on a communicator that is gone, busy or finalized");
  }
  part.function = function;
  if (group_depth == 0) {
    return launch(comm, {{std::move(part), stream}});
  }
  auto& by_comm = held<Comm, Collective>().by_comm;
  if (by_comm.empty() || by_comm.back().first != comm) {
    by_comm.emplace_back(comm, std::vector<std::pair<Collective, cudaStream_t>>());
  }
  by_comm.back().second.emplace_back(std::move(part), stream);
  return ncclSuccess;
}

ncclResult_t FakeNccl::launch(const std::shared_ptr<Comm>& comm,
                              std::vector<std::pair<Collective, cudaStream_t>> collectives) {
  std::vector<std::function<void()>> starting;
  {
    const std::lock_guard lock(state_->mutex);
    for (auto& [part, native] : collectives) {
      const std::int64_t number = comm->num_issued++;
      const bool reports = number == state_->faults.async_error_at;
      const bool hangs = reports || number == state_->faults.hang_at;
      const std::int64_t round = comm->num_rounds++;
      auto* const stream = reinterpret_cast<FakeStream*>(native);
      starting.emplace_back([comm, stream, reports, hangs, round, part = std::move(part)] {
        stream->run([comm, reports, hangs, round, part] {
          if (reports) {
            const std::lock_guard clique_lock(comm->clique->mutex);
            comm->async_error = ncclRemoteError;
          }
          if (hangs) {
            comm->hang();
          } else {
            comm->run(round, part);
          }
        });
      });
    }
    comm->num_busy_looks = state_->faults.num_busy_looks;
    if (comm->num_busy_looks > 0) {
      comm->not_started = std::move(starting);
      return ncclInProgress;
    }
  }
  for (const auto& start : starting) {
    start();
  }
  return ncclSuccess;
}

ncclResult_t FakeNccl::all_gather(const void* input, void* output, std::size_t count,
                                  ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return collective("all_gather", comm, stream,
                    {.input = input, .output = output, .count = count, .type = type});
}

ncclResult_t FakeNccl::reduce_scatter(const void* input, void* output, std::size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
  return collective("reduce_scatter", comm, stream,
                    {.input = input, .output = output, .count = count, .type = type, .op = op});
}

ncclResult_t FakeNccl::all_reduce(const void* input, void* output, std::size_t count,
                                  ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
  return collective("all_reduce", comm, stream,
                    {.input = input, .output = output, .count = count, .type = type, .op = op});
}

ncclResult_t FakeNccl::broadcast(const void* input, void* output, std::size_t count,
                                 ncclDataType_t type, int root, ncclComm_t comm,
                                 cudaStream_t stream) {
  return collective("broadcast", comm, stream,
                    {.input = input, .output = output, .count = count, .type = type, .root = root});
}

}  // namespace hopshard::testing
