// What a communicator and its works share: the order of operations, their ends and the group's end.
// A thread per group watches what no caller does: NCCL's errors, the peers, time limits.
//
// [Note: life of an operation] issue() puts it on the group's stream (or holds it until
// release_held()), record() marks its end there. On a device with streams wait() makes the caller's
// stream wait for that mark and lets go of the buffers, which then are safe in stream order; on the
// host, and for barriers, it blocks until the mark is reached. The watch sees the mark, or the
// first trouble: then the group settles on one failure, aborts its NCCL communicator, gives the
// kernels a moment to end, and fails what is pending.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "device.hpp"
#include "nccl_comm.hpp"
#include "peers.hpp"

namespace hopshard::detail {

/// One collective of this rank.
struct NcclOperation {
  std::string text;       ///< What all ranks must issue alike.
  std::string call_text;  ///< For errors.
  std::chrono::milliseconds limit{0};
  std::vector<at::Tensor> tensors;  ///< Buffers and scratch, alive as long as NCCL may use them.
  std::function<void()> prepare;    ///< Tensor operations before, on the stream; may be empty.
  std::function<ncclResult_t(ncclComm_t, cudaStream_t)> launch;  ///< Empty: nothing to move.
  std::function<void()> finish;  ///< Tensor operations after, on the stream; may be empty.

  // The group's own.
  enum class State { kHeld, kLaunching, kInFlight, kDone, kFailed };
  State state = State::kHeld;
  std::int64_t sequence = -1;
  std::chrono::steady_clock::time_point deadline;
  std::shared_ptr<DeviceEvent> end;
};
using NcclOperationPtr = std::shared_ptr<NcclOperation>;

struct NcclGroupOptions {
  bool check_calls = false;
  std::chrono::milliseconds watch_interval{1000};
};

/// Threads: issue(), hold() and release_held() from one at a time; all others from any.
class NcclGroup {
 public:
  /// @param comm  null for a group of one, which issues nothing.
  NcclGroup(std::shared_ptr<DeviceApi> device_api, at::Device device,
            std::unique_ptr<NcclComm> comm, StorePtr store, Group group, NcclGroupOptions options);
  /// Requires close().
  ~NcclGroup() = default;
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  [[nodiscard]] at::Device device() const noexcept { return device_; }
  [[nodiscard]] NcclComm* comm() const noexcept { return comm_.get(); }

  /// @throws InvalidArgument  NCCL refused the arguments, nothing was issued; CommError,
  ///                          TimeoutError, ScheduleError
  void issue(const NcclOperationPtr& operation);
  void hold() noexcept { ++num_holds_; }
  void release_held();

  /// [Note: life of an operation]
  void wait(NcclOperation& operation);
  void wait_on_host(NcclOperation& operation);
  [[nodiscard]] bool test(NcclOperation& operation);
  /// Its owner unwinds: nobody should wait for this rank.
  void withdraw(NcclOperation& operation);

  void abort(std::string_view reason);
  /// Ends what is pending, then the NCCL communicator, in order if the peers do the same.
  void close() noexcept;

 private:
  void launch(const std::vector<NcclOperationPtr>& operations);
  [[nodiscard]] ncclResult_t start(const std::vector<NcclOperationPtr>& operations);
  [[nodiscard]] ncclResult_t await_started(const NcclOperationPtr& last);
  void take_back(const std::vector<NcclOperationPtr>& operations);

  void watch();
  void look_around();
  void reap();
  void check_calls();
  void give_up(NcclOperation& operation);
  /// The first failure counts; returns once it is in force.
  void settle(NcclFailure failure, bool tell_peers);
  void settle_by_diagnosis(const GivenUp& given_up);
  void settle_on_device_error(const std::exception& error);
  /// Only one thread may; for the others it returns false once the failure is in force.
  [[nodiscard]] bool may_settle();
  void enforce(NcclFailure failure);
  /// `call`, whose errors are failures of the group.
  void on_device(const NcclOperation& operation, const std::function<void()>& call);
  void end_pending();
  /// Waits a moment for the end of aborted kernels; keeps the buffers for ever if it does not come.
  void let_go(NcclOperation& operation) noexcept;

  [[nodiscard]] Progress progress_locked() const;
  [[nodiscard]] bool is_checked_locked(const NcclOperation& operation) const;
  [[noreturn]] void throw_failure_locked(const NcclOperation& operation, bool is_new) const;

  const std::shared_ptr<DeviceApi> device_api_;
  const at::Device device_;
  const std::unique_ptr<NcclComm> comm_;
  const Group group_;
  const NcclGroupOptions options_;
  const std::shared_ptr<DeviceStream> stream_;
  Peers peers_;

  int num_holds_ = 0;
  std::vector<NcclOperationPtr> held_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<NcclOperationPtr> pending_;  ///< In order of their ends: one stream.
  std::int64_t num_issued_ = 0;
  std::deque<std::string> recent_calls_;  ///< The last of num_issued_.
  std::int64_t num_checked_ = 0;          ///< With check_calls: agreed by all ranks.
  bool settling_ = false;
  std::optional<NcclFailure> failure_;
  bool closing_ = false;
  std::thread watcher_;
};

}  // namespace hopshard::detail
