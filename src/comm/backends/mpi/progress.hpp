// The thread that makes this process's MPI calls, all but the creation of communicators: it starts
// MPI if nobody has, takes what communicators submit, moves the data of all groups in turn, and
// ends before MPI does. MPI only progresses inside its calls, and its blocking calls burn a core;
// here nonblocking ones are tested, at first in quick succession, then with growing pauses.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "group_state.hpp"

namespace hopshard::detail::mpi {

/// Lifetime: from the first connect to the end of the process or MPI_Finalize.
class Progress {
 public:
  /// The process's own, started at the first call.
  /// @throws ConfigError  MPI cannot be started, was finalised, or lets only one thread call it.
  static Progress& get();

  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  [[nodiscard]] int world_size() const { return world_size_; }
  [[nodiscard]] int world_rank() const { return world_rank_; }

  /// An MPI communicator of these ranks of MPI_COMM_WORLD; made once and kept. Collective over
  /// them; any thread.
  /// @throws TimeoutError, CommError
  MPI_Comm communicator_of(const std::vector<int>& global_ranks, std::chrono::milliseconds limit);

  /// The state of the next group of this name and ranks that is made over `parent`, the key of
  /// another group or 0. Any thread.
  std::shared_ptr<GroupState> open(MPI_Comm comm, const std::vector<int>& comm_ranks,
                                   const Group& group, std::uint64_t parent);

  /// Runs `task` for `group` on the progress thread; what it throws fails the group. Any thread.
  /// @throws CommError  MPI was finalised.
  void submit(std::shared_ptr<GroupState> group, std::function<void()> task);

  // For GroupState, on the progress thread:
  void send(MPI_Comm comm, int mpi_rank, MessageHeader header, const char* payload,
            std::int64_t bytes);
  int next_tag();

  /// Ends the thread. Called at the process's end, or by MPI_Finalize. Idempotent.
  void stop(bool at_finalize);

 private:
  struct Task {
    std::shared_ptr<GroupState> group;
    std::function<void()> run;
  };
  /// Where announcements arrive; one receive is always posted.
  struct Inbox {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
    std::vector<char> buffer;
  };

  Progress();
  ~Progress() = default;

  void start_mpi();
  void run();
  bool run_tasks();
  bool receive_messages();
  void post_receive(Inbox& inbox);
  bool flush_sends();
  bool advance_groups();
  void pause(bool moved);
  [[nodiscard]] bool is_busy() const;
  void add_group(const std::shared_ptr<GroupState>& group);
  void end_mpi();
  /// Calls `act`; if it throws, the group fails.
  void guard(GroupState& group, const std::function<void()>& act);

  int world_size_ = 0;
  int world_rank_ = 0;
  int max_tag_ = 0;
  bool owns_mpi_ = false;
  std::uint64_t node_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Task> tasks_;
  bool is_stopping_ = false;
  bool is_finalizing_ = false;
  std::map<std::vector<int>, MPI_Comm> communicators_;
  bool is_making_communicator_stuck_ = false;
  std::map<std::uint64_t, std::uint64_t> num_opened_;  ///< By parent, name and ranks.

  // Of the progress thread.
  std::map<std::uint64_t, std::shared_ptr<GroupState>> groups_;
  std::map<std::uint64_t, std::vector<Message>> early_messages_;  ///< Of groups not opened yet.
  std::set<std::uint64_t> closed_keys_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  std::vector<MPI_Request> send_requests_;
  std::vector<std::vector<char>> send_buffers_;
  int last_tag_ = 0;
  int num_idle_polls_ = 0;
  std::atomic<bool> has_failed_ = false;  ///< Some peers may never come to MPI_Finalize.

  std::thread thread_;
  std::promise<void> ended_promise_;
  std::future<void> ended_ = ended_promise_.get_future();
};

}  // namespace hopshard::detail::mpi
