// Long, because issuing, waiting, watching and failing share one small state under one mutex, and
// would only be read together: [Note: life of an operation] in the header.
#include "nccl_group.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::detail {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using State = NcclOperation::State;

// How many of its latest calls a rank can tell its peers once something went wrong.
constexpr std::size_t kNumRecentCalls = 64;
// How long peers may take to say what they did, on top of two looks of theirs.
constexpr milliseconds kDiagnosisGrace{1000};
// How long aborted kernels may take to end.
constexpr milliseconds kAbortGrace{5000};
// How long the peers may take to destroy theirs as well.
constexpr milliseconds kFinalizeLimit{5000};
// With check_calls every wait depends on the watch.
constexpr milliseconds kCheckInterval{5};

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<DeviceApi> device_api, at::Device device,
                     std::unique_ptr<NcclComm> comm, StorePtr store, Group group,
                     NcclGroupOptions options)
    : device_api_(std::move(device_api)),
      device_(device),
      comm_(std::move(comm)),
      group_(group),
      options_(options),
      stream_(comm_ ? device_api_->make_stream(device) : nullptr),
      peers_(std::move(store), std::move(group)) {
  if (comm_) {
    watcher_ = std::thread([this] { watch(); });
  }
}

void NcclGroup::on_device(const NcclOperation& operation, const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    settle_on_device_error(error);
    throw CommError(concatenate(operation.call_text, ": the device failed: ", error.what()));
  }
}

void NcclGroup::settle_on_device_error(const std::exception& error) {
  settle({FailureKind::kComm, -1,
          concatenate("global rank ", group_.global_rank(), ": the device failed: ", error.what())},
         /*tell_peers=*/true);
}

// ---- issuing

void NcclGroup::issue(const NcclOperationPtr& operation) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) {
      throw_failure_locked(*operation, /*is_new=*/true);
    }
  }
  on_device(*operation, [&] { stream_->follow_current_stream(); });
  operation->deadline = Clock::now() + operation->limit;
  if (num_holds_ > 0) {
    held_.push_back(operation);
    return;
  }
  launch({operation});
}

void NcclGroup::release_held() {
  HOPSHARD_CHECK(num_holds_ > 0, ScheduleError, "nccl group_end in group '", group_.name,
                 "' without group_begin");
  if (--num_holds_ > 0 || held_.empty()) {
    return;
  }
  launch(std::exchange(held_, {}));
}

void NcclGroup::launch(const std::vector<NcclOperationPtr>& operations) {
  reap();
  const std::lock_guard launching(device_api_->launch_mutex(device_));
  {
    const std::lock_guard lock(mutex_);
    if (failure_) {
      for (const NcclOperationPtr& operation : operations) {
        operation->state = State::kFailed;
      }
      throw_failure_locked(*operations.front(), /*is_new=*/true);
    }
    for (const NcclOperationPtr& operation : operations) {
      operation->sequence = num_issued_++;
      operation->state = State::kLaunching;
      recent_calls_.push_back(operation->text);
      if (recent_calls_.size() > kNumRecentCalls) {
        recent_calls_.pop_front();
      }
      pending_.push_back(operation);
    }
  }
  ncclResult_t result = ncclSuccess;
  std::string trouble;
  std::shared_ptr<DeviceEvent> end;
  try {
    result = start(operations);
    for (const NcclOperationPtr& operation : operations) {
      if (operation->finish && result == ncclSuccess) {
        stream_->run(std::exchange(operation->finish, nullptr));
      }
    }
    end = stream_->record();
  } catch (const std::exception& error) {
    trouble = concatenate("the device failed: ", error.what());
  }
  if (result == ncclInvalidArgument) {
    take_back(operations);
    throw InvalidArgument(concatenate(operations.front()->call_text,
                                      ": NCCL refuses the arguments: ", comm_->explain(result)));
  }
  if (trouble.empty() && result != ncclSuccess) {
    trouble = concatenate("NCCL failed: ", comm_->explain(result));
  }
  if (!trouble.empty()) {
    settle(
        {FailureKind::kComm, -1, concatenate("global rank ", group_.global_rank(), ": ", trouble)},
        /*tell_peers=*/true);
  } else if (options_.check_calls) {
    // Not before: a call that NCCL refuses gives its number to the next one.
    for (const NcclOperationPtr& operation : operations) {
      peers_.publish_call(operation->sequence, operation->text);
    }
    changed_.notify_all();
  }
  {
    const std::lock_guard lock(mutex_);
    for (const NcclOperationPtr& operation : operations) {
      operation->end = end;
      operation->state = State::kInFlight;
    }
    if (!failure_) {
      return;
    }
  }
  // Whoever settled on the failure left out those that were being launched. Their works tell of it,
  // unless it happened here.
  end_pending();
  if (!trouble.empty()) {
    const std::lock_guard lock(mutex_);
    throw_failure_locked(*operations.front(), /*is_new=*/false);
  }
}

ncclResult_t NcclGroup::start(const std::vector<NcclOperationPtr>& operations) {
  std::int64_t num_moving = 0;
  for (const NcclOperationPtr& operation : operations) {
    if (operation->prepare) {
      stream_->run(std::exchange(operation->prepare, nullptr));
    }
    num_moving += operation->launch ? 1 : 0;
  }
  if (num_moving == 0) {
    return ncclSuccess;
  }
  bool is_early = false;
  const auto keep_worst = [&](ncclResult_t& worst, ncclResult_t result) {
    is_early = is_early || result == ncclInProgress;
    if (worst == ncclSuccess && result != ncclInProgress) {
      worst = result;
    }
  };
  const ncclResult_t result = comm_->launch(num_moving > 1, [&](ncclComm_t comm) {
    ncclResult_t worst = ncclSuccess;
    for (const NcclOperationPtr& operation : operations) {
      if (operation->launch && worst == ncclSuccess) {
        keep_worst(worst, operation->launch(comm, stream_->native()));
      }
    }
    return worst == ncclSuccess && is_early ? ncclInProgress : worst;
  });
  for (const NcclOperationPtr& operation : operations) {
    operation->launch = nullptr;
  }
  return result == ncclInProgress ? await_started(operations.back()) : result;
}

/// Until NCCL has put everything on the stream: before that, a mark recorded there means nothing.
ncclResult_t NcclGroup::await_started(const NcclOperationPtr& last) {
  for (Backoff backoff;; backoff.pause()) {
    if (const ncclResult_t state = comm_->state(); state != ncclInProgress) {
      const std::lock_guard lock(mutex_);
      // After a failure, ours or a peer's, the communicator is gone, which is not news.
      return failure_ || settling_ ? ncclSuccess : state;
    }
    if (Clock::now() > last->deadline) {
      give_up(*last);
      return ncclSuccess;  // wait() tells.
    }
  }
}

void NcclGroup::take_back(const std::vector<NcclOperationPtr>& operations) {
  const std::lock_guard lock(mutex_);
  for (const NcclOperationPtr& operation : operations) {
    std::erase(pending_, operation);
    operation->state = State::kFailed;
    operation->tensors.clear();
    if (!recent_calls_.empty()) {
      recent_calls_.pop_back();
    }
  }
  num_issued_ -= static_cast<std::int64_t>(operations.size());
}

// ---- waiting

void NcclGroup::wait(NcclOperation& operation) {
  if (!device_api_->has_streams() || options_.check_calls) {
    wait_on_host(operation);
    return;
  }
  std::shared_ptr<DeviceEvent> end;
  {
    const std::lock_guard lock(mutex_);
    HOPSHARD_CHECK(operation.state != State::kHeld, ScheduleError, operation.call_text,
                   ": is waited for before group_end()");
    if (operation.state == State::kFailed || (failure_ && operation.state != State::kDone)) {
      throw_failure_locked(operation, /*is_new=*/false);
    }
    end = operation.end;
  }
  on_device(operation, [&] { end->make_current_stream_wait(); });
  const std::lock_guard lock(mutex_);
  operation.tensors.clear();
}

void NcclGroup::wait_on_host(NcclOperation& operation) {
  {
    const std::lock_guard lock(mutex_);
    HOPSHARD_CHECK(operation.state != State::kHeld, ScheduleError, operation.call_text,
                   ": is waited for before group_end()");
  }
  for (int num_looks = 0;; ++num_looks) {
    reap();
    std::unique_lock lock(mutex_);
    if (operation.state == State::kDone) {
      return;
    }
    if (operation.state == State::kFailed) {
      throw_failure_locked(operation, /*is_new=*/false);
    }
    if (Clock::now() > operation.deadline && !settling_) {
      lock.unlock();
      give_up(operation);
      continue;
    }
    constexpr int kNumShort = 100;
    changed_.wait_for(lock, std::chrono::microseconds(num_looks < kNumShort ? 20 : 500));
  }
}

bool NcclGroup::test(NcclOperation& operation) {
  reap();
  const std::lock_guard lock(mutex_);
  return operation.state == State::kDone || operation.state == State::kFailed;
}

void NcclGroup::withdraw(NcclOperation& operation) {
  if (test(operation)) {
    return;
  }
  settle({FailureKind::kComm, -1,
          concatenate("global rank ", group_.global_rank(),
                      " dropped the operation while it handled an error; see that rank's own "
                      "message")},
         /*tell_peers=*/true);
}

// ---- watching

void NcclGroup::watch() {
  set_thread_log_rank(group_.global_rank());
  try {
    device_api_->set_current_device(device_);
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kWarning, "the watch of group '", group_.name, "' has no device: ", error.what());
  }
  const milliseconds interval = options_.check_calls
                                    ? std::min(options_.watch_interval, kCheckInterval)
                                    : options_.watch_interval;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const auto has_to_check = [&] {
        return closing_ || (options_.check_calls && num_checked_ < num_issued_);
      };
      if (!has_to_check()) {
        changed_.wait_for(lock, interval, has_to_check);
      } else if (!closing_) {
        changed_.wait_for(lock, std::chrono::microseconds(500), [&] { return closing_; });
      }
      if (closing_) {
        return;
      }
    }
    try {
      look_around();
    } catch (const std::exception& error) {
      settle({FailureKind::kComm, -1,
              concatenate("global rank ", group_.global_rank(), ": ", error.what())},
             /*tell_peers=*/true);
    }
  }
}

void NcclGroup::look_around() {
  {
    const std::lock_guard lock(mutex_);
    if (settling_) {
      return;
    }
  }
  reap();
  check_calls();
  if (peers_.have_news()) {
    std::int64_t num_needed = 0;
    {
      const std::lock_guard lock(mutex_);
      num_needed = pending_.empty() ? 0 : pending_.back()->sequence + 1;
    }
    // Read first, used last: who left may have told before what made it leave.
    const std::optional<int> who_left = peers_.left_before(num_needed);
    if (const auto given_up = peers_.given_up()) {
      settle_by_diagnosis(*given_up);
      return;
    }
    if (auto failure = peers_.failure()) {
      settle(std::move(*failure), /*tell_peers=*/false);
      return;
    }
    if (who_left) {
      settle({FailureKind::kComm, -1,
              concatenate("global rank ", *who_left,
                          " left the group (its communicator was destroyed) without issuing this "
                          "operation")},
             /*tell_peers=*/true);
      return;
    }
  }
  if (const ncclResult_t state = comm_->state(); state != ncclSuccess && state != ncclInProgress) {
    settle(
        {FailureKind::kComm, -1,
         concatenate("global rank ", group_.global_rank(), ": NCCL failed: ", comm_->explain(state),
                     "; a peer has probably died, look at the output of the other ranks first")},
        /*tell_peers=*/true);
    return;
  }
  NcclOperationPtr late;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    for (const NcclOperationPtr& operation : pending_) {
      if (operation->state == State::kInFlight && now > operation->deadline) {
        late = operation;
        break;
      }
    }
  }
  if (late) {
    give_up(*late);
  }
}

void NcclGroup::reap() {
  std::vector<at::Tensor> buffers;  // Freed without the lock.
  bool has_done = false;
  try {
    const std::lock_guard lock(mutex_);
    while (!pending_.empty() && !settling_) {
      const NcclOperationPtr& front = pending_.front();
      if (front->state != State::kInFlight || !is_checked_locked(*front) ||
          !front->end->is_done()) {
        break;
      }
      front->state = State::kDone;
      std::move(front->tensors.begin(), front->tensors.end(), std::back_inserter(buffers));
      front->tensors.clear();
      pending_.pop_front();
      has_done = true;
    }
  } catch (const std::exception& error) {
    settle_on_device_error(error);
  }
  if (has_done) {
    changed_.notify_all();
  }
}

bool NcclGroup::is_checked_locked(const NcclOperation& operation) const {
  return !options_.check_calls || operation.sequence < num_checked_;
}

void NcclGroup::check_calls() {
  while (options_.check_calls) {
    std::int64_t sequence = 0;
    {
      const std::lock_guard lock(mutex_);
      if (num_checked_ >= num_issued_) {
        return;
      }
      sequence = num_checked_;
    }
    const std::optional<std::string> difference = peers_.compare_calls(sequence);
    if (!difference) {
      return;
    }
    if (!difference->empty()) {
      settle({FailureKind::kSchedule, sequence, *difference}, /*tell_peers=*/true);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      ++num_checked_;
    }
    reap();
    changed_.notify_all();
  }
}

// ---- failing

void NcclGroup::give_up(NcclOperation& operation) {
  const GivenUp given_up{operation.sequence, group_.rank, operation.limit};
  peers_.report(given_up);
  // If another rank was first, its operation is the one to talk about.
  settle_by_diagnosis(peers_.given_up().value_or(given_up));
}

bool NcclGroup::may_settle() {
  std::unique_lock lock(mutex_);
  if (settling_) {
    changed_.wait(lock, [&] { return failure_.has_value(); });
    return false;
  }
  settling_ = true;
  return true;
}

void NcclGroup::settle_by_diagnosis(const GivenUp& given_up) {
  if (!may_settle()) {
    return;
  }
  Progress progress;
  bool is_mine = given_up.member == group_.rank;
  {
    const std::lock_guard lock(mutex_);
    progress = progress_locked();
    // Limits end together if the ranks began together; then each has run past its own.
    for (const NcclOperationPtr& operation : pending_) {
      is_mine = is_mine ||
                (operation->sequence == given_up.sequence && operation->deadline < Clock::now());
    }
  }
  NcclFailure failure =
      peers_.diagnose(given_up, progress, kDiagnosisGrace + 2 * options_.watch_interval);
  if (failure.kind == FailureKind::kTimeout && !is_mine) {
    failure = {FailureKind::kComm, -1,
               concatenate("the group is unusable since global rank ",
                           group_.ranks[static_cast<std::size_t>(given_up.member)],
                           " gave up waiting: ", failure.cause)};
  }
  enforce(std::move(failure));
}

void NcclGroup::settle(NcclFailure failure, bool tell_peers) {
  if (!may_settle()) {
    return;
  }
  if (tell_peers) {
    peers_.report(failure);
  }
  Progress progress;
  {
    const std::lock_guard lock(mutex_);
    progress = progress_locked();
  }
  peers_.publish(progress);  // A peer may give up later, and ask.
  enforce(std::move(failure));
}

void NcclGroup::enforce(NcclFailure failure) {
  if (comm_) {
    comm_->abort();
  }
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
  }
  changed_.notify_all();
  end_pending();
}

void NcclGroup::end_pending() {
  for (;;) {
    NcclOperationPtr operation;
    {
      const std::lock_guard lock(mutex_);
      // One that is being launched is ended by its launcher.
      if (pending_.empty() || (pending_.front()->state == State::kLaunching)) {
        break;
      }
      operation = pending_.front();
      pending_.pop_front();
    }
    let_go(*operation);
    {
      const std::lock_guard lock(mutex_);
      operation->state = State::kFailed;
    }
    changed_.notify_all();
  }
}

void NcclGroup::let_go(NcclOperation& operation) noexcept {
  bool ended = operation.end == nullptr;
  try {
    const auto deadline = Clock::now() + kAbortGrace;
    for (Backoff backoff; !ended && Clock::now() < deadline;) {
      ended = operation.end->is_done();
      if (!ended) {
        backoff.pause();
      }
    }
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kError, operation.call_text, ": the device is lost: ", error.what());
  }
  if (!ended) {
    HOPSHARD_LOG(kError, operation.call_text,
                 ": still runs after its abort, so its buffers stay allocated");
    static std::mutex mutex;
    static auto& kept = *new std::vector<at::Tensor>();  // For ever, also at exit.
    const std::lock_guard lock(mutex);
    std::move(operation.tensors.begin(), operation.tensors.end(), std::back_inserter(kept));
  }
  operation.tensors.clear();
  operation.prepare = nullptr;
  operation.launch = nullptr;
  operation.finish = nullptr;
}

void NcclGroup::abort(std::string_view reason) {
  settle({FailureKind::kComm, -1,
          concatenate("aborted by global rank ", group_.global_rank(), ": ", reason)},
         /*tell_peers=*/true);
}

Progress NcclGroup::progress_locked() const {
  Progress progress{num_issued_, {}};
  std::int64_t sequence = num_issued_ - static_cast<std::int64_t>(recent_calls_.size());
  for (const std::string& call : recent_calls_) {
    progress.calls[sequence++] = call;
  }
  return progress;
}

void NcclGroup::throw_failure_locked(const NcclOperation& operation, bool is_new) const {
  const std::string since = is_new ? "the group is unusable since an earlier failure: " : "";
  const std::string text = concatenate(operation.call_text, ": ", since, failure_->cause);
  const bool is_cause = operation.sequence >= 0 && operation.sequence == failure_->sequence;
  std::rethrow_exception(make_error(is_cause ? failure_->kind : FailureKind::kComm, text));
}

void NcclGroup::close() noexcept {
  if (!comm_) {
    return;
  }
  if (!held_.empty()) {
    HOPSHARD_LOG(kError, "group '", group_.name, "' ends with ", held_.size(),
                 " operations that no group_end() launched");
  }
  Progress progress;
  {
    std::unique_lock lock(mutex_);
    while (!pending_.empty() && !failure_) {
      lock.unlock();
      reap();
      lock.lock();
      changed_.wait_for(lock, std::chrono::microseconds(500));
    }
    progress = progress_locked();
  }
  peers_.leave(progress);
  const auto is_settling = [&] {
    const std::lock_guard lock(mutex_);
    return settling_ || failure_.has_value();
  };
  if (!is_settling()) {
    ncclResult_t state = comm_->finalize();
    const auto deadline = Clock::now() + kFinalizeLimit;
    for (Backoff backoff; state == ncclSuccess || state == ncclInProgress; backoff.pause()) {
      state = comm_->state();
      if (state != ncclInProgress || is_settling() || Clock::now() > deadline) {
        break;
      }
    }
    if (state == ncclSuccess) {
      comm_->destroy();
    } else {
      HOPSHARD_LOG(kDebug, "group '", group_.name,
                   "' was aborted at its end: not all ranks destroyed it in time");
    }
  }
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watcher_.join();
  comm_->abort();
  const std::lock_guard lock(mutex_);
  if (!failure_) {
    settling_ = true;
    failure_ = NcclFailure{FailureKind::kComm, -1, "the communicator was destroyed"};
  }
}

}  // namespace hopshard::detail
