// What one rank knows of one group: which operations it and its peers have issued. Only the
// progress thread calls it, so it needs no lock, and it never waits.
//
// [Note: agreement] Each rank announces operation i to every peer by a record of the call, and
// small operations bring their data along. Once all records of operation i are there, a rank either
// sees that all are equal and moves the data, or that they differ: as every rank sees all records,
// each finds the same difference and can name it. Before that, MPI has seen none of the caller's
// buffers, so a rank that gives up waiting can return at once. It tells its peers the first
// operation that it gave up; what it agreed on before that is carried out all the same.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hopshard/comm/group.hpp"
#include "operation.hpp"

namespace hopshard::detail::mpi {

class Progress;

class GroupState {
 public:
  /// @param comm       holds the members' ranks ...
  /// @param mpi_ranks  ... by member.
  GroupState(Progress& progress, Group group, std::uint64_t key, MPI_Comm comm,
             std::vector<int> mpi_ranks, std::uint64_t node);

  [[nodiscard]] std::uint64_t key() const { return key_; }
  [[nodiscard]] const Group& group() const { return group_; }
  [[nodiscard]] MPI_Comm comm() const { return peers_.comm; }

  void issue(const OperationPtr& operation);
  void receive(Message message);
  /// `operation` was not complete within `limit`, or its rank unwinds and drops it.
  void give_up(const OperationPtr& operation, std::chrono::milliseconds limit, bool is_unwinding);
  void abort(const std::string& reason);
  /// The communicator is gone; what it issued is still carried out.
  void leave();
  /// True if anything moved.
  bool advance();
  /// Fails everything, here and for the peers.
  void fail_all(const std::string& cause);
  /// Fails everything here, at once: nothing is advanced any more.
  void end(const std::string& cause);

  /// True while an operation waits for peers.
  [[nodiscard]] bool is_busy() const;
  /// Left, and nothing of it goes on.
  [[nodiscard]] bool is_over() const;
  [[nodiscard]] bool has_failed() const { return poison_.has_value(); }

 private:
  struct Pending {
    OperationPtr operation;                        ///< Null: not issued by this rank yet.
    std::vector<std::optional<Message>> messages;  ///< By member; nothing at this rank's own place.
  };

  Pending& pending_of(std::int64_t sequence);
  [[nodiscard]] bool is_inline(const MpiCall& call) const;
  void announce(const Operation& operation);
  /// Goes on with operation `sequence` if all ranks have announced it.
  void try_agree(std::int64_t sequence);
  void finish_inline(Operation& operation, const Pending& pending);
  void start(const OperationPtr& operation);
  /// `operation` failed while it moved, or before.
  void begin_failing(const OperationPtr& operation, Failure failure);
  /// The first failure decides what later calls say.
  void poison(Failure failure);
  void send_failed(std::int64_t first_sequence, const std::string& cause);
  [[nodiscard]] std::int64_t first_gathering() const;

  [[nodiscard]] std::vector<int> missing_ranks(const Pending& pending) const;
  [[nodiscard]] bool disagrees(const Pending& pending) const;
  [[nodiscard]] std::string disagreement_text(const Pending& pending) const;
  [[nodiscard]] std::string left_text(int member) const;
  [[nodiscard]] int global_rank_of(int member) const {
    return group_.ranks[static_cast<std::size_t>(member)];
  }

  Progress& progress_;
  Group group_;
  std::uint64_t key_;
  Peers peers_;
  std::uint64_t node_;
  bool spans_hosts_ = false;
  std::int64_t next_sequence_ = 0;
  std::map<std::int64_t, Pending> pending_;
  std::deque<OperationPtr> agreed_;      ///< To be started.
  std::vector<OperationPtr> moving_;     ///< Moving or settling.
  std::vector<OperationPtr> abandoned_;  ///< Failed, but MPI has not let go of their buffers.
  std::vector<std::optional<std::int64_t>> left_;  ///< By member: its first operation not issued.
  std::optional<Failure> poison_;
  bool has_left_ = false;
};

}  // namespace hopshard::detail::mpi
