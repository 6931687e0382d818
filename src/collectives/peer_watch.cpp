#include "peer_watch.hpp"

#include <algorithm>
#include <utility>

#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::detail {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kFailureKey = "failure";
constexpr milliseconds kShortestPause{50};
constexpr milliseconds kLongestPause{1000};
constexpr milliseconds kReadLimit{1000};  // Of keys that are known to be there.

std::string key_of(int global_rank) { return concatenate("waits/", global_rank); }

StorePtr store_of(const Group& group, std::string_view kind, const StorePtr& store) {
  if (!store) {
    return nullptr;
  }
  std::string prefix = concatenate(kind, '/', group.name);
  for (const int rank : group.ranks) {
    prefix += concatenate(',', rank);
  }
  return make_prefix_store(store, std::move(prefix));
}

}  // namespace

Failure failure_of(const std::exception& error, const std::string& before) {
  Failure failure{FailureKind::kComm, before + error.what()};
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) {
    failure.kind = FailureKind::kTimeout;
  } else if (dynamic_cast<const ScheduleError*>(&error) != nullptr) {
    failure.kind = FailureKind::kSchedule;
  }
  return failure;
}

void throw_unusable(const Failure& failure, const std::string& call_text) {
  throw CommError(
      concatenate(call_text, ": the group is unusable since an earlier failure: ", failure.cause));
}

PeerWatch::PeerWatch(const Group& group, std::string_view kind, const StorePtr& store,
                     std::function<void(const Failure&)> on_failure)
    : group_(group), store_(store_of(group, kind, store)), on_failure_(std::move(on_failure)) {
  if (store_ && group_.size() > 1) {
    thread_ = std::thread([this] {
      set_thread_log_rank(group_.global_rank());
      run();
    });
  }
}

PeerWatch::~PeerWatch() { stop(); }

void PeerWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void PeerWatch::begin(std::int64_t number, std::string description) {
  if (!thread_.joinable()) {
    return;
  }
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    in_flight_.emplace(number, InFlight{std::move(description), Clock::now()});
    wake = idle_;
  }
  if (wake) {
    changed_.notify_all();
  }
}

void PeerWatch::end(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  in_flight_.erase(number);
}

void PeerWatch::tell(const Failure& failure) {
  if (!store_) {
    return;
  }
  try {
    const std::string key(kFailureKey);
    if (!store_->has(key)) {
      const char kind = static_cast<char>('0' + static_cast<int>(failure.kind));
      store_->set(key, concatenate(kind, "global rank ", group_.global_rank(),
                                   " reports: ", failure.cause));
    }
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kWarning, "group '", group_.name,
                 "': the other ranks could not be told of a failure: ", error.what());
  }
}

void PeerWatch::run() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    if (in_flight_.empty()) {
      idle_ = true;
      changed_.wait(lock, [&] { return ending_ || !in_flight_.empty(); });
      idle_ = false;
      continue;
    }
    // Patience grows with the wait, so that a thousand ranks do not ask at once for long.
    const auto age_of_oldest = [&] { return Clock::now() - in_flight_.begin()->second.begin; };
    const auto pause = std::clamp(std::chrono::duration_cast<milliseconds>(age_of_oldest() / 2),
                                  kShortestPause, kLongestPause);
    changed_.wait_for(lock, pause, [&] { return ending_; });
    if (ending_ || in_flight_.empty() || age_of_oldest() < kShortestPause) {
      continue;
    }
    const auto [number, oldest] = *in_flight_.begin();
    lock.unlock();
    try {
      if (const std::optional<Failure> failure = look(number, oldest.description)) {
        on_failure_(*failure);
        return;
      }
    } catch (const std::exception& error) {
      HOPSHARD_LOG(kWarning, "group '", group_.name,
                   "' does not hear of failures of other ranks any more: ", error.what());
      return;
    }
    lock.lock();
  }
}

std::optional<Failure> PeerWatch::heard() const {
  if (!store_) {
    return std::nullopt;
  }
  try {
    return read_failure();
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kWarning, "group '", group_.name,
                 "': what other ranks told could not be read: ", error.what());
    return std::nullopt;
  }
}

std::optional<Failure> PeerWatch::read_failure() const {
  const std::string key(kFailureKey);
  if (!store_->has(key)) {
    return std::nullopt;
  }
  const std::string text = store_->get(key, kReadLimit);
  return Failure{static_cast<FailureKind>(text.front() - '0'), text.substr(1)};
}

std::optional<Failure> PeerWatch::look(std::int64_t number, const std::string& description) {
  if (auto failure = read_failure()) {
    return failure;
  }
  if (published_ != number) {
    published_ = number;
    store_->set(key_of(group_.global_rank()), concatenate(number, ' ', description));
  }
  return compare_with_next(number, description);
}

/// If not all are alike, some two neighbours in the ring differ: one read per rank is enough.
std::optional<Failure> PeerWatch::compare_with_next(std::int64_t number,
                                                    const std::string& description) {
  const int next = group_.ranks[static_cast<std::size_t>((group_.rank + 1) % group_.size())];
  const std::optional<std::string> theirs = description_of(next, number);
  if (!theirs || *theirs == description) {
    return std::nullopt;
  }
  std::string text = "the ranks issued different operations:";
  std::string_view separator = " ";
  for (const int rank : group_.ranks) {
    if (const auto issued = description_of(rank, number)) {
      text += concatenate(separator, "global rank ", rank, ": ", *issued);
      separator = "; ";
    }
  }
  const Failure failure{FailureKind::kSchedule,
                        text + ". All ranks must issue the same operations in the same order"};
  tell(failure);
  return failure;
}

std::optional<std::string> PeerWatch::description_of(int global_rank, std::int64_t number) {
  const std::string key = key_of(global_rank);
  if (!store_->has(key)) {
    return std::nullopt;
  }
  const std::string text = store_->get(key, kReadLimit);
  const std::string expected = concatenate(number, ' ');
  if (!text.starts_with(expected)) {
    return std::nullopt;
  }
  return text.substr(expected.size());
}

}  // namespace hopshard::detail
