#include "group_state.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../reduce_parts.hpp"
#include "hopshard/core/error.hpp"
#include "progress.hpp"

namespace hopshard::detail::mpi {
namespace {

// Enough to keep the links busy between two large operations; each holds scratch memory.
constexpr std::size_t kMaxMoving = 4;
// How long a failed operation waits for MPI to let go of its output: a peer that lives has sent its
// part by then, and one that is dead will not write.
constexpr std::chrono::milliseconds kSettleLimit{1'000};

std::string text_of(const CallRecord& record) {
  const auto begin = record.begin() + sizeof(std::uint64_t);  // Behind the hash.
  return {begin, std::find(begin, record.end(), std::uint8_t{0})};
}

char* output_of(const MpiCall& call) { return static_cast<char*>(call.output.mutable_data_ptr()); }

const char* input_of(const MpiCall& call) {
  return static_cast<const char*>(call.input.const_data_ptr());
}

void copy_bytes(char* to, const char* from, std::int64_t bytes) {
  if (to != from && bytes > 0) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

}  // namespace

GroupState::GroupState(Progress& progress, Group group, std::uint64_t key, MPI_Comm comm,
                       std::vector<int> mpi_ranks, std::uint64_t node)
    : progress_(progress),
      group_(std::move(group)),
      key_(key),
      peers_{.comm = comm,
             .rank = group_.rank,
             .mpi_ranks = std::move(mpi_ranks),
             .tags = std::vector<int>(group_.ranks.size(), 0)},
      node_(node),
      left_(group_.ranks.size()) {}

void GroupState::issue(const OperationPtr& operation) {
  if (poison_) {
    operation->fail(*poison_);
    return;
  }
  operation->sequence = next_sequence_++;
  Pending& pending = pending_of(operation->sequence);
  for (int member = 0; member < group_.size(); ++member) {
    const auto index = static_cast<std::size_t>(member);
    if (left_[index] && *left_[index] <= operation->sequence) {
      operation->fail({FailureKind::kComm, left_text(member)});
      pending_.erase(operation->sequence);
      return;
    }
  }
  pending.operation = operation;
  operation->peers = peers_;
  operation->peers.tags[static_cast<std::size_t>(group_.rank)] = progress_.next_tag();
  announce(*operation);
  try_agree(operation->sequence);
}

GroupState::Pending& GroupState::pending_of(std::int64_t sequence) {
  Pending& pending = pending_[sequence];
  pending.messages.resize(group_.ranks.size());
  return pending;
}

bool GroupState::is_inline(const MpiCall& call) const { return call.bytes() <= kInlineBytes; }

void GroupState::announce(const Operation& operation) {
  const MpiCall& call = operation.call;
  MessageHeader header{.kind = MessageKind::kCall,
                       .sender = group_.rank,
                       .group_key = key_,
                       .sequence = operation.sequence,
                       .tag = operation.peers.tags[static_cast<std::size_t>(group_.rank)],
                       .record = make_call_record(call.text())};
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int member = (group_.rank + distance) % group_.size();
    const char* payload = nullptr;
    std::int64_t bytes = is_inline(call) ? call.bytes() : 0;
    switch (call.kind) {
      case MpiKind::kConnect:
        payload = reinterpret_cast<const char*>(&node_);
        bytes = sizeof(node_);
        break;
      case MpiKind::kAllGather:
        payload = input_of(call);
        break;
      case MpiKind::kReduceScatter:
        payload = input_of(call) + group_.slot_of(member) * call.bytes();
        break;
      case MpiKind::kAllReduce:
        payload = output_of(call);
        break;
      case MpiKind::kBroadcast:
        payload = output_of(call);
        bytes = group_.rank == call.root ? bytes : 0;
        break;
      case MpiKind::kBarrier:
        break;
    }
    progress_.send(peers_.comm, peers_.mpi_ranks[static_cast<std::size_t>(member)], header, payload,
                   bytes);
  }
}

void GroupState::receive(Message message) {
  const int member = message.header.sender;
  const std::int64_t sequence = message.header.sequence;
  switch (message.header.kind) {
    case MessageKind::kCall:
      // An operation that this rank has given up is not pending any more.
      if (sequence >= next_sequence_ || pending_.contains(sequence)) {
        pending_of(sequence).messages[static_cast<std::size_t>(member)] = std::move(message);
        try_agree(sequence);
      }
      break;
    case MessageKind::kFailed: {
      const std::string cause(message.payload.begin(), message.payload.end());
      for (const OperationPtr& operation : std::vector<OperationPtr>(moving_)) {
        if (operation->sequence >= sequence) {
          begin_failing(operation, {FailureKind::kComm, cause});
        }
      }
      for (const OperationPtr& operation :
           std::vector<OperationPtr>(agreed_.begin(), agreed_.end())) {
        if (operation->sequence >= sequence) {
          begin_failing(operation, {FailureKind::kComm, cause});
        }
      }
      poison({FailureKind::kComm, cause});
      break;
    }
    case MessageKind::kLeft:
      left_[static_cast<std::size_t>(member)] = sequence;
      for (auto entry = pending_.lower_bound(sequence); entry != pending_.end();) {
        if (entry->second.operation) {
          entry->second.operation->fail({FailureKind::kComm, left_text(member)});
          entry = pending_.erase(entry);
        } else {
          ++entry;
        }
      }
      break;
  }
}

void GroupState::try_agree(std::int64_t sequence) {
  const auto entry = pending_.find(sequence);
  const Pending& pending = entry->second;
  if (!pending.operation || !missing_ranks(pending).empty()) {
    return;
  }
  const OperationPtr operation = pending.operation;
  if (disagrees(pending)) {
    // Nobody has moved anything, so the group is still in step.
    operation->fail({FailureKind::kSchedule, disagreement_text(pending)});
    pending_.erase(entry);
    return;
  }
  for (int member = 0; member < group_.size(); ++member) {
    const auto& message = pending.messages[static_cast<std::size_t>(member)];
    if (message) {
      operation->peers.tags[static_cast<std::size_t>(member)] = message->header.tag;
    }
  }
  if (is_inline(operation->call)) {
    finish_inline(*operation, pending);
  } else {
    operation->state = OperationState::kAgreed;
    agreed_.push_back(operation);
  }
  pending_.erase(entry);
}

void GroupState::finish_inline(Operation& operation, const Pending& pending) {
  const MpiCall& call = operation.call;
  const std::int64_t bytes = call.bytes();
  const auto payload_of = [&](int member) {
    return pending.messages[static_cast<std::size_t>(member)]->payload.data();
  };
  const auto reduce = [&](const char* own) {
    std::vector<const void*> parts;
    for (int member = 0; member < group_.size(); ++member) {
      parts.push_back(member == group_.rank ? own : payload_of(member));
    }
    if (bytes > 0) {
      reduce_parts(output_of(call), parts, call.numel, call.dtype, call.reduce_op, call.accumulate);
    }
  };
  switch (call.kind) {
    case MpiKind::kConnect:
      for (const auto& message : pending.messages) {
        if (message) {
          std::uint64_t node = 0;
          std::memcpy(&node, message->payload.data(), sizeof(node));
          spans_hosts_ = spans_hosts_ || node != node_;
        }
      }
      break;
    case MpiKind::kAllGather:
      for (int member = 0; member < group_.size(); ++member) {
        copy_bytes(output_of(call) + group_.slot_of(member) * bytes,
                   member == group_.rank ? input_of(call) : payload_of(member), bytes);
      }
      break;
    case MpiKind::kReduceScatter:
      reduce(input_of(call) + group_.my_slot() * bytes);
      break;
    case MpiKind::kAllReduce:
      reduce(output_of(call));
      break;
    case MpiKind::kBroadcast:
      if (group_.rank != call.root) {
        copy_bytes(output_of(call), payload_of(call.root), bytes);
      }
      break;
    case MpiKind::kBarrier:
      break;
  }
  operation.finish();
}

void GroupState::start(const OperationPtr& operation) {
  const MpiCall& call = operation->call;
  const std::int64_t bytes = call.bytes();
  const Reduction reduction{call.dtype, call.reduce_op, call.accumulate};
  std::vector<ByteRange> slots;
  for (int member = 0; member < group_.size(); ++member) {
    slots.push_back({group_.slot_of(member) * bytes, bytes});
  }
  operation->state = OperationState::kMoving;
  moving_.push_back(operation);
  switch (call.kind) {
    case MpiKind::kAllGather:
      copy_bytes(output_of(call) + group_.my_slot() * bytes, input_of(call), bytes);
      operation->transfer =
          make_gather(operation->peers, output_of(call), std::move(slots), spans_hosts_);
      break;
    case MpiKind::kReduceScatter:
      operation->transfer = make_reduce_scatter(operation->peers, input_of(call), std::move(slots),
                                                output_of(call), reduction);
      break;
    case MpiKind::kAllReduce: {
      // Whole cache lines each, but for the last.
      constexpr std::int64_t kLine = 64;
      const std::int64_t element = static_cast<std::int64_t>(c10::elementSize(call.dtype));
      const std::int64_t lines = (call.numel + kLine - 1) / kLine;
      const std::int64_t share = (lines + group_.size() - 1) / group_.size() * kLine;
      std::vector<ByteRange> shares;
      for (std::int64_t member = 0; member < group_.size(); ++member) {
        const std::int64_t begin = std::min(member * share, call.numel);
        const std::int64_t end = std::min(begin + share, call.numel);
        shares.push_back({begin * element, (end - begin) * element});
      }
      operation->transfer = make_all_reduce(operation->peers, output_of(call), std::move(shares),
                                            reduction, spans_hosts_);
      break;
    }
    case MpiKind::kBroadcast:
      operation->transfer =
          make_broadcast(operation->peers, output_of(call), bytes, call.root, spans_hosts_);
      break;
    case MpiKind::kConnect:
    case MpiKind::kBarrier:
      break;  // Never larger than a message.
  }
}

bool GroupState::advance() {
  bool moved = false;
  while (!agreed_.empty() && moving_.size() < kMaxMoving) {
    const OperationPtr operation = agreed_.front();
    agreed_.pop_front();
    start(operation);
    moved = true;
  }
  for (const OperationPtr& operation : moving_) {
    if (operation->state == OperationState::kMoving) {
      moved = operation->transfer->advance() || moved;
      if (operation->transfer->is_done()) {
        operation->finish();
      }
      continue;
    }
    Requests& requests = operation->transfer->requests();
    moved = !requests.poll().empty() || moved;
    if (!requests.has_receives() || std::chrono::steady_clock::now() >= operation->settle_until) {
      const bool is_in_use = !requests.empty();
      if (is_in_use) {
        abandoned_.push_back(operation);
      }
      operation->fail(*operation->failure, /*keep_buffers=*/is_in_use);
    }
  }
  std::erase_if(moving_, [](const OperationPtr& operation) {
    return operation->state == OperationState::kEnded;
  });
  std::erase_if(abandoned_, [](const OperationPtr& operation) {
    Requests& requests = operation->transfer->requests();
    requests.poll();
    return requests.empty();
  });
  return moved;
}

void GroupState::begin_failing(const OperationPtr& operation, Failure failure) {
  if (operation->state == OperationState::kAgreed) {
    std::erase(agreed_, operation);
    operation->fail(failure);
  } else if (operation->state == OperationState::kMoving) {
    operation->failure = std::move(failure);
    operation->state = OperationState::kSettling;
    operation->settle_until = std::chrono::steady_clock::now() + kSettleLimit;
    if (operation->transfer) {
      operation->transfer->requests().cancel_receives();
    } else {
      std::erase(moving_, operation);
      operation->fail(*operation->failure);
    }
  }
}

void GroupState::give_up(const OperationPtr& operation, std::chrono::milliseconds limit,
                         bool is_unwinding) {
  const bool is_gathering = operation->state == OperationState::kGathering;
  if (operation->state == OperationState::kEnded || operation->state == OperationState::kSettling ||
      (is_unwinding && !is_gathering)) {
    return;  // It ends soon, or all ranks carry it out.
  }
  if (is_unwinding) {
    const std::string cause = concatenate(
        "global rank ", group_.global_rank(),
        " dropped the operation while it handled an error; see that rank's own message");
    send_failed(operation->sequence, cause);
    poison({FailureKind::kComm, cause});
    return;
  }
  Failure failure{FailureKind::kTimeout, ""};
  if (is_gathering) {
    const Pending& pending = pending_.at(operation->sequence);
    if (disagrees(pending)) {
      failure = {FailureKind::kSchedule, disagreement_text(pending)};
    } else {
      failure.cause = did_not_arrive(missing_ranks(pending), limit, group_.global_rank());
    }
  } else {
    std::vector<int> ranks;
    if (operation->transfer) {
      for (const int member : operation->transfer->requests().members()) {
        ranks.push_back(global_rank_of(member));
      }
    }
    failure.cause =
        concatenate("all ranks arrived, but the data was not moved within the ", limit.count(),
                    " ms that rank ", group_.global_rank(), " waited; ",
                    name_global_ranks(ranks.empty() ? std::vector{group_.global_rank()} : ranks),
                    ranks.size() > 1 ? " are" : " is",
                    " slow, stopped or dead; look there, or raise the time limit");
  }
  const std::string cause = concatenate("the group is unusable since global rank ",
                                        group_.global_rank(), " gave up waiting: ", failure.cause);
  send_failed(is_gathering ? first_gathering() : operation->sequence, cause);
  if (is_gathering) {
    pending_.erase(operation->sequence);
    operation->fail(failure);
  } else {
    begin_failing(operation, std::move(failure));
  }
  poison({FailureKind::kComm, cause});
}

void GroupState::abort(const std::string& reason) {
  if (poison_) {
    return;
  }
  const std::string cause =
      concatenate("aborted by global rank ", group_.global_rank(), ": ", reason);
  send_failed(first_gathering(), cause);
  poison({FailureKind::kComm, cause});
}

void GroupState::fail_all(const std::string& cause) {
  const std::string text = concatenate("the group is unusable since MPI failed on global rank ",
                                       group_.global_rank(), ": ", cause);
  for (const OperationPtr& operation : std::vector<OperationPtr>(moving_)) {
    begin_failing(operation, {FailureKind::kComm, text});
  }
  for (const OperationPtr& operation : std::vector<OperationPtr>(agreed_.begin(), agreed_.end())) {
    begin_failing(operation, {FailureKind::kComm, text});
  }
  const bool is_news = !poison_;
  poison({FailureKind::kComm, text});
  if (is_news) {
    send_failed(0, text);
  }
}

void GroupState::end(const std::string& cause) {
  for (const OperationPtr& operation : agreed_) {
    operation->fail({FailureKind::kComm, cause});
  }
  agreed_.clear();
  for (const OperationPtr& operation : moving_) {
    operation->fail(operation->failure.value_or(Failure{FailureKind::kComm, cause}),
                    /*keep_buffers=*/true);
    abandoned_.push_back(operation);
  }
  moving_.clear();
  poison({FailureKind::kComm, cause});
}

void GroupState::leave() {
  if (std::exchange(has_left_, true) || poison_) {
    return;  // They know.
  }
  const MessageHeader header{.kind = MessageKind::kLeft,
                             .sender = group_.rank,
                             .group_key = key_,
                             .sequence = next_sequence_};
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank) {
      progress_.send(peers_.comm, peers_.mpi_ranks[static_cast<std::size_t>(member)], header,
                     nullptr, 0);
    }
  }
}

void GroupState::poison(Failure failure) {
  for (auto& [sequence, pending] : pending_) {
    if (pending.operation) {
      pending.operation->fail(failure);
    }
  }
  pending_.clear();
  if (!poison_) {
    poison_ = std::move(failure);
  }
}

void GroupState::send_failed(std::int64_t first_sequence, const std::string& cause) {
  MessageHeader header{.kind = MessageKind::kFailed,
                       .sender = group_.rank,
                       .group_key = key_,
                       .sequence = first_sequence};
  const std::string text = cause.substr(0, static_cast<std::size_t>(kInlineBytes));
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank) {
      progress_.send(peers_.comm, peers_.mpi_ranks[static_cast<std::size_t>(member)], header,
                     text.data(), static_cast<std::int64_t>(text.size()));
    }
  }
}

std::int64_t GroupState::first_gathering() const {
  for (const auto& [sequence, pending] : pending_) {
    if (pending.operation) {
      return sequence;
    }
  }
  return next_sequence_;
}

bool GroupState::is_busy() const {
  return !moving_.empty() || !agreed_.empty() ||
         std::any_of(pending_.begin(), pending_.end(),
                     [](const auto& entry) { return entry.second.operation != nullptr; });
}

bool GroupState::is_over() const { return has_left_ && !is_busy() && abandoned_.empty(); }

std::vector<int> GroupState::missing_ranks(const Pending& pending) const {
  std::vector<int> missing;
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank && !pending.messages[static_cast<std::size_t>(member)]) {
      missing.push_back(global_rank_of(member));
    }
  }
  return missing;
}

bool GroupState::disagrees(const Pending& pending) const {
  const CallRecord own = make_call_record(pending.operation->call.text());
  return std::any_of(pending.messages.begin(), pending.messages.end(),
                     [&](const auto& message) { return message && message->header.record != own; });
}

std::string GroupState::disagreement_text(const Pending& pending) const {
  std::string text = "the ranks issued different operations:";
  for (int member = 0; member < group_.size(); ++member) {
    const auto& message = pending.messages[static_cast<std::size_t>(member)];
    std::string issued = "nothing yet";
    if (member == group_.rank) {
      issued = pending.operation->call.text();
    } else if (message) {
      issued = text_of(message->header.record);
    }
    text +=
        concatenate(member == 0 ? " " : "; ", "global rank ", global_rank_of(member), ": ", issued);
  }
  return text + ". All ranks must issue the same operations in the same order";
}

std::string GroupState::left_text(int member) const {
  return concatenate("global rank ", global_rank_of(member),
                     " left the group (its communicator was destroyed) without issuing this "
                     "operation");
}

}  // namespace hopshard::detail::mpi
