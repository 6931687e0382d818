#include "nccl_comm.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "../../describe.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often the store is asked for a peer's failure; NCCL itself is asked much more often.
constexpr milliseconds kLookInterval{50};

ncclConfig_t make_config(const Group& group) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;    // Or abort could not end a call that hangs.
  config.splitShare = 0;  // Or an abort in the family would end them all.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  config.commName = group.name.c_str();  // NCCL copies it.
#else
  static_cast<void>(group);
#endif
  return config;
}

/// Tells the others why this rank will not come, so that they need not wait for their limit.
[[noreturn]] void throw_failed(const NcclConnect& connect, Peers& peers, const std::string& cause) {
  peers.report(NcclFailure{FailureKind::kComm, -1,
                           concatenate("global rank ", connect.group.global_rank(), ": ", cause)});
  throw CommError(concatenate(connect.call_text, ": ", cause));
}

[[noreturn]] void throw_late(const NcclConnect& connect, Peers& peers) {
  const std::vector<int> missing = peers.global_ranks_not_here();
  const std::string cause =
      missing.empty()
          ? concatenate("all ranks arrived, but NCCL did not connect them within ",
                        connect.limit.count(),
                        " ms; look at the network with NCCL_DEBUG=INFO, or raise the time limit")
          : did_not_arrive(missing, connect.limit, connect.group.global_rank());
  peers.report(NcclFailure{
      FailureKind::kComm, -1,
      concatenate("global rank ", connect.group.global_rank(), " gave up connecting: ", cause)});
  throw TimeoutError(concatenate(connect.call_text, ": ", cause));
}

/// Throws what a peer reported, or that the time is over.
void check_peers(const NcclConnect& connect, Peers& peers, Clock::time_point deadline) {
  if (peers.have_news()) {
    const auto failure = peers.failure();
    HOPSHARD_CHECK(!failure, CommError, connect.call_text, ": ", failure->cause);
  }
  if (Clock::now() > deadline) {
    throw_late(connect, peers);
  }
}

ncclUniqueId exchange_id(const NcclConnect& connect, Peers& peers, Clock::time_point deadline) {
  ncclUniqueId id{};
  if (connect.group.rank == 0) {
    const ncclResult_t result = connect.api->get_unique_id(&id);
    if (result != ncclSuccess) {
      throw_failed(connect, peers,
                   concatenate("NCCL made no unique id: ", connect.api->get_error_string(result),
                               "; it needs a network interface, see NCCL_SOCKET_IFNAME"));
    }
    connect.store->set("id", {id.internal, sizeof(id.internal)});
    return id;
  }
  std::string value;
  while (value.empty()) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    try {
      value = connect.store->get("id", std::clamp(left, milliseconds(1), kLookInterval));
    } catch (const TimeoutError&) {
      check_peers(connect, peers, deadline);
    }
  }
  if (value.size() != sizeof(id.internal)) {
    throw_failed(connect, peers,
                 concatenate("the store holds an id of ", value.size(), " bytes instead of ",
                             sizeof(id.internal), "; its keys are not fresh"));
  }
  std::memcpy(id.internal, value.data(), value.size());
  return id;
}

void await_ready(NcclComm& comm, const NcclConnect& connect, Peers& peers,
                 Clock::time_point deadline) {
  Backoff backoff;
  auto next_look = Clock::now() + kLookInterval;
  for (;;) {
    const bool is_time_to_look = Clock::now() > std::min(next_look, deadline);
    // The state after the clock: what is ready in time is never called late.
    const ncclResult_t state = comm.state();
    if (state == ncclSuccess) {
      return;
    }
    if (state != ncclInProgress) {
      throw_failed(connect, peers, concatenate("NCCL could not connect: ", comm.explain(state)));
    }
    if (is_time_to_look) {
      check_peers(connect, peers, deadline);
      next_look = Clock::now() + kLookInterval;
    }
    backoff.pause();
  }
}

}  // namespace

void Backoff::pause() {
  constexpr int kNumShort = 20;
  constexpr int kNumMedium = 100;
  const auto length = num_pauses_ < kNumShort    ? std::chrono::microseconds(20)
                      : num_pauses_ < kNumMedium ? std::chrono::microseconds(200)
                                                 : std::chrono::microseconds(2000);
  ++num_pauses_;
  std::this_thread::sleep_for(length);
}

NcclComm::NcclComm(std::shared_ptr<NcclApi> api, ncclComm_t comm)
    : api_(std::move(api)), comm_(comm) {}

NcclComm::~NcclComm() { abort(); }

ncclResult_t NcclComm::with(const std::function<ncclResult_t(ncclComm_t)>& call) {
  const std::lock_guard lock(mutex_);
  return comm_ == nullptr ? ncclInvalidUsage : call(comm_);
}

ncclResult_t NcclComm::launch(bool as_group, const std::function<ncclResult_t(ncclComm_t)>& calls) {
  return with([&](ncclComm_t comm) {
    if (!as_group) {
      return calls(comm);
    }
    if (const ncclResult_t result = api_->group_start(); result != ncclSuccess) {
      return result;
    }
    const ncclResult_t result = calls(comm);
    const ncclResult_t end = api_->group_end();  // Also after an error: the group is the thread's.
    return result == ncclSuccess || result == ncclInProgress ? end : result;
  });
}

ncclResult_t NcclComm::state() {
  return with([&](ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = api_->comm_get_async_error(comm, &state);
    return result == ncclSuccess ? state : result;
  });
}

void NcclComm::register_memory(void* memory, std::size_t num_bytes) noexcept {
  const ncclResult_t result = with([&](ncclComm_t comm) {
    void* handle = nullptr;
    const ncclResult_t done = api_->comm_register(comm, memory, num_bytes, &handle);
    if (done == ncclSuccess && handle != nullptr) {
      registrations_.push_back(handle);
    }
    return done;
  });
  if (result != ncclSuccess) {
    // A hint: the operations are right without it.
    HOPSHARD_LOG(kDebug, "NCCL did not register ", num_bytes,
                 " bytes: ", api_->get_error_string(result));
  }
}

void NcclComm::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) {
    return;
  }
  const ncclResult_t result = api_->comm_abort(std::exchange(comm_, nullptr));
  if (result != ncclSuccess && result != ncclInProgress) {
    HOPSHARD_LOG(kWarning, "NCCL could not abort: ", api_->get_error_string(result));
  }
}

ncclResult_t NcclComm::finalize() {
  return with([&](ncclComm_t comm) {
    for (void* const handle : registrations_) {
      if (const ncclResult_t result = api_->comm_deregister(comm, handle); result != ncclSuccess) {
        HOPSHARD_LOG(kDebug, "NCCL kept a registration: ", api_->get_error_string(result));
      }
    }
    registrations_.clear();
    return api_->comm_finalize(comm);
  });
}

void NcclComm::destroy() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) {
    return;
  }
  const ncclResult_t result = api_->comm_destroy(std::exchange(comm_, nullptr));
  if (result != ncclSuccess && result != ncclInProgress) {
    HOPSHARD_LOG(kWarning, "NCCL could not destroy: ", api_->get_error_string(result));
  }
}

std::string NcclComm::explain(ncclResult_t result) {
  const std::lock_guard lock(mutex_);
  const char* const last = api_->get_last_error(comm_);  // Of the process, so it may be null.
  std::string text = api_->get_error_string(result);
  if (last != nullptr && *last != '\0') {
    text += concatenate(" (", last, ')');
  }
  return text;
}

std::unique_ptr<NcclComm> make_nccl_comm(const NcclConnect& connect, Peers& peers) {
  const Clock::time_point deadline = Clock::now() + connect.limit;
  peers.say_here();
  const ncclUniqueId id = exchange_id(connect, peers, deadline);
  ncclConfig_t config = make_config(connect.group);
  ncclComm_t raw = nullptr;
  const ncclResult_t result = connect.api->comm_init_rank_config(&raw, connect.group.size(), id,
                                                                 connect.group.my_slot(), &config);
  auto comm = std::make_unique<NcclComm>(connect.api, raw);
  if (result != ncclSuccess && result != ncclInProgress) {
    throw_failed(connect, peers, concatenate("NCCL could not connect: ", comm->explain(result)));
  }
  await_ready(*comm, connect, peers, deadline);
  return comm;
}

std::unique_ptr<NcclComm> split_nccl_comm(NcclComm& parent, const NcclConnect& connect,
                                          Peers& peers) {
  const Clock::time_point deadline = Clock::now() + connect.limit;
  peers.say_here();
  ncclConfig_t config = make_config(connect.group);
  ncclComm_t raw = nullptr;
  const ncclResult_t result = parent.with([&](ncclComm_t comm) {
    return connect.api->comm_split(comm, /*color=*/0, /*key=*/connect.group.my_slot(), &raw,
                                   &config);
  });
  auto part = std::make_unique<NcclComm>(connect.api, raw);
  if (result != ncclSuccess && result != ncclInProgress) {
    throw_failed(connect, peers, concatenate("NCCL could not split: ", parent.explain(result)));
  }
  // The parent is busy until the part exists, and refuses other calls so long.
  await_ready(parent, connect, peers, deadline);
  await_ready(*part, connect, peers, deadline);
  return part;
}

}  // namespace hopshard::detail
