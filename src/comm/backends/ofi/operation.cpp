#include "operation.hpp"

#include <algorithm>
#include <cstring>

#include "group_state.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::detail::ofi {
namespace {

std::size_t total_bytes(const std::vector<Slice>& chunks) {
  std::size_t total = 0;
  for (const Slice& chunk : chunks) {
    total += chunk.count;
  }
  return total;
}

bool fits_a_message(const std::vector<Slice>& chunks) {
  return chunks.size() == 1 && total_bytes(chunks) <= kEagerBytes;
}

}  // namespace

void Operation::enter(std::shared_ptr<GroupState> group, Engine& engine, std::uint64_t sequence) {
  group_ = std::move(group);
  engine_ = &engine;
  sequence_ = sequence;
}

void Operation::start() {
  has_started_ = true;
  do_start();
  // Every rank hears from the one before it, so that any two that disagree are found.
  if (!told_next_) {
    const Group& members = group_->group();
    send((members.rank + 1) % members.size(), MessageKind::kCall, 0, {});
  }
}

MessageHeader Operation::header(std::uint16_t channel) const {
  return {.group = group_->key(), .sequence = sequence_, .hash = call_.hash, .channel = channel};
}

void Operation::send(int member, MessageKind kind, std::uint16_t channel, Payload payload) {
  const Group& members = group_->group();
  told_next_ = told_next_ || member == (members.rank + 1) % members.size();
  MessageHeader message = header(channel);
  message.kind = kind;
  engine_->send(group_->peer_of(member), message, payload);
}

InStream& Operation::receive(int member, std::uint16_t channel, std::byte* base,
                             std::size_t num_bytes, std::vector<Slice> chunks) {
  const bool eager = fits_a_message(chunks);
  const std::size_t count = chunks.size();
  InStream& stream =
      incoming_.emplace_back(InStream{member, channel, base, std::move(chunks), count, eager});
  if (!eager && count > 0) {
    const Group& members = group_->group();
    told_next_ = told_next_ || member == (members.rank + 1) % members.size();
    engine_->expect(shared_from_this(), stream, engine_->registrations_of(base, num_bytes),
                    header(channel), group_->peer_of(member));
  }
  return stream;
}

OutStream& Operation::stream_to(int member, std::uint16_t channel, std::vector<Slice> chunks) {
  OutStream stream;
  stream.member = member;
  stream.channel = channel;
  stream.is_eager = fits_a_message(chunks);
  stream.num_left = chunks.size();
  stream.chunks = std::move(chunks);
  return outgoing_.emplace_back(std::move(stream));
}

void Operation::will_send_from(const std::byte* memory, std::size_t num_bytes) {
  if (engine_->needs_local_registration() && num_bytes > 0) {
    send_memory_.push_back({memory, num_bytes, engine_->registrations_of(memory, num_bytes)});
  }
}

Scratch Operation::scratch(std::size_t num_bytes) {
  scratch_.push_back(engine_->scratch(num_bytes));
  const Scratch& block = scratch_.back();
  if (engine_->needs_local_registration()) {
    send_memory_.push_back({block->data, block->num_bytes, block->registrations});
  }
  return block;
}

void Operation::push(OutStream& stream, std::size_t index, const std::byte* data) {
  if (stream.is_eager) {
    send(stream.member, MessageKind::kEager, stream.channel, {data, stream.chunks[index].count});
    --stream.num_left;
    return;
  }
  // Requests take their memory without const; nobody writes through it.
  OutStream::Waiting chunk{index, const_cast<std::byte*>(data), nullptr};
  for (const SendMemory& memory : send_memory_) {
    if (data >= memory.begin && data < memory.begin + memory.num_bytes) {
      chunk.registrations = memory.registrations;
    }
  }
  if (stream.is_ready) {
    write(stream, chunk);
  } else {
    stream.waiting.push_back(std::move(chunk));
  }
}

void Operation::write(OutStream& stream, const OutStream::Waiting& chunk) {
  auto task = std::make_unique<DataTask>();
  task->operation = shared_from_this();
  task->out = &stream;
  task->index = chunk.index;
  task->data = chunk.data;
  task->num_bytes = stream.chunks[chunk.index].count;
  task->registrations = chunk.registrations;
  task->id = stream.first_id + static_cast<std::uint32_t>(chunk.index);
  task->remote = stream.remote[chunk.index % stream.remote.size()];
  task->remote.address += stream.chunks[chunk.index].begin;
  engine_->send_data(group_->peer_of(stream.member), std::move(task));
}

void Operation::on_ready(int member, const MessageHeader& message, Payload payload) {
  for (OutStream& stream : outgoing_) {
    if (stream.member != member || stream.channel != message.channel) {
      continue;
    }
    ReadyBody body;
    std::memcpy(&body, payload.data(), sizeof(body));
    stream.first_id = body.first_id;
    stream.remote.resize(body.num_rails);
    std::memcpy(stream.remote.data(), payload.data() + sizeof(body),
                body.num_rails * sizeof(RemoteMemory));
    stream.is_ready = true;
    for (const OutStream::Waiting& chunk : std::exchange(stream.waiting, {})) {
      write(stream, chunk);
    }
    return;
  }
  throw CommError(
      concatenate("a stream that nobody sends was announced on channel ", message.channel));
}

void Operation::on_eager(int member, const MessageHeader& message, Payload payload) {
  if (message.channel >= kAgreementChannel) {
    round_arrived_.at(message.channel - kAgreementChannel) = true;
    agree();
    return;
  }
  for (InStream& stream : incoming_) {
    if (stream.member == member && stream.channel == message.channel) {
      if (!payload.empty()) {
        std::memcpy(stream.base + stream.chunks.front().begin, payload.data(), payload.size());
      }
      arrived(stream, 0);
      return;
    }
  }
  throw CommError(concatenate("a stream that nobody expects came on channel ", message.channel));
}

void Operation::arrived(InStream& stream, std::size_t index) {
  --stream.num_left;
  do_arrival(stream, index);
}

void Operation::start_agreement() {
  const int size = group_->group().size();
  while ((std::size_t{1} << num_rounds_) < static_cast<std::size_t>(size)) {
    ++num_rounds_;
  }
  round_arrived_.assign(num_rounds_, false);
  const int next = (group_->group().rank + 1) % size;
  send(next, MessageKind::kEager, kAgreementChannel, {});
}

void Operation::agree() {
  const Group& members = group_->group();
  while (round_ < num_rounds_ && round_arrived_[round_]) {
    ++round_;
    if (round_ < num_rounds_) {
      const int to = (members.rank + (1 << round_)) % members.size();
      send(to, MessageKind::kEager, static_cast<std::uint16_t>(kAgreementChannel + round_), {});
    }
  }
}

bool Operation::is_done() const {
  const auto is_through = [](const auto& stream) { return stream.num_left == 0; };
  return has_started_ && round_ == num_rounds_ && std::ranges::all_of(incoming_, is_through) &&
         std::ranges::all_of(outgoing_, is_through);
}

void Operation::finish() {
  engine_->forget_expected(*this);
  completion_->finish();
}

}  // namespace hopshard::detail::ofi
