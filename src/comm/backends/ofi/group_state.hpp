// One group as the progress thread sees it: pairs the ranks' operations by their place in the
// order, finds disagreement, and brings a failure to every rank. Next: operation.hpp.
//
// [Note: agreement] Every message of an operation carries the hash of its text. Who sees another
// hash than its own tells everybody what it issued and asks for the same; when all have told, all
// know the whole picture. An operation ends on a rank only after data or an agreement message of
// all others has come, directly or handed on by ranks that agree, so nobody ends one that others
// differ on.
//
// [Note: failure] The rank that fails tells all others. Each stops sending, and says so when
// nothing of its own is in flight (kStopped). Calls end when all peers have stopped, so that nobody
// writes into the caller's memory any more; a rank that does not answer is waited for kDrainLimit.
// Then its late writes still find the memory alive: the operation keeps it until the endpoint is
// closed.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../../failure.hpp"
#include "engine.hpp"
#include "hopshard/comm/group.hpp"

namespace hopshard::detail::ofi {

inline constexpr std::uint64_t kAllPending = UINT64_MAX;

struct Failure {
  FailureKind kind = FailureKind::kComm;  ///< Of the operation `sequence`; kComm for all others.
  std::uint64_t sequence = kAllPending;   ///< The operation that failed.
  std::string cause{};                    ///< For that operation.
  std::string later{};                    ///< For all others, also those issued later.
};

class GroupState : public std::enable_shared_from_this<GroupState> {
 public:
  GroupState(Engine& engine, Group group, std::uint64_t key);

  [[nodiscard]] const Group& group() const noexcept { return group_; }
  [[nodiscard]] std::uint64_t key() const noexcept { return key_; }
  [[nodiscard]] int peer_of(int member) const { return peers_[static_cast<std::size_t>(member)]; }

  // Commands of the communicator.
  void issue(std::shared_ptr<Operation> operation);
  void abort(const std::string& reason);
  void withdraw(const Operation& operation);
  void give_up(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds limit);
  void leave();

  // Events of the engine.
  void on_message(const MessageHeader& header, Payload payload);
  void on_arrival(Operation& operation, InStream& stream, std::size_t index);
  void on_sending() { ++num_in_flight_; }
  void on_sent(Operation& operation, OutStream& stream);
  void on_peer_lost(int peer, const std::string& reason);
  void on_transport_error(const std::string& reason);
  void tick(Clock::time_point now);
  void ping();
  [[nodiscard]] bool is_busy() const;
  /// Its communicator is gone and nothing is pending.
  [[nodiscard]] bool is_over() const;

 private:
  struct Told {
    bool has_issued = false;
    std::uint64_t hash = 0;
    std::string text;
  };
  struct Query {
    std::uint64_t sequence = 0;
    std::chrono::milliseconds limit{0};
    Clock::time_point deadline{};
  };
  struct Member {
    bool was_heard = false;
    bool has_stopped = false;
    std::optional<std::uint64_t> left_before;  ///< It left before issuing this operation.
  };

  void start_more();
  void deliver(Operation& operation, const MessageHeader& header, Payload payload);
  void progressed(Operation& operation);
  void tell(int member, std::uint64_t sequence, std::uint8_t flags);
  void tell_everybody(std::uint64_t sequence);
  void on_told(int member, const MessageHeader& header, Payload payload);
  void check_told(std::uint64_t sequence);
  void conclude_query();
  void fail_schedule(std::uint64_t sequence);
  void fail(Failure failure, bool tell_others = true);
  /// A member that left ends what it has not issued, but not what came before.
  void check_left();
  void end_failed();
  void send_to_all(const MessageHeader& header, Payload payload = {});
  [[nodiscard]] bool has_drained() const;
  [[nodiscard]] int member_of(int peer) const;
  [[nodiscard]] int global_rank(int member) const {
    return group_.ranks[static_cast<std::size_t>(member)];
  }
  [[nodiscard]] Failure left_failure(int member) const;
  [[nodiscard]] Failure lost_failure(int member, const std::string& reason) const;
  [[nodiscard]] Operation* find(std::uint64_t sequence) const;

  Engine& engine_;
  const Group group_;
  const std::uint64_t key_;
  std::vector<int> peers_;  ///< By member.
  std::vector<Member> members_;
  std::uint64_t next_sequence_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Operation>> operations_;  ///< Issued and not ended.
  std::map<std::uint64_t, std::vector<EarlyMessage>> early_;        ///< For those not started.
  std::size_t num_started_ = 0;
  std::size_t num_in_flight_ = 0;
  std::map<std::uint64_t, std::vector<std::optional<Told>>> told_;
  std::map<std::uint64_t, bool> disagreed_;  ///< True: this rank has told everybody.
  std::optional<Query> query_;
  std::optional<Failure> failure_;
  Clock::time_point failed_at_{};
  std::uint64_t first_later_ = 0;  ///< The first operation that was issued after the failure.
  bool has_told_stop_ = false;
  bool has_left_ = false;
};

}  // namespace hopshard::detail::ofi
