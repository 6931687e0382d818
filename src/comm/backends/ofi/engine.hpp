// The progress thread of one rank: the only one that calls libfabric once the rank is connected.
// Commands of other threads come through post(). It sends messages and chunks, hands what arrives
// to the groups, and keeps registrations and scratch memory. Next: group_state.hpp.
//
// [Note: progress] tcp and efa move incoming data only while their completion queue is read, so the
// thread polls as long as the rank lives: without a pause while something is pending (giving its
// core away when nothing came), with short and then longer naps when nothing moves.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hopshard/comm/group.hpp"
#include "rail.hpp"
#include "wire.hpp"

namespace hopshard::detail::ofi {

class GroupState;
class Operation;
struct InStream;
struct OutStream;

using Clock = std::chrono::steady_clock;

/// One for each rail.
using Registrations = std::shared_ptr<const std::vector<Registration>>;

/// Memory for partial sums and gathered parts; goes back to the engine's pool.
struct ScratchBlock {
  std::byte* data = nullptr;
  std::size_t num_bytes = 0;
  Registrations registrations;
};
using Scratch = std::shared_ptr<const ScratchBlock>;

/// A chunk on its way out (`out`) or, with tagged messages, expected (`in`).
struct DataTask {
  Request request;  ///< First, and `request.owner` is the task.
  std::shared_ptr<Operation> operation;
  OutStream* out = nullptr;
  InStream* in = nullptr;
  std::size_t index = 0;
  std::byte* data = nullptr;  ///< Only read from if it goes out.
  std::size_t num_bytes = 0;
  Registrations registrations;  ///< Of `data`; null where none is needed.
  std::uint32_t id = 0;         ///< The receiver's, of this chunk.
  RemoteMemory remote{};
};

/// Who takes part, by their place in the group that connected.
struct Peers {
  std::vector<int> global_ranks;
  std::vector<std::string> nodes;
  int mine = 0;

  [[nodiscard]] int index_of(int global_rank) const;
};

class Engine {
 public:
  /// Starts the thread. The rails know the peers' addresses already.
  Engine(std::vector<std::unique_ptr<Rail>> rails, Peers peers, bool remote_writes);
  /// Says good-bye to the peers and closes the rails. All communicators are gone.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- any thread ---
  /// Runs `command` on the progress thread, in order. Commands hold no reference to the engine.
  void post(std::function<void()> command);
  [[nodiscard]] const Peers& peers() const noexcept { return peers_; }
  [[nodiscard]] std::string_view provider() const noexcept { return rails_.front()->provider(); }
  [[nodiscard]] bool offers_device_memory() const { return rails_.front()->offers_device_memory(); }
  [[nodiscard]] std::size_t num_rails() const noexcept { return rails_.size(); }
  /// The same on all members: their i-th request for the same group.
  [[nodiscard]] std::uint64_t next_group_key(const Group& group);
  /// Memory that is registered until its last user is gone. @throws Error: out of memory
  [[nodiscard]] std::shared_ptr<void> allocate(std::size_t num_bytes);
  /// Keeps memory of others registered until as many forget_memory() calls came.
  void remember_memory(const void* data, std::size_t num_bytes);
  void forget_memory(const void* data, std::size_t num_bytes);

  // --- the progress thread ---
  void add_group(std::shared_ptr<GroupState> group);
  void send(int peer, MessageHeader header, Payload payload = {});
  /// Queues a chunk; Operation::on_sent follows.
  void send_data(int peer, std::unique_ptr<DataTask> task);
  /// Takes back the group's chunks that are not yet with libfabric.
  void drop_data(const GroupState& group);
  /// Expects a stream and tells its sender where to write it.
  void expect(std::shared_ptr<Operation> operation, InStream& stream, Registrations registrations,
              MessageHeader header, int peer);
  void forget_expected(const Operation& operation);
  [[nodiscard]] Registrations registrations_of(const void* data, std::size_t num_bytes);
  [[nodiscard]] bool needs_local_registration() const noexcept { return needs_local_; }
  [[nodiscard]] Scratch scratch(std::size_t num_bytes);
  [[nodiscard]] bool has_unsent_messages(int peer) const {
    return !peer_states_[static_cast<std::size_t>(peer)].messages.empty();
  }
  /// Why this peer cannot be reached, or nothing.
  [[nodiscard]] const std::string& peer_failure(int peer) const {
    return peer_states_[static_cast<std::size_t>(peer)].failure;
  }

 private:
  struct MessageBuffer {
    Request request;
    std::array<std::byte, kMessageBytes> bytes;
  };
  struct MessageSlab {
    std::unique_ptr<std::vector<MessageBuffer>> buffers;
    std::vector<Registration> registrations;
  };
  struct PeerState {
    std::deque<MessageBuffer*> messages;
    std::deque<std::unique_ptr<DataTask>> data;
    std::size_t num_data_in_flight = 0;
    std::size_t num_messages_in_flight = 0;
    bool was_reached = false;  ///< Something has been sent to it.
    std::optional<Clock::time_point> stuck_since;
    bool was_touched = false;  ///< There may be a connection.
    bool has_left = false;     ///< It said good-bye: nothing may be sent any more.
    bool was_told_bye = false;
    bool has_answered = false;
    std::string failure;
  };
  struct Expected {
    std::shared_ptr<Operation> operation;
    InStream* stream = nullptr;
    Registrations registrations;
  };
  struct Remembered {
    std::size_t num_bytes = 0;
    std::size_t num_uses = 0;
    Registrations registrations;
  };
  struct ScratchPool;
  static std::shared_ptr<ScratchPool> make_pool();
  /// Memory of allocate() may outlive the engine; null once it is gone.
  struct AliveEngine {
    std::mutex mutex;
    Engine* engine = nullptr;
  };

  void run();
  bool run_commands();
  bool flush();
  bool flush_messages(PeerState& state);
  static void check_connection(PeerState& state);
  bool flush_data(int peer, PeerState& state);
  bool poll();
  void on_event(std::size_t rail, const Rail::Event& event);
  void on_message(const MessageBuffer& buffer);
  void on_arrival(std::uint32_t id);
  void on_data_end(std::unique_ptr<DataTask> task, const std::string& error);
  void fail_peer(int peer, const std::string& reason);
  void fail_everything(const std::string& reason);
  void tick(Clock::time_point now);
  void nap(Clock::time_point now);
  void say_goodbye();
  [[nodiscard]] bool is_busy() const;
  MessageBuffer* free_buffer();
  void add_slab();
  void receive_into(MessageBuffer* buffer);
  [[nodiscard]] Registrations register_now(const void* data, std::size_t num_bytes);
  [[nodiscard]] const Registration* registration_of(const MessageBuffer* buffer) const;
  std::uint32_t take_ids(std::size_t count);
  void release_memory(void* memory);

  std::vector<std::unique_ptr<Rail>> rails_;
  const Peers peers_;
  const bool remote_writes_;
  bool needs_local_ = false;

  std::mutex command_mutex_;
  std::condition_variable command_posted_;
  std::vector<std::function<void()>> commands_;
  std::atomic<bool> has_commands_{false};
  bool stop_ = false;
  std::map<std::string, std::uint64_t> num_requests_;  ///< By group, under the same mutex.
  std::shared_ptr<AliveEngine> alive_ = std::make_shared<AliveEngine>();

  // Of the progress thread. What holds registrations comes after the rails, so that it goes first.
  std::unordered_map<std::uint64_t, std::shared_ptr<GroupState>> groups_;
  std::unordered_set<std::uint64_t> finished_groups_;
  std::unordered_map<std::uint64_t, std::vector<EarlyMessage>> early_;
  std::vector<PeerState> peer_states_;
  std::set<int> busy_peers_;
  std::unordered_map<DataTask*, std::unique_ptr<DataTask>> in_flight_;
  std::deque<std::unique_ptr<DataTask>> receives_to_post_;
  std::vector<MessageSlab> slabs_;
  std::vector<MessageBuffer*> free_buffers_;
  std::vector<MessageBuffer*> buffers_to_receive_;
  std::size_t num_messages_in_flight_ = 0;
  std::map<std::uint32_t, Expected> expected_;
  std::uint32_t next_id_ = 1;
  std::map<std::uintptr_t, Remembered> remembered_;
  std::shared_ptr<ScratchPool> pool_;
  bool says_goodbye_ = false;
  Clock::time_point last_progress_{};
  Clock::time_point last_ping_{};
  std::thread thread_;
};

}  // namespace hopshard::detail::ofi
