// Long, because the loop and all that it does share the state of one thread; memory is apart, in
// engine_memory.cpp.
#include "engine.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "group_state.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/hash.hpp"
#include "hopshard/core/log.hpp"
#include "operation.hpp"

namespace hopshard::detail::ofi {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::size_t kBuffersPerSlab = 64;
// Enough that a burst from many peers finds a posted buffer; providers keep the rest.
constexpr std::size_t kReceiveSlabs = 2;
constexpr std::uint64_t kMessageTag = 0;
// Tagged data; the receiver's chunk id is in the low half.
constexpr std::uint64_t kDataTag = std::uint64_t{1} << 32;

// Chunks of one peer that libfabric has at a time, for each rail: enough to keep a link busy, few
// enough that a later operation's control messages are not stuck behind them.
constexpr std::size_t kMaxDataInFlight = 8;

// [Note: progress]
constexpr microseconds kSpinWhenBusy{200};
constexpr microseconds kSpinWhenIdle{50};
constexpr milliseconds kQuietWhenBusy{20};
constexpr milliseconds kQuietWhenIdle{1000};

constexpr milliseconds kPingInterval{1000};
constexpr milliseconds kGoodbyeLimit{2000};

// tcp does not say that a peer's process has died: it tries to connect again for ever.
constexpr milliseconds kReconnectLimit{3000};

}  // namespace

int Peers::index_of(int global_rank) const {
  const auto found = std::ranges::find(global_ranks, global_rank);
  HOPSHARD_CHECK(found != global_ranks.end(), InvalidArgument, "ofi: global rank ", global_rank,
                 " is not among the connected ranks");
  return static_cast<int>(found - global_ranks.begin());
}

Engine::Engine(std::vector<std::unique_ptr<Rail>> rails, Peers peers, bool remote_writes)
    : rails_(std::move(rails)),
      peers_(std::move(peers)),
      remote_writes_(remote_writes),
      peer_states_(peers_.global_ranks.size()),
      pool_(make_pool()) {
  needs_local_ = std::ranges::any_of(
      rails_, [](const auto& rail) { return rail->needs_local_registration(); });
  alive_->engine = this;
  for (std::size_t slab = 0; slab < kReceiveSlabs; ++slab) {
    add_slab();
  }
  buffers_to_receive_ = std::exchange(free_buffers_, {});
  add_slab();
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  {
    // From here on memory that goes is nobody's but its user's: no operation is left.
    const std::lock_guard lock(alive_->mutex);
    alive_->engine = nullptr;
  }
  {
    const std::lock_guard lock(command_mutex_);
    stop_ = true;
    has_commands_ = true;
  }
  command_posted_.notify_all();
  thread_.join();
  for (const auto& rail : rails_) {
    rail->close_endpoint();
  }
}

void Engine::post(std::function<void()> command) {
  {
    const std::lock_guard lock(command_mutex_);
    commands_.push_back(std::move(command));
    has_commands_ = true;
  }
  command_posted_.notify_all();
}

std::uint64_t Engine::next_group_key(const Group& group) {
  std::string text = group.name;
  for (const int rank : group.ranks) {
    text += concatenate('/', rank);
  }
  {
    const std::lock_guard lock(command_mutex_);
    text += concatenate('#', num_requests_[text]++);
  }
  Fnv1a hash;
  for (const char letter : text) {
    hash.add(static_cast<unsigned char>(letter));
  }
  return hash.value();
}

void Engine::add_group(std::shared_ptr<GroupState> group) {
  const std::uint64_t key = group->key();
  groups_[key] = group;
  const auto early = early_.find(key);
  if (early == early_.end()) {
    return;
  }
  const std::vector<EarlyMessage> messages = std::move(early->second);
  early_.erase(early);
  for (const EarlyMessage& message : messages) {
    group->on_message(message.header, message.payload);
  }
}

// --- the thread ---

void Engine::run() {
  set_thread_log_rank(peers_.global_ranks[static_cast<std::size_t>(peers_.mine)]);
  last_progress_ = last_ping_ = Clock::now();
  while (true) {
    try {
      bool moved = false;
      if (has_commands_.exchange(false)) {
        if (run_commands()) {
          break;
        }
        moved = true;
      }
      moved = flush() || moved;
      moved = poll() || moved;
      const Clock::time_point now = Clock::now();
      if (moved) {
        last_progress_ = now;
      }
      tick(now);
      if (!moved) {
        nap(now);
      }
    } catch (const std::exception& error) {
      fail_everything(error.what());
    }
  }
  try {
    say_goodbye();
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kDebug, "ofi: closing without a good-bye: ", error.what());
  }
}

/// True if the engine should stop.
bool Engine::run_commands() {
  std::vector<std::function<void()>> commands;
  bool stop = false;
  {
    const std::lock_guard lock(command_mutex_);
    commands.swap(commands_);
    stop = stop_;
  }
  for (const auto& command : commands) {
    command();
  }
  return stop;
}

bool Engine::is_busy() const {
  return num_messages_in_flight_ > 0 || !in_flight_.empty() || !busy_peers_.empty() ||
         std::ranges::any_of(groups_, [](const auto& entry) { return entry.second->is_busy(); });
}

void Engine::nap(Clock::time_point now) {
  const auto quiet = now - last_progress_;
  const bool busy = is_busy();
  if (quiet < (busy ? kSpinWhenBusy : kSpinWhenIdle)) {
    sched_yield();
    return;
  }
  microseconds pause{50};
  if (busy) {
    pause = quiet < kQuietWhenBusy ? microseconds{50} : microseconds{500};
  } else {
    pause = quiet < kQuietWhenIdle ? microseconds{1000} : microseconds{5000};
  }
  std::unique_lock lock(command_mutex_);
  command_posted_.wait_for(lock, pause, [&] { return has_commands_.load(); });
}

void Engine::tick(Clock::time_point now) {
  const bool should_ping = now - last_progress_ > kPingInterval && now - last_ping_ > kPingInterval;
  if (should_ping) {
    last_ping_ = now;
  }
  for (auto entry = groups_.begin(); entry != groups_.end();) {
    GroupState& group = *entry->second;
    group.tick(now);
    if (should_ping) {
      group.ping();
    }
    if (group.is_over()) {
      finished_groups_.insert(entry->first);
      entry = groups_.erase(entry);
    } else {
      ++entry;
    }
  }
}

void Engine::say_goodbye() {
  says_goodbye_ = true;
  const Clock::time_point deadline = Clock::now() + kGoodbyeLimit;
  for (int peer = 0; peer < static_cast<int>(peer_states_.size()); ++peer) {
    PeerState& state = peer_states_[static_cast<std::size_t>(peer)];
    if (state.was_touched && !state.has_left) {
      state.was_told_bye = true;
      send(peer, {.kind = MessageKind::kBye});
    }
  }
  const auto is_through = [&] {
    return num_messages_in_flight_ == 0 && busy_peers_.empty() && in_flight_.empty() &&
           std::ranges::all_of(peer_states_, [](const PeerState& state) {
             // Also one that leaves at the same time answers, and its answer must find us here.
             return !state.was_told_bye || state.has_answered || !state.failure.empty();
           });
  };
  while (!is_through() && Clock::now() < deadline) {
    const bool moved = flush();
    if (!poll() && !moved) {
      sched_yield();
    }
    tick(Clock::now());
  }
  if (!is_through()) {
    HOPSHARD_LOG(kDebug, "ofi: not every peer answered the good-bye within ", kGoodbyeLimit.count(),
                 " ms");
  }
  groups_.clear();
}

// --- out ---

void Engine::add_slab() {
  MessageSlab slab;
  slab.buffers = std::make_unique<std::vector<MessageBuffer>>(kBuffersPerSlab);
  if (needs_local_) {
    slab.registrations.push_back(rails_.front()->register_memory(
        slab.buffers->data(), kBuffersPerSlab * sizeof(MessageBuffer)));
  }
  for (MessageBuffer& buffer : *slab.buffers) {
    buffer.request.owner = &buffer;
    buffer.request.index = slabs_.size();
    free_buffers_.push_back(&buffer);
  }
  slabs_.push_back(std::move(slab));
}

Engine::MessageBuffer* Engine::free_buffer() {
  if (free_buffers_.empty()) {
    add_slab();
  }
  MessageBuffer* buffer = free_buffers_.back();
  free_buffers_.pop_back();
  return buffer;
}

const Registration* Engine::registration_of(const MessageBuffer* buffer) const {
  const MessageSlab& slab = slabs_[buffer->request.index];
  return slab.registrations.empty() ? nullptr : &slab.registrations.front();
}

void Engine::send(int peer, MessageHeader header, Payload payload) {
  PeerState& state = peer_states_[static_cast<std::size_t>(peer)];
  if (!state.failure.empty() || (state.has_left && header.kind != MessageKind::kByeAnswer)) {
    return;
  }
  header.source = static_cast<std::uint32_t>(peers_.mine);
  payload = payload.first(std::min(payload.size(), kEagerBytes));
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  MessageBuffer* buffer = free_buffer();
  buffer->request.kind = Request::Kind::kMessageSend;
  buffer->request.peer = peer;
  std::memcpy(buffer->bytes.data(), &header, sizeof(header));
  if (!payload.empty()) {
    std::memcpy(buffer->bytes.data() + sizeof(header), payload.data(), payload.size());
  }
  state.messages.push_back(buffer);
  busy_peers_.insert(peer);
}

void Engine::send_data(int peer, std::unique_ptr<DataTask> task) {
  peer_states_[static_cast<std::size_t>(peer)].data.push_back(std::move(task));
  busy_peers_.insert(peer);
}

void Engine::drop_data(const GroupState& group) {
  for (PeerState& state : peer_states_) {
    std::erase_if(state.data,
                  [&](const auto& task) { return &task->operation->group() == &group; });
  }
}

bool Engine::flush() {
  bool moved = false;
  while (!buffers_to_receive_.empty()) {
    MessageBuffer* buffer = buffers_to_receive_.back();
    buffer->request.kind = Request::Kind::kMessageReceive;
    buffer->request.peer = -1;
    if (rails_.front()->receive(buffer->request, buffer->bytes.data(), buffer->bytes.size(),
                                registration_of(buffer), kMessageTag) == Post::kTryAgain) {
      break;
    }
    buffers_to_receive_.pop_back();
  }
  while (!receives_to_post_.empty()) {
    DataTask& task = *receives_to_post_.front();
    const auto rail = static_cast<std::size_t>(task.request.rail);
    if (rails_[rail]->receive(task.request, task.data, task.num_bytes,
                              task.registrations ? &(*task.registrations)[rail] : nullptr,
                              kDataTag | task.id) == Post::kTryAgain) {
      break;
    }
    in_flight_[&task] = std::move(receives_to_post_.front());
    receives_to_post_.pop_front();
  }
  for (auto entry = busy_peers_.begin(); entry != busy_peers_.end();) {
    const int peer = *entry;
    PeerState& state = peer_states_[static_cast<std::size_t>(peer)];
    try {
      moved = flush_messages(state) || moved;
      if (state.messages.empty()) {
        moved = flush_data(peer, state) || moved;
      }
    } catch (const CommError& error) {
      fail_peer(peer, error.what());
    }
    const bool has_more = !state.messages.empty() || !state.data.empty();
    entry = has_more ? std::next(entry) : busy_peers_.erase(entry);
  }
  return moved;
}

/// Throws if a connection that once worked takes nothing any more, although nothing is on its way.
void Engine::check_connection(PeerState& state) {
  if (!state.was_reached || state.num_messages_in_flight > 0 || state.num_data_in_flight > 0) {
    state.stuck_since.reset();
    return;
  }
  const Clock::time_point now = Clock::now();
  if (!state.stuck_since) {
    state.stuck_since = now;
  }
  HOPSHARD_CHECK(now - *state.stuck_since < kReconnectLimit, CommError,
                 "the connection broke and could not be made again within ",
                 kReconnectLimit.count(), " ms");
}

bool Engine::flush_messages(PeerState& state) {
  bool moved = false;
  while (!state.messages.empty()) {
    MessageBuffer* buffer = state.messages.front();
    MessageHeader header;
    std::memcpy(&header, buffer->bytes.data(), sizeof(header));
    if (rails_.front()->send(buffer->request, buffer->bytes.data(),
                             sizeof(header) + header.payload_bytes, registration_of(buffer),
                             kMessageTag) == Post::kTryAgain) {
      check_connection(state);
      break;
    }
    state.was_touched = true;
    state.stuck_since.reset();
    ++num_messages_in_flight_;
    ++state.num_messages_in_flight;
    state.messages.pop_front();
    moved = true;
  }
  return moved;
}

bool Engine::flush_data(int peer, PeerState& state) {
  bool moved = false;
  while (!state.data.empty() && state.num_data_in_flight < kMaxDataInFlight * rails_.size()) {
    DataTask& task = *state.data.front();
    const std::size_t rail_index = task.index % rails_.size();
    Rail& rail = *rails_[rail_index];
    task.request.kind = Request::Kind::kDataSend;
    task.request.rail = static_cast<int>(rail_index);
    task.request.peer = peer;
    task.request.owner = &task;
    const Registration* registration =
        task.registrations ? &(*task.registrations)[rail_index] : nullptr;
    const Post result = remote_writes_ ? rail.write(task.request, task.data, task.num_bytes,
                                                    registration, task.id, task.remote)
                                       : rail.send(task.request, task.data, task.num_bytes,
                                                   registration, kDataTag | task.id);
    if (result == Post::kTryAgain) {
      break;
    }
    state.was_touched = true;
    ++state.num_data_in_flight;
    task.operation->group().on_sending();
    in_flight_[&task] = std::move(state.data.front());
    state.data.pop_front();
    moved = true;
  }
  return moved;
}

// --- in ---

std::uint32_t Engine::take_ids(std::size_t count) {
  // Ids come round after 2^32 chunks; those that are still expected are stepped over.
  const auto wanted = static_cast<std::uint32_t>(count);
  while (true) {
    if (next_id_ > UINT32_MAX - wanted || next_id_ == 0) {
      next_id_ = 1;
    }
    auto after = expected_.lower_bound(next_id_ + wanted);
    if (after != expected_.begin()) {
      --after;
      const auto end =
          after->first + static_cast<std::uint32_t>(after->second.stream->chunks.size());
      if (end > next_id_) {
        next_id_ = end;
        continue;
      }
    }
    const std::uint32_t first = next_id_;
    next_id_ += wanted;
    return first;
  }
}

void Engine::expect(std::shared_ptr<Operation> operation, InStream& stream,
                    Registrations registrations, MessageHeader header, int peer) {
  const std::uint32_t first = take_ids(stream.chunks.size());
  std::vector<std::byte> payload(sizeof(ReadyBody) + rails_.size() * sizeof(RemoteMemory));
  const ReadyBody body{first, static_cast<std::uint32_t>(rails_.size())};
  std::memcpy(payload.data(), &body, sizeof(body));
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    const RemoteMemory memory =
        registrations ? Rail::remote_memory((*registrations)[rail], stream.base) : RemoteMemory{};
    std::memcpy(payload.data() + sizeof(body) + rail * sizeof(memory), &memory, sizeof(memory));
  }
  if (!remote_writes_) {
    for (std::size_t i = 0; i < stream.chunks.size(); ++i) {
      auto task = std::make_unique<DataTask>();
      task->request.kind = Request::Kind::kDataReceive;
      task->request.rail = static_cast<int>(i % rails_.size());
      task->request.owner = task.get();
      task->operation = operation;
      task->in = &stream;
      task->index = i;
      task->data = stream.base + stream.chunks[i].begin;
      task->num_bytes = stream.chunks[i].count;
      task->registrations = registrations;
      task->id = first + static_cast<std::uint32_t>(i);
      receives_to_post_.push_back(std::move(task));
    }
  }
  expected_[first] = {std::move(operation), &stream, std::move(registrations)};
  header.kind = MessageKind::kReady;
  send(peer, header, payload);
}

void Engine::forget_expected(const Operation& operation) {
  std::erase_if(expected_,
                [&](const auto& entry) { return entry.second.operation.get() == &operation; });
}

bool Engine::poll() {
  bool moved = false;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    const std::span<Rail::Event> events = rails_[rail]->poll();
    moved = moved || !events.empty();
    for (const Rail::Event& event : events) {
      on_event(rail, event);
    }
  }
  return moved;
}

void Engine::on_event(std::size_t rail, const Rail::Event& event) {
  if (event.request == nullptr) {
    if (event.error.empty()) {
      on_arrival(event.immediate);
    } else {
      HOPSHARD_LOG(kDebug, "ofi: rail ", rail, ": ", event.error);
    }
    return;
  }
  Request& request = *event.request;
  switch (request.kind) {
    case Request::Kind::kMessageSend: {
      PeerState& state = peer_states_[static_cast<std::size_t>(request.peer)];
      --num_messages_in_flight_;
      --state.num_messages_in_flight;
      state.was_reached = state.was_reached || event.error.empty();
      free_buffers_.push_back(static_cast<MessageBuffer*>(request.owner));
      if (!event.error.empty()) {
        fail_peer(request.peer, event.error);
      }
      break;
    }
    case Request::Kind::kMessageReceive: {
      auto* buffer = static_cast<MessageBuffer*>(request.owner);
      if (event.error.empty()) {
        on_message(*buffer);
      } else {
        HOPSHARD_LOG(kDebug, "ofi: a message was lost: ", event.error);
      }
      buffers_to_receive_.push_back(buffer);
      break;
    }
    case Request::Kind::kDataSend:
    case Request::Kind::kDataReceive: {
      auto found = in_flight_.find(static_cast<DataTask*>(request.owner));
      std::unique_ptr<DataTask> task = std::move(found->second);
      in_flight_.erase(found);
      on_data_end(std::move(task), event.error);
      break;
    }
  }
}

void Engine::on_data_end(std::unique_ptr<DataTask> task, const std::string& error) {
  GroupState& group = task->operation->group();
  if (task->in != nullptr) {
    if (error.empty()) {
      group.on_arrival(*task->operation, *task->in, task->index);
    } else {
      group.on_transport_error(error);
    }
    return;
  }
  const int peer = task->request.peer;
  --peer_states_[static_cast<std::size_t>(peer)].num_data_in_flight;
  group.on_sent(*task->operation, *task->out);
  if (!error.empty()) {
    fail_peer(peer, error);
  }
}

void Engine::on_arrival(std::uint32_t id) {
  auto entry = expected_.upper_bound(id);
  if (entry == expected_.begin()) {
    return;  // Of an operation that has failed here in the meantime.
  }
  --entry;
  const std::size_t index = id - entry->first;
  if (index >= entry->second.stream->chunks.size()) {
    return;
  }
  const std::shared_ptr<Operation> operation = entry->second.operation;
  operation->group().on_arrival(*operation, *entry->second.stream, index);
}

void Engine::on_message(const MessageBuffer& buffer) {
  MessageHeader header;
  std::memcpy(&header, buffer.bytes.data(), sizeof(header));
  const auto payload = Payload(buffer.bytes).subspan(sizeof(header), header.payload_bytes);
  const int peer = static_cast<int>(header.source);
  PeerState& state = peer_states_[header.source];
  state.was_touched = true;
  switch (header.kind) {
    case MessageKind::kPing:
      return;
    case MessageKind::kBye:
      send(peer, {.kind = MessageKind::kByeAnswer});
      state.has_left = true;
      for (const auto& [key, group] : groups_) {
        group->on_peer_lost(peer, "its endpoint was closed");
      }
      return;
    case MessageKind::kByeAnswer:
      state.has_answered = true;
      return;
    default:
      break;
  }
  const auto group = groups_.find(header.group);
  if (group != groups_.end()) {
    const std::shared_ptr<GroupState> kept = group->second;
    kept->on_message(header, payload);
  } else if (!finished_groups_.contains(header.group)) {
    early_[header.group].push_back({header, {payload.begin(), payload.end()}});
  }
}

void Engine::fail_peer(int peer, const std::string& reason) {
  PeerState& state = peer_states_[static_cast<std::size_t>(peer)];
  if (!state.failure.empty()) {
    return;
  }
  state.failure = reason;
  for (MessageBuffer* buffer : state.messages) {
    free_buffers_.push_back(buffer);
  }
  state.messages.clear();
  state.data.clear();
  if (says_goodbye_ || state.has_left) {
    return;
  }
  HOPSHARD_LOG(kDebug, "ofi: global rank ", peers_.global_ranks[static_cast<std::size_t>(peer)],
               " is lost: ", reason);
  for (const auto& [key, group] : groups_) {
    group->on_peer_lost(peer, reason);
  }
}

void Engine::fail_everything(const std::string& reason) {
  HOPSHARD_LOG(kError, "ofi: the transport failed: ", reason);
  for (const auto& [key, group] : groups_) {
    group->on_transport_error(reason);
  }
  // A card that fails at every call must not keep a core busy.
  std::this_thread::sleep_for(milliseconds(10));
}

}  // namespace hopshard::detail::ofi
