// Long, because agreement and failure are one protocol over the same state.
#include "group_state.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../describe.hpp"
#include "hopshard/core/error.hpp"
#include "operation.hpp"

namespace hopshard::detail::ofi {
namespace {

using std::chrono::milliseconds;

// More would share the link among operations of which the first is needed first.
constexpr std::size_t kMaxStarted = 8;

constexpr milliseconds kQueryLimit{300};
constexpr milliseconds kDrainLimit{1000};

// Two of these and the rest of a kFail message fit into an eager message.
constexpr std::size_t kMaxCauseBytes = 1900;

/// @param is_pending  issued before the failure.
std::exception_ptr make_error(const Failure& failure, const Operation& operation, bool is_pending) {
  const std::string& who = operation.call().call_text;
  if (failure.sequence == kAllPending ? !is_pending : operation.sequence() != failure.sequence) {
    return std::make_exception_ptr(CommError(who + ": " + failure.later));
  }
  return detail::make_error(failure.kind, who + ": " + failure.cause);
}

std::string unusable(const std::string& reason) { return "the group is unusable since " + reason; }

}  // namespace

GroupState::GroupState(Engine& engine, Group group, std::uint64_t key)
    : engine_(engine), group_(std::move(group)), key_(key) {
  for (const int rank : group_.ranks) {
    peers_.push_back(engine_.peers().index_of(rank));
  }
  members_.resize(peers_.size());
}

int GroupState::member_of(int peer) const {
  const auto found = std::ranges::find(peers_, peer);
  return found == peers_.end() ? -1 : static_cast<int>(found - peers_.begin());
}

Operation* GroupState::find(std::uint64_t sequence) const {
  const auto found = operations_.find(sequence);
  return found == operations_.end() ? nullptr : found->second.get();
}

void GroupState::send_to_all(const MessageHeader& header, Payload payload) {
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank) {
      engine_.send(peer_of(member), header, payload);
    }
  }
}

// --- operations ---

void GroupState::issue(std::shared_ptr<Operation> operation) {
  const std::uint64_t sequence = next_sequence_++;
  operation->enter(shared_from_this(), engine_, sequence);
  operations_[sequence] = operation;
  for (int member = 0; member < group_.size() && !failure_; ++member) {
    if (member != group_.rank && !engine_.peer_failure(peer_of(member)).empty()) {
      fail(lost_failure(member, engine_.peer_failure(peer_of(member))));
    }
  }
  check_left();
  if (failure_) {
    return;  // tick() ends it.
  }
  const auto early = early_.find(sequence);
  if (early != early_.end()) {
    for (const EarlyMessage& message : early->second) {
      if (message.header.hash != operation->call().hash) {
        tell_everybody(sequence);
        return;
      }
    }
  }
  if (disagreed_.contains(sequence)) {
    tell_everybody(sequence);
    return;
  }
  start_more();
}

void GroupState::start_more() {
  for (auto entry = operations_.begin();
       entry != operations_.end() && num_started_ < kMaxStarted;) {
    const std::shared_ptr<Operation> operation = entry->second;
    const std::uint64_t sequence = entry->first;
    if (!operation->has_started() && !disagreed_.contains(sequence)) {
      ++num_started_;
      try {
        operation->start();
        const auto early = early_.find(sequence);
        if (early != early_.end()) {
          const std::vector<EarlyMessage> messages = std::move(early->second);
          early_.erase(early);
          for (const EarlyMessage& message : messages) {
            deliver(*operation, message.header, message.payload);
          }
        }
        if (operation->is_done()) {
          --num_started_;
          operations_.erase(sequence);
          operation->finish();
        }
      } catch (const std::exception& error) {
        on_transport_error(error.what());
        return;
      }
    }
    entry = operations_.upper_bound(sequence);
  }
  check_left();
}

void GroupState::deliver(Operation& operation, const MessageHeader& header, Payload payload) {
  const int member = member_of(static_cast<int>(header.source));
  if (header.kind == MessageKind::kReady) {
    operation.on_ready(member, header, payload);
  } else if (header.kind == MessageKind::kEager) {
    operation.on_eager(member, header, payload);
  }
}

void GroupState::progressed(Operation& operation) {
  if (failure_ || !operation.is_done()) {
    return;
  }
  const auto found = operations_.find(operation.sequence());
  if (found == operations_.end()) {
    return;
  }
  const std::shared_ptr<Operation> kept = std::move(found->second);
  operations_.erase(found);
  --num_started_;
  kept->finish();
  check_left();
  if (!failure_) {
    start_more();
  }
}

void GroupState::check_left() {
  for (int member = 0; member < group_.size() && !failure_ && !operations_.empty(); ++member) {
    const auto& left_before = members_[static_cast<std::size_t>(member)].left_before;
    if (left_before && operations_.begin()->first >= *left_before) {
      // All others hear it from that member itself, and may still be at an earlier operation.
      fail(left_failure(member), /*tell_others=*/false);
    }
  }
}

void GroupState::on_arrival(Operation& operation, InStream& stream, std::size_t index) {
  if (failure_) {
    return;
  }
  try {
    operation.arrived(stream, index);
    progressed(operation);
  } catch (const std::exception& error) {
    on_transport_error(error.what());
  }
}

void GroupState::on_sent(Operation& operation, OutStream& stream) {
  --num_in_flight_;
  operation.sent(stream);
  progressed(operation);
}

// --- messages ---

void GroupState::on_message(const MessageHeader& header, Payload payload) {
  const int member = member_of(static_cast<int>(header.source));
  if (member < 0) {
    return;
  }
  Member& sender = members_[static_cast<std::size_t>(member)];
  sender.was_heard = true;
  switch (header.kind) {
    case MessageKind::kFail: {
      if (failure_) {
        return;
      }
      const std::string text = text_of(payload);
      const std::size_t middle = std::min(text.find('\0'), text.size());
      fail({.kind = static_cast<FailureKind>(header.flags),
            .sequence = header.sequence,
            .cause = text.substr(0, middle),
            .later = text.substr(std::min(middle + 1, text.size()))});
      return;
    }
    case MessageKind::kStopped:
      sender.has_stopped = true;
      if (!failure_ && operations_.empty()) {
        // The failure will reach us when we issue the next operation; until then we write nothing.
        engine_.send(peer_of(member), {.group = key_, .kind = MessageKind::kStopped});
      }
      return;
    case MessageKind::kLeave:
      sender.left_before = header.sequence;
      check_left();
      return;
    case MessageKind::kAsk:
      tell(member, header.sequence, 0);
      return;
    case MessageKind::kTell:
      on_told(member, header, payload);
      return;
    case MessageKind::kCall:
    case MessageKind::kReady:
    case MessageKind::kEager:
      break;
    default:
      return;
  }
  if (failure_) {
    return;
  }
  Operation* operation = find(header.sequence);
  if (operation == nullptr) {
    if (header.sequence >= next_sequence_) {
      early_[header.sequence].push_back({header, {payload.begin(), payload.end()}});
    }
    return;
  }
  if (header.hash != operation->call().hash) {
    tell_everybody(header.sequence);
    return;
  }
  if (!operation->has_started()) {
    early_[header.sequence].push_back({header, {payload.begin(), payload.end()}});
    return;
  }
  try {
    deliver(*operation, header, payload);
    progressed(*operation);
  } catch (const std::exception& error) {
    on_transport_error(error.what());
  }
}

// --- agreement ---

void GroupState::tell(int member, std::uint64_t sequence, std::uint8_t flags) {
  MessageHeader header{.group = key_, .sequence = sequence, .kind = MessageKind::kTell};
  header.flags = flags;
  std::string text;
  if (const Operation* operation = find(sequence)) {
    header.flags |= kIssued;
    header.hash = operation->call().hash;
    text = operation->call().text;
  } else if (sequence < next_sequence_) {
    header.flags |= kIssued;  // And ended: then all agreed on it.
  }
  engine_.send(peer_of(member), header, as_payload(text));
}

void GroupState::tell_everybody(std::uint64_t sequence) {
  const Operation* operation = find(sequence);
  bool& has_told = disagreed_[sequence];
  if (operation == nullptr || has_told) {
    return;
  }
  has_told = true;
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank) {
      tell(member, sequence, kDisagree);
    }
  }
  auto& all = told_[sequence];
  all.resize(peers_.size());
  all[static_cast<std::size_t>(group_.rank)] =
      Told{true, operation->call().hash, operation->call().text};
  check_told(sequence);
}

void GroupState::on_told(int member, const MessageHeader& header, Payload payload) {
  auto& all = told_[header.sequence];
  all.resize(peers_.size());
  const bool has_issued = (header.flags & kIssued) != 0;
  all[static_cast<std::size_t>(member)] = Told{has_issued, header.hash, text_of(payload)};
  const Operation* operation = find(header.sequence);
  const bool differs = operation != nullptr && has_issued && !payload.empty() &&
                       header.hash != operation->call().hash;
  if ((header.flags & kDisagree) != 0 || differs) {
    disagreed_.try_emplace(header.sequence, false);
    tell_everybody(header.sequence);
  }
  check_told(header.sequence);
}

void GroupState::check_told(std::uint64_t sequence) {
  const auto found = told_.find(sequence);
  if (failure_ || found == told_.end()) {
    return;
  }
  const auto& all = found->second;
  if (disagreed_.contains(sequence)) {
    if (std::ranges::all_of(all, [](const auto& one) { return one && one->has_issued; })) {
      fail_schedule(sequence);
    }
    return;
  }
  if (query_ && query_->sequence == sequence) {
    bool all_told = true;
    for (int member = 0; member < group_.size(); ++member) {
      all_told = all_told && (member == group_.rank || all[static_cast<std::size_t>(member)]);
    }
    if (all_told) {
      conclude_query();
    }
  }
}

void GroupState::fail_schedule(std::uint64_t sequence) {
  std::string text = "different operations:";
  const auto& all = told_[sequence];
  for (int member = 0; member < group_.size(); ++member) {
    const auto& one = all[static_cast<std::size_t>(member)];
    text += concatenate(member == 0 ? " " : "; ", "global rank ", global_rank(member), ": ",
                        one && one->has_issued ? one->text : "nothing yet");
  }
  text += ". All ranks must issue the same operations in the same order";
  fail({.kind = FailureKind::kSchedule,
        .sequence = sequence,
        .cause = "the ranks issued " + text,
        .later = unusable("its ranks issued " + text)});
}

// --- failure ---

void GroupState::abort(const std::string& reason) {
  const std::string text =
      concatenate("aborted by global rank ", group_.global_rank(), ": ", reason);
  fail({.cause = text, .later = unusable("it was " + text)});
}

void GroupState::withdraw(const Operation& operation) {
  if (find(operation.sequence()) != &operation) {
    return;
  }
  const std::string text =
      concatenate("global rank ", group_.global_rank(),
                  " dropped an operation while it handled an error; see that rank's own message");
  fail({.sequence = operation.sequence(), .cause = text, .later = unusable(text)});
}

void GroupState::give_up(const std::shared_ptr<Operation>& operation, milliseconds limit) {
  if (failure_ || find(operation->sequence()) != operation.get()) {
    return;
  }
  const std::uint64_t sequence = operation->sequence();
  if (disagreed_.contains(sequence)) {
    fail_schedule(sequence);
    return;
  }
  if (query_) {
    return;  // The earlier call's failure ends this one too.
  }
  told_.erase(sequence);
  query_ = Query{sequence, limit, Clock::now() + kQueryLimit};
  send_to_all({.group = key_, .sequence = sequence, .kind = MessageKind::kAsk});
}

void GroupState::conclude_query() {
  const Query query = *query_;
  query_.reset();
  if (find(query.sequence) == nullptr) {
    return;  // It ended in the last moment.
  }
  if (disagreed_.contains(query.sequence)) {
    fail_schedule(query.sequence);
    return;
  }
  auto& all = told_[query.sequence];
  all.resize(peers_.size());
  std::vector<int> missing;
  for (int member = 0; member < group_.size(); ++member) {
    const auto& one = all[static_cast<std::size_t>(member)];
    if (member != group_.rank && !(one && one->has_issued)) {
      missing.push_back(global_rank(member));
    }
  }
  const std::string cause =
      missing.empty()
          ? concatenate("all ranks issued this operation, but it did not end within the ",
                        query.limit.count(), " ms that rank ", group_.global_rank(),
                        " waited; the network is too slow for it or a connection hangs. Look at "
                        "the links between the nodes, or raise the time limit")
          : did_not_arrive(missing, query.limit, group_.global_rank());
  fail({.kind = FailureKind::kTimeout,
        .sequence = query.sequence,
        .cause = cause,
        .later = unusable(
            concatenate("global rank ", group_.global_rank(), " gave up waiting: ", cause))});
}

Failure GroupState::left_failure(int member) const {
  const std::string text = concatenate(
      "global rank ", global_rank(member),
      " left the group (its communicator was destroyed) without issuing this operation");
  return {.cause = text, .later = unusable(text)};
}

Failure GroupState::lost_failure(int member, const std::string& reason) const {
  const std::string text =
      concatenate("global rank ", global_rank(member),
                  " cannot be reached any more; its process has probably died: look at its output. "
                  "The transport says: ",
                  reason);
  return {.cause = text, .later = unusable(text)};
}

void GroupState::on_peer_lost(int peer, const std::string& reason) {
  const int member = member_of(peer);
  if (member < 0 || failure_ || operations_.empty()) {
    return;
  }
  if (!members_[static_cast<std::size_t>(member)].left_before) {
    fail(lost_failure(member, reason));
  }
}

void GroupState::on_transport_error(const std::string& reason) {
  const std::string text =
      concatenate("the transport failed on global rank ", group_.global_rank(), ": ", reason);
  fail({.cause = text, .later = unusable(text)});
}

void GroupState::fail(Failure failure, bool tell_others) {
  if (failure_) {
    return;
  }
  failure.cause.resize(std::min(failure.cause.size(), kMaxCauseBytes));
  failure.later.resize(std::min(failure.later.size(), kMaxCauseBytes));
  failure_ = std::move(failure);
  failed_at_ = Clock::now();
  first_later_ = next_sequence_;
  query_.reset();
  early_.clear();
  engine_.drop_data(*this);
  MessageHeader header{.group = key_, .sequence = failure_->sequence, .kind = MessageKind::kFail};
  header.flags = static_cast<std::uint8_t>(failure_->kind);
  if (!tell_others) {
    return;
  }
  send_to_all(header, as_payload(failure_->cause + '\0' + failure_->later));
}

bool GroupState::has_drained() const {
  if (num_in_flight_ > 0) {
    return false;
  }
  for (int member = 0; member < group_.size(); ++member) {
    const Member& one = members_[static_cast<std::size_t>(member)];
    if (member != group_.rank && one.was_heard && !one.has_stopped && !one.left_before &&
        engine_.peer_failure(peer_of(member)).empty()) {
      return false;
    }
  }
  return true;
}

void GroupState::end_failed() {
  const bool drained = has_drained();
  for (const auto& [sequence, operation] : std::exchange(operations_, {})) {
    if (drained) {
      engine_.forget_expected(*operation);
    }
    operation->fail(make_error(*failure_, *operation, sequence < first_later_));
  }
  num_started_ = 0;
}

void GroupState::tick(Clock::time_point now) {
  if (query_ && now > query_->deadline) {
    conclude_query();
  }
  if (!failure_) {
    return;
  }
  if (!has_told_stop_ && num_in_flight_ == 0) {
    has_told_stop_ = true;
    send_to_all({.group = key_, .kind = MessageKind::kStopped});
  }
  if (!operations_.empty() && (has_drained() || now > failed_at_ + kDrainLimit)) {
    end_failed();
  }
}

void GroupState::ping() {
  if (operations_.empty() || failure_) {
    return;
  }
  for (int member = 0; member < group_.size(); ++member) {
    // One that waits to be sent is as good.
    if (member != group_.rank && !engine_.has_unsent_messages(peer_of(member))) {
      engine_.send(peer_of(member), {.group = key_, .kind = MessageKind::kPing});
    }
  }
}

void GroupState::leave() {
  has_left_ = true;
  send_to_all({.group = key_, .sequence = next_sequence_, .kind = MessageKind::kLeave});
}

bool GroupState::is_busy() const { return !operations_.empty() || num_in_flight_ > 0; }

bool GroupState::is_over() const {
  return has_left_ && operations_.empty() && num_in_flight_ == 0 && (!failure_ || has_told_stop_);
}

}  // namespace hopshard::detail::ofi
