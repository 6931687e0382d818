// One ncclComm_t: made without blocking, under our time limit, and freed exactly once, by whoever
// comes first. Next: nccl_group.hpp.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hopshard/comm/group.hpp"
#include "nccl_api.hpp"
#include "peers.hpp"

namespace hopshard::detail {

/// Threads: all members may be called from any thread; one at a time reaches NCCL.
class NcclComm {
 public:
  /// @param comm  owned from now on.
  NcclComm(std::shared_ptr<NcclApi> api, ncclComm_t comm);
  /// Aborts, unless it is closed.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// What `call` returns; ncclInvalidUsage, without calling it, after the end of the communicator.
  [[nodiscard]] ncclResult_t with(const std::function<ncclResult_t(ncclComm_t)>& call);
  /// The same for calls that launch operations, as one launch if `as_group`. ncclInProgress if some
  /// are not on their stream yet.
  [[nodiscard]] ncclResult_t launch(bool as_group,
                                    const std::function<ncclResult_t(ncclComm_t)>& calls);
  /// ncclInProgress while it is busy with a call that returned early.
  [[nodiscard]] ncclResult_t state();

  void register_memory(void* memory, std::size_t num_bytes) noexcept;

  /// Ends what is in flight, on this rank.
  void abort() noexcept;
  /// The orderly end: takes back registrations and flushes; poll state(), then destroy().
  [[nodiscard]] ncclResult_t finalize();
  void destroy() noexcept;

  /// "unhandled cuda error (...)", with NCCL's own last words.
  [[nodiscard]] std::string explain(ncclResult_t result);

 private:
  std::shared_ptr<NcclApi> api_;
  std::mutex mutex_;
  ncclComm_t comm_;
  std::vector<void*> registrations_;
};

/// Who connects, and how long it may take.
struct NcclConnect {
  std::shared_ptr<NcclApi> api;
  StorePtr store;
  Group group;
  std::chrono::milliseconds limit{0};
  std::string
      call_text;  ///< For errors, e.g. "nccl connect in group 'world' on rank 0 of 4 (...)".
};

/// A new communicator of the group, over an id that its rank 0 puts into the store.
/// @throws CommError, TimeoutError
[[nodiscard]] std::unique_ptr<NcclComm> make_nccl_comm(const NcclConnect& connect, Peers& peers);

/// The same out of `parent`, whose ranks all take part.
[[nodiscard]] std::unique_ptr<NcclComm> split_nccl_comm(NcclComm& parent,
                                                        const NcclConnect& connect, Peers& peers);

/// Waits between looks: short at first, so that what is quick stays quick.
class Backoff {
 public:
  void pause();

 private:
  int num_pauses_ = 0;
};

}  // namespace hopshard::detail
