// The protocol and its failures, as told in shared_group.hpp. Long, because each failure is a step
// of the protocol and would only be read together with it.
#include "shared_group.hpp"

#include <c10/core/ScalarType.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <thread>

#include "../../describe.hpp"
#include "../../memory_loops.hpp"
#include "futex.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "progress.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hopshard::detail::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

/// Spinning pays only while every rank has a core of its own.
constexpr std::uint32_t kSpinsWithOwnCore = 2000;
constexpr std::uint32_t kSpinsWithSharedCore = 20;
/// Then yielding, then sleeping.
constexpr microseconds kYieldTime{1000};
/// A bound, e.g. for a waker that is killed before it wakes.
constexpr microseconds kLongestSleep{2000};
constexpr microseconds kExamineInterval{5000};
constexpr std::chrono::milliseconds kTimeToDie{200};
/// What all ranks stage together stays in the last-level cache up to about this much.
constexpr std::size_t kCacheBytes = std::size_t{16} << 20;
/// A peer that is stopped in the middle of a copy cannot be waited for without end.
constexpr std::chrono::seconds kPatienceWithBusyPeers{10};

void relax_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

/// Buffers that a stopped peer may still touch when it goes on; kept until the process ends.
void keep_forever(const at::Tensor& tensor) {
  static std::mutex mutex;
  static auto* const kept = new std::list<at::Tensor>;
  if (tensor.defined()) {
    const std::lock_guard lock(mutex);
    kept->push_back(tensor);
  }
}

}  // namespace

SharedGroup::SharedGroup(Setup setup) : setup_(std::move(setup)), owner_pid_(::getpid()) {
  for (const LifeLine& life_line : setup_.life_lines) {
    const bool is_here = setup_.reads_own_process && life_line.pid() == owner_pid_;
    peer_arenas_.push_back(is_here ? nullptr : PeerArenas::of(life_line.pid()));
    num_outsiders_ += is_here ? 0 : 1;
  }
  buffers_.resize(size());
  num_idle_spins_ = setup_.has_own_cores ? kSpinsWithOwnCore : kSpinsWithSharedCore;
}

SharedGroup::~SharedGroup() = default;

std::size_t SharedGroup::chunk_bytes() const {
  return setup_.has_arenas ? 0 : setup_.block.inline_bytes();
}

void SharedGroup::issue(const std::shared_ptr<Operation>& operation) {
  bool is_refused = false;
  {
    const std::lock_guard lock(issue_mutex_);
    operation->sequence = next_sequence_;
    is_refused = fails(next_sequence_);
    if (!is_refused) {
      ++next_sequence_;
      incoming_.push_back(operation);
      num_pending_.fetch_add(1);
      has_incoming_.store(true, std::memory_order_release);
    }
  }
  if (is_refused) {
    const std::lock_guard lock(drive_mutex_);
    throw CommError(
        concatenate(call_text(*operation), ": the group is unusable since ", known_cause().text));
  }
  if (drive_mutex_.try_lock()) {
    const std::lock_guard lock(drive_mutex_, std::adopt_lock);
    drive(/*may_move_large=*/false);
  }
  if (operation->state.load(std::memory_order_acquire) == Operation::State::kPending) {
    Progress::of_process().notice();
  }
}

void SharedGroup::wait(Operation& operation, std::chrono::milliseconds timeout) {
  const auto is_pending = [&] {
    return operation.state.load(std::memory_order_acquire) == Operation::State::kPending;
  };
  if (is_pending()) {
    struct Waiting {
      std::atomic<int>& count;
      explicit Waiting(std::atomic<int>& number) : count(number) { count.fetch_add(1); }
      ~Waiting() { count.fetch_sub(1); }
    };
    const Waiting waiting(num_waiting_);
    std::uint32_t num_spins = 0;
    std::optional<Clock::time_point> start;
    Clock::time_point next_examination;
    while (true) {
      try_drive();
      if (!is_pending()) {
        break;
      }
      if (++num_spins < num_idle_spins_) {
        relax_cpu();
        continue;
      }
      const Clock::time_point now = Clock::now();
      if (!start) {
        start = now;
        next_examination = now + kYieldTime;
      }
      if (now - *start > timeout) {
        const std::lock_guard lock(drive_mutex_);
        drive(/*may_move_large=*/true);
        if (is_pending()) {
          give_up(operation, timeout);
        }
        break;
      }
      if (now >= next_examination) {
        next_examination = now + kExamineInterval;
        try_examine();
        if (!is_pending()) {
          break;
        }
      }
      Progress::of_process().drive_unattended();
      if (now - *start < kYieldTime) {
        ::sched_yield();
      } else if (is_pending()) {
        sleep_until_done(operation, kLongestSleep);
      }
    }
  }
  if (operation.state.load(std::memory_order_acquire) == Operation::State::kFailed) {
    throw_failure(operation);
  }
}

bool SharedGroup::test(const Operation& operation) {
  if (operation.state.load(std::memory_order_acquire) == Operation::State::kPending) {
    try_drive();
  }
  return operation.state.load(std::memory_order_acquire) != Operation::State::kPending;
}

void SharedGroup::try_drive() {
  if (drive_mutex_.try_lock()) {
    const std::lock_guard lock(drive_mutex_, std::adopt_lock);
    drive(/*may_move_large=*/true);
  }
}

void SharedGroup::try_examine() {
  if (drive_mutex_.try_lock()) {
    const std::lock_guard lock(drive_mutex_, std::adopt_lock);
    examine_peers();
  }
}

void SharedGroup::withdraw(const Operation& operation) {
  const std::lock_guard lock(drive_mutex_);
  take_incoming();
  fail_group({Failure::Kind::kComm,
              concatenate(name_of(me()),
                          " dropped the operation while it handled an error; see that rank's own "
                          "message"),
              operation.sequence},
             operation.sequence);
}

void SharedGroup::abort(std::string_view reason) {
  static_cast<void>(publish_failure(
      {Failure::Kind::kComm, concatenate("aborted by ", name_of(me()), ": ", reason), 0}, 0));
}

void SharedGroup::leave() {
  if (::getpid() != owner_pid_) {
    return;  // A forked child drops its copy; its parent is still there.
  }
  std::uint64_t num_issued = 0;
  {
    const std::lock_guard lock(issue_mutex_);
    num_issued = next_sequence_;
  }
  my_state().left.store(num_issued + 1, std::memory_order_release);
  notify();
}

void SharedGroup::take_incoming() {
  if (!has_incoming_.load(std::memory_order_acquire)) {
    return;
  }
  const std::lock_guard lock(issue_mutex_);
  has_incoming_.store(false, std::memory_order_relaxed);
  active_.insert(active_.end(), std::make_move_iterator(incoming_.begin()),
                 std::make_move_iterator(incoming_.end()));
  incoming_.clear();
}

void SharedGroup::drive(bool may_move_large) {
  take_incoming();
  bool has_moved = true;
  while (has_moved && !active_.empty()) {
    // What all ranks have posted inline still completes: those that were faster have the result.
    const bool is_failing = setup_.block.header().fail_from.load(std::memory_order_acquire) != 0;
    has_moved = false;
    const std::uint64_t end = first_ + active_.size();
    try {
      while (!is_failing && num_posted_ < end && may_post(num_posted_) &&
             post(*active_[num_posted_ - first_], /*may_copy=*/may_move_large)) {
        ++num_posted_;
      }
      while (num_moved_ < num_posted_ && num_moved_ < end && all_posted(num_moved_)) {
        Operation& operation = *active_[num_moved_ - first_];
        if (records_differ(num_moved_)) {
          fail_group({Failure::Kind::kSchedule, disagreement_text(num_moved_), num_moved_},
                     num_moved_);
          return;
        }
        if ((!operation.is_inline && !may_move_large) || !move(operation)) {
          break;
        }
        ++num_moved_;
        num_ready_ = 0;
        has_moved = true;
        my_state().moved.store(num_moved_, std::memory_order_seq_cst);
        notify();
        if (operation.is_inline) {
          finish(operation);
        }
      }
    } catch (const std::exception& error) {
      fail_group({Failure::Kind::kComm, explain_broken_move(error.what()), num_moved_}, num_moved_);
      return;
    }
    while (!active_.empty() && first_ < num_moved_) {
      Operation& operation = *active_.front();
      if (operation.state.load(std::memory_order_relaxed) == Operation::State::kPending) {
        if (moved_by_all() <= first_) {
          break;
        }
        finish(operation);
      }
      active_.pop_front();
      ++first_;
    }
    if (is_failing) {
      fail_active();
    }
  }
}

std::uint64_t SharedGroup::moved_by_all() {
  std::uint64_t least = num_moved_;
  for (std::size_t member = 0; member < size(); ++member) {
    least = std::min(least, setup_.block.rank(member).moved.load(std::memory_order_acquire));
  }
  moved_by_all_ = least;
  return least;
}

bool SharedGroup::may_post(std::uint64_t sequence) {
  return sequence < moved_by_all_ + kRingSize || sequence < moved_by_all() + kRingSize;
}

bool SharedGroup::prepare_location(Operation& operation, Location& location, bool may_copy) {
  location = Location{};
  const std::size_t num_bytes = operation.span_bytes(group());
  if (num_bytes == 0) {
    return true;
  }
  const char* data = operation.shown_data();
  std::optional<Location> arena = Arenas::of_process().find(data, num_bytes);
  if (!arena && num_outsiders_ > 0) {
    if (!may_copy) {
      return false;
    }
    auto staging = StagingPool::of_process().take(num_bytes, /*must=*/!setup_.can_read_private);
    if (staging) {
      operation.staging = std::move(*staging);
      char* const copy = static_cast<char*>(operation.staging.mutable_data_ptr());
      const bool fits_cache = num_bytes * size() <= kCacheBytes;
      const StoreMode mode = fits_cache ? StoreMode::kCached : StoreMode::kStreaming;
      if (operation.record.kind == Kind::kReduceScatter) {
        // Nobody but this rank reads its own slot, which it has.
        const std::size_t before =
            static_cast<std::size_t>(group().my_slot()) * operation.part_stride;
        const std::size_t after = before + operation.part_bytes;
        copy_memory(copy, data, before, mode);
        copy_memory(copy + after, data + after, num_bytes - after, mode);
      } else {
        copy_memory(copy, data, num_bytes, mode);
      }
      arena = Arenas::of_process().find(copy, num_bytes);
    }
  }
  if (arena) {
    location = *arena;
  } else {
    location.place = Location::Place::kPrivate;
    location.address = reinterpret_cast<std::uintptr_t>(data);
  }
  return true;
}

bool SharedGroup::post(Operation& operation, bool may_copy) {
  Post& entry = setup_.block.post(me(), operation.sequence);
  const std::size_t inline_bytes = operation.record.kind == Kind::kReduceScatter
                                       ? operation.part_bytes * size()
                                       : operation.part_bytes;
  operation.is_inline = inline_bytes <= setup_.block.inline_bytes();
  if (operation.is_inline) {
    show_inline(operation, group(), setup_.block.inline_data(me(), operation.sequence));
    entry.location = Location{.place = Location::Place::kInline};
  } else if (!prepare_location(operation, entry.location, may_copy)) {
    return false;
  }
  std::memcpy(&entry.record, &operation.record, sizeof(CallRecord));
  entry.ready.store(operation.sequence + 1, std::memory_order_seq_cst);
  notify();
  return true;
}

bool SharedGroup::all_posted(std::uint64_t sequence) {
  while (num_ready_ < size() &&
         setup_.block.post(num_ready_, sequence).ready.load(std::memory_order_acquire) ==
             sequence + 1) {
    ++num_ready_;
  }
  return num_ready_ == size();
}

bool SharedGroup::records_differ(std::uint64_t sequence) const {
  const CallRecord& mine = setup_.block.post(me(), sequence).record;
  for (std::size_t member = 0; member < size(); ++member) {
    const CallRecord& other = setup_.block.post(member, sequence).record;
    if (std::memcmp(&mine, &other, sizeof(CallRecord)) != 0) {
      return true;
    }
  }
  return false;
}

PeerBuffer SharedGroup::find_buffer(const Operation& operation, std::size_t member) {
  const Location& location = setup_.block.post(member, operation.sequence).location;
  PeerBuffer buffer{.slot_stride = operation.part_stride};
  switch (location.place) {
    case Location::Place::kNone:
      break;
    case Location::Place::kInline:
      buffer.data = setup_.block.inline_data(member, operation.sequence);
      buffer.slot_stride = operation.part_bytes;
      break;
    case Location::Place::kArena:
    case Location::Place::kPrivate:
      if (member == me() || peer_arenas_[member] == nullptr) {
        // An address of this process, as its owner wrote it. NOLINTNEXTLINE
        buffer.data = reinterpret_cast<char*>(location.address);
      } else if (location.place == Location::Place::kArena) {
        PeerArenas::Memory memory = peer_arenas_[member]->resolve(location);
        buffer.data = memory.data;
        buffer.mapping = std::move(memory.mapping);
      } else {
        buffer.pid = setup_.life_lines[member].pid();
        buffer.address = location.address;
      }
      break;
  }
  return buffer;
}

bool SharedGroup::move(Operation& operation) {
  if (operation.is_inline) {
    for (std::size_t member = 0; member < size(); ++member) {
      buffers_[member] = find_buffer(operation, member);
    }
    move_data(operation, group(), buffers_);
    return true;
  }
  struct Busy {
    std::atomic<std::uint64_t>& flag;
    explicit Busy(std::atomic<std::uint64_t>& state) : flag(state) {
      flag.store(1, std::memory_order_seq_cst);
    }
    ~Busy() { flag.store(0, std::memory_order_release); }
  };
  const Busy busy(my_state().busy);
  if (fails(operation.sequence)) {
    return false;
  }
  for (std::size_t member = 0; member < size(); ++member) {
    buffers_[member] = find_buffer(operation, member);
  }
  if (operation.record.kind == Kind::kReduceScatter && operation.staging.defined()) {
    buffers_[me()].data = const_cast<char*>(operation.input_data);  // NOLINT: only read.
  }
  move_data(operation, group(), buffers_);
  for (PeerBuffer& buffer : buffers_) {
    buffer.mapping.reset();
  }
  return true;
}

void SharedGroup::finish(Operation& operation) {
  if (operation.staging.defined()) {
    if (operation.record.kind == Kind::kAllReduce) {
      copy_memory(operation.output_data, operation.staging.const_data_ptr(), operation.part_bytes,
                  store_mode_for(operation.part_bytes));
    }
    StagingPool::of_process().give_back(std::move(operation.staging));
  }
  operation.output.reset();
  operation.input.reset();
  operation.state.store(Operation::State::kDone, std::memory_order_release);
  num_pending_.fetch_sub(1);
}

bool SharedGroup::fails(std::uint64_t sequence) const {
  const std::uint64_t from = setup_.block.header().fail_from.load(std::memory_order_seq_cst);
  return from != 0 && sequence + 1 >= from;
}

bool SharedGroup::publish_failure(const Cause& cause, std::uint64_t from) const {
  Header& header = setup_.block.header();
  std::uint32_t none = 0;
  const bool is_first = header.failure.state.compare_exchange_strong(none, 1);
  if (is_first) {
    header.failure.kind = cause.kind;
    header.failure.sequence = cause.sequence;
    const std::size_t length = std::min(cause.text.size(), Failure::kTextBytes - 1);
    std::memcpy(header.failure.text.data(), cause.text.data(), length);
    header.failure.text[length] = '\0';
    header.failure.state.store(2, std::memory_order_release);
  }
  std::uint64_t seen = header.fail_from.load();
  while ((seen == 0 || seen > from + 1) &&
         !header.fail_from.compare_exchange_weak(seen, from + 1)) {
  }
  notify();
  return is_first;
}

void SharedGroup::fail_group(Cause cause, std::uint64_t from) {
  // The first failure is the reason of those that follow, such as ranks that leave because of it.
  const bool is_first = publish_failure(cause, from);
  if (is_first || setup_.block.header().failure.state.load(std::memory_order_acquire) != 2) {
    own_cause_ = std::move(cause);
  }
  fail_active();
}

std::string SharedGroup::died_text(std::size_t member) const {
  return concatenate(name_of(member), " died (process ", setup_.life_lines[member].pid(),
                     " ended)");
}

std::string SharedGroup::explain_broken_move(std::string_view error) const {
  // The memory of a process goes a moment before the process does.
  const Clock::time_point limit = Clock::now() + kTimeToDie;
  do {
    for (std::size_t member = 0; member < size(); ++member) {
      if (setup_.life_lines[member].is_dead()) {
        return died_text(member);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (Clock::now() < limit);
  return concatenate("on ", name_of(me()), ": ", error);
}

SharedGroup::Cause SharedGroup::known_cause() const {
  const Failure& failure = setup_.block.header().failure;
  if (failure.state.load(std::memory_order_acquire) == 2) {
    return {failure.kind, failure.text.data(), failure.sequence};
  }
  return own_cause_.value_or(
      Cause{Failure::Kind::kComm, "a rank died while it reported a failure", 0});
}

void SharedGroup::fail_active() {
  const std::uint64_t from = setup_.block.header().fail_from.load() - 1;
  const Cause cause = known_cause();
  while (!active_.empty() && active_.back()->sequence >= from) {
    Operation& operation = *active_.back();
    if (operation.state.load(std::memory_order_relaxed) == Operation::State::kPending) {
      if (operation.sequence < num_moved_ && moved_by_all() > operation.sequence) {
        finish(operation);
      } else {
        const bool is_mine = own_cause_ && own_cause_->sequence == operation.sequence;
        fail_operation(operation, is_mine ? *own_cause_ : cause);
      }
    }
    active_.pop_back();
  }
}

void SharedGroup::fail_operation(Operation& operation, const Cause& cause) {
  if (!await_idle_peers(operation)) {
    HOPSHARD_LOG(kError, call_text(operation),
                 " failed while a peer is stopped in the middle of a copy; its buffers are kept");
    keep_forever(operation.output);
    keep_forever(operation.input);
    keep_forever(operation.staging);
  } else if (operation.staging.defined()) {
    StagingPool::of_process().give_back(std::move(operation.staging));
  }
  operation.output.reset();
  operation.input.reset();
  operation.staging.reset();
  // Others of the same failure are told what happened to the group.
  const bool is_cause = cause.sequence == operation.sequence;
  operation.failure_kind = is_cause ? cause.kind : Failure::Kind::kComm;
  operation.failure_text = cause.text;
  operation.state.store(Operation::State::kFailed, std::memory_order_release);
  num_pending_.fetch_sub(1);
}

bool SharedGroup::await_idle_peers(const Operation& operation) const {
  if (operation.is_inline || operation.sequence >= num_posted_) {
    return true;
  }
  const Clock::time_point limit = Clock::now() + kPatienceWithBusyPeers;
  for (std::size_t member = 0; member < size(); ++member) {
    while (member != me() && setup_.block.rank(member).busy.load(std::memory_order_seq_cst) != 0 &&
           !setup_.life_lines[member].is_dead()) {
      if (Clock::now() > limit) {
        return false;
      }
      ::sched_yield();
    }
  }
  return true;
}

std::vector<std::size_t> SharedGroup::missing_members(std::uint64_t sequence) const {
  std::vector<std::size_t> missing;
  for (std::size_t member = 0; member < size(); ++member) {
    const bool is_missing =
        sequence < num_moved_
            ? setup_.block.rank(member).moved.load(std::memory_order_acquire) <= sequence
            : setup_.block.post(member, sequence).ready.load(std::memory_order_acquire) !=
                  sequence + 1;
    if (is_missing && member != me()) {
      missing.push_back(member);
    }
  }
  return missing;
}

void SharedGroup::examine_peers() {
  take_incoming();
  if (active_.empty()) {
    return;
  }
  const std::uint64_t sequence = first_;
  for (const std::size_t member : missing_members(sequence)) {
    const std::uint64_t left = setup_.block.rank(member).left.load(std::memory_order_acquire);
    const bool has_left = left != 0 && left - 1 <= sequence;
    const bool is_dead = !has_left && setup_.life_lines[member].is_dead();
    if (!has_left && !is_dead) {
      continue;
    }
    // What it did before it ended counts, so look again now that it cannot do more.
    const auto missing = missing_members(sequence);
    if (std::find(missing.begin(), missing.end(), member) == missing.end()) {
      continue;
    }
    const std::string text =
        has_left ? concatenate(name_of(member),
                               " left the group (its communicator was destroyed) without issuing "
                               "this operation")
                 : concatenate(name_of(member), " died (process ", setup_.life_lines[member].pid(),
                               " ended)");
    fail_group({Failure::Kind::kComm, text, sequence}, sequence);
    return;
  }
}

void SharedGroup::give_up(const Operation& operation, std::chrono::milliseconds timeout) {
  const std::uint64_t sequence = active_.empty() ? operation.sequence : first_;
  const std::vector<std::size_t> missing = missing_members(sequence);
  std::vector<int> missing_ranks;
  for (const std::size_t member : missing) {
    missing_ranks.push_back(group().ranks[member]);
  }
  bool disagrees = false;
  for (std::size_t member = 0; member < size(); ++member) {
    const Post& entry = setup_.block.post(member, sequence);
    disagrees = disagrees || (sequence >= num_moved_ && sequence < num_posted_ &&
                              entry.ready.load(std::memory_order_acquire) == sequence + 1 &&
                              std::memcmp(&entry.record, &setup_.block.post(me(), sequence).record,
                                          sizeof(CallRecord)) != 0);
  }
  if (disagrees) {
    fail_group({Failure::Kind::kSchedule, disagreement_text(sequence), operation.sequence},
               sequence);
    return;
  }
  const std::string text =
      sequence < num_moved_
          ? concatenate(name_global_ranks(missing_ranks), " did not finish its part within the ",
                        timeout.count(), " ms that rank ", group().global_rank(),
                        " waited; look whether it hangs, or raise the time limit")
          : did_not_arrive(missing_ranks, timeout, group().global_rank());
  static_cast<void>(
      publish_failure({Failure::Kind::kComm, concatenate(name_of(me()), " gave up waiting: ", text),
                       operation.sequence},
                      0));
  own_cause_ = Cause{Failure::Kind::kTimeout, text, operation.sequence};
  fail_active();
}

std::string SharedGroup::disagreement_text(std::uint64_t sequence) const {
  std::string text = "the ranks issued different operations:";
  for (std::size_t member = 0; member < size(); ++member) {
    const Post& entry = setup_.block.post(member, sequence);
    std::string issued = "nothing yet";
    if (entry.ready.load(std::memory_order_acquire) == sequence + 1) {
      const CallRecord& record = entry.record;
      const bool reduces = record.kind == Kind::kReduceScatter || record.kind == Kind::kAllReduce;
      const auto reduce_op = static_cast<ReduceOp>(record.reduce_op);
      issued =
          to_string(OperationText{.op = hopshard::to_string(record.kind),
                                  .tag = std::string_view(record.tag.data(), record.tag_bytes),
                                  .numel = record.numel,
                                  .dtype = static_cast<at::ScalarType>(record.dtype),
                                  .reduce_op = reduces ? std::optional(reduce_op) : std::nullopt,
                                  .root = record.root});
    }
    text += concatenate(member == 0 ? " " : "; ", name_of(member), ": ", issued);
  }
  return text + ". All ranks must issue the same operations in the same order";
}

void SharedGroup::notify() const {
  Header& header = setup_.block.header();
  if (header.num_sleepers.load(std::memory_order_seq_cst) != 0) {
    header.event.fetch_add(1, std::memory_order_release);
    futex_wake(header.event);
  }
}

void SharedGroup::sleep_until_done(const Operation& operation, microseconds limit) {
  // Announced first and then looked once more: a peer either is seen here, or sees the sleeper.
  Header& header = setup_.block.header();
  header.num_sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t seen = header.event.load(std::memory_order_seq_cst);
  try_drive();
  if (operation.state.load(std::memory_order_acquire) == Operation::State::kPending) {
    futex_wait(header.event, seen, limit);
  }
  header.num_sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

std::string SharedGroup::call_text(const Operation& operation) const {
  return describe_call(kBackend, hopshard::to_string(operation.record.kind), operation.tag,
                       group());
}

std::string SharedGroup::name_of(std::size_t member) const {
  return concatenate("global rank ", group().ranks[member]);
}

void SharedGroup::throw_failure(const Operation& operation) const {
  std::rethrow_exception(
      make_error(operation.failure_kind, call_text(operation) + ": " + operation.failure_text));
}

}  // namespace hopshard::detail::shm
