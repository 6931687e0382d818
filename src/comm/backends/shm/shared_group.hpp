// One rank's end of a group: posts its operations, moves data when all ranks have posted, and finds
// out what went wrong. No rank ever waits for another while it holds anything, so a rank may stop
// or die at any point.
//
// [Note: protocol] Operations are numbered. A rank posts operation q (its record, and where its
// buffer is), in ring entry q % kRingSize; it may do so once all ranks have moved q - kRingSize.
// It moves q once all have posted it, in order, then counts `moved` up. A rank is done with q when
// it has moved it, if the data was inline; else when all have moved it, because until then peers
// use its buffers.
//
// [Note: failure] Whoever finds a failure writes the reason and lowers `fail_from`; then all
// operations from there on fail. A rank hands a buffer back to its user only when no peer can be
// using it: a mover says that it is busy, then looks at `fail_from`; who fails an operation lowers
// `fail_from`, then waits until nobody is busy. One of the two sees the other.
//
// [Note: progress] Any thread may drive a group: a rank that waits drives its own, and now and then
// all others of the process; a thread of the process drives what nobody else does (progress.hpp).
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control_block.hpp"
#include "hopshard/comm/communicator.hpp"
#include "memory.hpp"
#include "operation.hpp"
#include "peers.hpp"

namespace hopshard::detail::shm {

inline constexpr std::string_view kBackend = "shm";

/// What connect.cpp found out about a group.
struct Setup {
  Group group;
  ControlBlock block;
  std::shared_ptr<const Mapping> mapping;  ///< Of the control block.
  File lock_file;
  std::vector<LifeLine> life_lines;  ///< By group rank.
  bool has_arenas = true;            ///< Peers can map memory from allocate().
  bool can_read_private = true;      ///< All ranks can read and write each other's memory.
  bool has_own_cores = false;        ///< There are as many processors as ranks.
  bool reads_own_process = true;     ///< Ranks of this process are reached by plain pointers.
};

class SharedGroup {
 public:
  explicit SharedGroup(Setup setup);
  ~SharedGroup();
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  [[nodiscard]] const Group& group() const { return setup_.group; }
  [[nodiscard]] bool has_arenas() const { return setup_.has_arenas; }
  /// Bytes of a buffer that peers read in one operation; larger ones are issued in chunks. 0: any.
  [[nodiscard]] std::size_t chunk_bytes() const;

  /// @throws CommError  the group is unusable.
  void issue(const std::shared_ptr<Operation>& operation);
  /// @throws TimeoutError, CommError, ScheduleError
  void wait(Operation& operation, std::chrono::milliseconds timeout);
  [[nodiscard]] bool test(const Operation& operation);
  /// This rank unwinds: it waits for nobody, and nobody shall wait for it.
  void withdraw(const Operation& operation);
  /// Any thread.
  void abort(std::string_view reason);
  /// The communicator goes; operations that were issued still complete.
  void leave();

  [[nodiscard]] bool has_pending() const { return num_pending_.load() > 0; }
  /// Somebody waits, and so drives it.
  [[nodiscard]] bool is_attended() const { return num_waiting_.load() > 0; }
  /// One round of progress, unless somebody else makes it right now.
  void try_drive();
  /// Looks for peers that died or left, likewise.
  void try_examine();

 private:
  struct Cause {
    Failure::Kind kind = Failure::Kind::kComm;
    std::string text;
    std::uint64_t sequence = 0;
  };

  [[nodiscard]] std::size_t size() const { return setup_.life_lines.size(); }
  [[nodiscard]] std::size_t me() const { return static_cast<std::size_t>(setup_.group.rank); }
  [[nodiscard]] RankState& my_state() const { return setup_.block.rank(me()); }

  // All below need `drive_mutex_`, unless they say otherwise.
  void drive(bool may_move_large);
  void take_incoming();
  /// False if it needs a copy first and may not make it.
  [[nodiscard]] bool post(Operation& operation, bool may_copy);
  [[nodiscard]] bool prepare_location(Operation& operation, Location& location, bool may_copy);
  [[nodiscard]] bool may_post(std::uint64_t sequence);
  [[nodiscard]] bool all_posted(std::uint64_t sequence);
  [[nodiscard]] bool records_differ(std::uint64_t sequence) const;
  [[nodiscard]] bool move(Operation& operation);
  [[nodiscard]] PeerBuffer find_buffer(const Operation& operation, std::size_t member);
  [[nodiscard]] std::uint64_t moved_by_all();
  void finish(Operation& operation);

  void fail_active();
  void fail_operation(Operation& operation, const Cause& cause);
  [[nodiscard]] Cause known_cause() const;
  [[nodiscard]] bool await_idle_peers(const Operation& operation) const;
  void examine_peers();
  [[nodiscard]] std::vector<std::size_t> missing_members(std::uint64_t sequence) const;
  void give_up(const Operation& operation, std::chrono::milliseconds timeout);
  [[nodiscard]] std::string disagreement_text(std::uint64_t sequence) const;
  void fail_group(Cause cause, std::uint64_t from);

  // Any thread, without a lock.
  void sleep_until_done(const Operation& operation, std::chrono::microseconds limit);
  /// True if it is the first of the group.
  bool publish_failure(const Cause& cause, std::uint64_t from) const;
  [[nodiscard]] std::string died_text(std::size_t member) const;
  [[nodiscard]] std::string explain_broken_move(std::string_view error) const;
  [[nodiscard]] bool fails(std::uint64_t sequence) const;
  void notify() const;
  [[nodiscard]] std::string call_text(const Operation& operation) const;
  [[noreturn]] void throw_failure(const Operation& operation) const;
  [[nodiscard]] std::string name_of(std::size_t member) const;

  Setup setup_;
  const std::int64_t owner_pid_;
  std::vector<std::shared_ptr<PeerArenas>> peer_arenas_;  ///< By group rank; null: plain pointers.

  int num_outsiders_ = 0;  ///< Members that are not reached by plain pointers.

  std::mutex issue_mutex_;  ///< Guards the next three; held for a moment only.
  std::deque<std::shared_ptr<Operation>> incoming_;
  std::uint64_t next_sequence_ = 0;
  std::atomic<bool> has_incoming_ = false;

  std::mutex drive_mutex_;                         ///< Guards the next; held while data moves.
  std::deque<std::shared_ptr<Operation>> active_;  ///< Issued, not done; the front is `first_`.
  std::uint64_t first_ = 0;
  std::uint64_t num_posted_ = 0;
  std::uint64_t num_moved_ = 0;
  std::uint64_t moved_by_all_ = 0;
  std::size_t num_ready_ = 0;  ///< Members seen to have posted `num_moved_`.
  std::vector<PeerBuffer> buffers_;
  std::optional<Cause> own_cause_;

  std::atomic<int> num_pending_ = 0;
  std::atomic<int> num_waiting_ = 0;
  std::uint32_t num_idle_spins_ = 0;  ///< Before a wait yields.
};

}  // namespace hopshard::detail::shm
