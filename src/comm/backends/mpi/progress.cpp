#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/hash.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::detail::mpi {
namespace {

using std::chrono::milliseconds;

constexpr int kAnnouncementTag = 0;
// The smallest upper bound that MPI promises; used if it does not tell.
constexpr int kSmallestMaxTag = 32'767;
// How often a poll may find nothing before the thread sleeps, and how long it then sleeps: from the
// first to the longest, doubling. A core for each rank: the other ranks' steps take microseconds.
// Fewer cores: the thread yields between its polls, so that it does not hold up who has work.
constexpr int kPollsBeforeSleep = 200;
constexpr std::chrono::microseconds kFirstSleep{20};
constexpr std::chrono::microseconds kLongestSleep{500};
// Without operations of our own there is only what peers send ahead.
constexpr milliseconds kIdleSleep{20};
// At the end of the process: for the peers to hear that this rank leaves, and for MPI_Finalize,
// which waits for all ranks. After a failure some of them may never come.
constexpr milliseconds kFarewellLimit{1'000};
constexpr milliseconds kFinalizeLimitAfterFailure{10'000};

std::uint64_t hash_text(std::string_view text) {
  Fnv1a hash;
  for (const char letter : text) {
    hash.add(static_cast<unsigned char>(letter));
  }
  return hash.value();
}

/// MPI_COMM_SELF's attributes are deleted first in MPI_Finalize: the time to end the thread if
/// the program, e.g. through mpi4py, ends MPI before the process's end, whoever started it.
int on_finalize(MPI_Comm /*comm*/, int /*keyval*/, void* progress, void* /*extra*/) {
  static_cast<Progress*>(progress)->stop(/*at_finalize=*/true);
  return MPI_SUCCESS;
}

Progress* g_progress = nullptr;  // Never freed: works may outlive everything else.
pid_t g_progress_process = 0;

void on_exit() {
  if (getpid() == g_progress_process) {  // A forked child has no such thread.
    g_progress->stop(/*at_finalize=*/false);
  }
}

}  // namespace

void check(int code, std::string_view call) {
  if (code == MPI_SUCCESS) {
    return;
  }
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    length = 0;
  }
  throw CommError(concatenate(
      call, " failed: ", std::string_view(text.data(), static_cast<std::size_t>(length)), " (code ",
      code, ")"));
}

Progress& Progress::get() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (g_progress == nullptr) {
    g_progress = new Progress();
    g_progress_process = getpid();
    std::atexit(on_exit);
  }
  HOPSHARD_CHECK(getpid() == g_progress_process, ConfigError,
                 "mpi: this process was forked from one that uses MPI; start workers by spawn, or "
                 "fork them before the first group is connected");
  return *g_progress;
}

Progress::Progress() {
  int was_initialized = 0;
  int was_finalized = 0;
  MPI_Initialized(&was_initialized);
  MPI_Finalized(&was_finalized);
  HOPSHARD_CHECK(was_finalized == 0, ConfigError,
                 "mpi: MPI was finalised in this process and cannot be started again; finalise it "
                 "after the last use of hopshard");
  owns_mpi_ = was_initialized == 0;
  if (owns_mpi_) {
    // Without a launcher, MPI would start a world of one process, or end the process if it cannot.
    bool was_launched = false;
    for (const std::string_view name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
      was_launched = was_launched || launcher_variable(name).has_value();
    }
    HOPSHARD_CHECK(was_launched, ConfigError,
                   "mpi: this process was not started by an MPI launcher; start the ranks with "
                   "mpirun -n <ranks> ..., or srun --mpi=pmix ..., or choose another backend");
  }
  std::promise<void> started;
  auto is_started = started.get_future();
  thread_ = std::thread([this, &started] {
    try {
      start_mpi();
    } catch (...) {
      started.set_exception(std::current_exception());
      return;
    }
    started.set_value();  // `started` is gone from here on.
    run();
  });
  try {
    is_started.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

void Progress::start_mpi() {
  int level = MPI_THREAD_SINGLE;
  if (owns_mpi_) {
    HOPSHARD_MPI(MPI_Init_thread, nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    HOPSHARD_MPI(MPI_Comm_set_errhandler, MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  } else {
    HOPSHARD_MPI(MPI_Query_thread, &level);
  }
  HOPSHARD_CHECK(level >= MPI_THREAD_MULTIPLE, ConfigError,
                 "mpi: MPI was initialised for fewer threads than hopshard needs: its own thread "
                 "makes MPI calls. Call MPI_Init_thread with MPI_THREAD_MULTIPLE (mpi4py: "
                 "mpi4py.rc.thread_level = 'multiple'), or let hopshard initialise MPI");
  HOPSHARD_MPI(MPI_Comm_size, MPI_COMM_WORLD, &world_size_);
  HOPSHARD_MPI(MPI_Comm_rank, MPI_COMM_WORLD, &world_rank_);
  int* bound = nullptr;
  int has_bound = 0;
  HOPSHARD_MPI(MPI_Comm_get_attr, MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound),
               &has_bound);
  max_tag_ = has_bound != 0 ? *bound : kSmallestMaxTag;
  if (!env().node_id.empty()) {
    node_ = hash_text(env().node_id);
  } else {
    std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
    int length = 0;
    HOPSHARD_MPI(MPI_Get_processor_name, name.data(), &length);
    node_ = hash_text(std::string_view(name.data(), static_cast<std::size_t>(length)));
  }
  int keyval = MPI_KEYVAL_INVALID;
  HOPSHARD_MPI(MPI_Comm_create_keyval, MPI_COMM_NULL_COPY_FN, on_finalize, &keyval, nullptr);
  HOPSHARD_MPI(MPI_Comm_set_attr, MPI_COMM_SELF, keyval, this);
}

MPI_Comm Progress::communicator_of(const std::vector<int>& global_ranks, milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    const auto known = communicators_.find(global_ranks);
    if (known != communicators_.end()) {
      return known->second;
    }
  }
  // In a thread of its own: there is no nonblocking form, and a member may have given up.
  struct Result {
    std::promise<MPI_Comm> comm;
  };
  const auto result = std::make_shared<Result>();
  auto future = result->comm.get_future();
  std::thread([result, global_ranks] {
    try {
      MPI_Group world = MPI_GROUP_NULL;
      MPI_Group members = MPI_GROUP_NULL;
      MPI_Comm comm = MPI_COMM_NULL;
      HOPSHARD_MPI(MPI_Comm_group, MPI_COMM_WORLD, &world);
      HOPSHARD_MPI(MPI_Group_incl, world, static_cast<int>(global_ranks.size()),
                   global_ranks.data(), &members);
      // Members that make several groups at once tell them apart by this tag.
      Fnv1a hash;
      for (const int rank : global_ranks) {
        hash.add(static_cast<std::uint64_t>(rank));
      }
      const int tag = static_cast<int>(hash.value() % static_cast<std::uint64_t>(kSmallestMaxTag));
      HOPSHARD_MPI(MPI_Comm_create_group, MPI_COMM_WORLD, members, tag, &comm);
      HOPSHARD_MPI(MPI_Comm_set_errhandler, comm, MPI_ERRORS_RETURN);
      HOPSHARD_MPI(MPI_Group_free, &members);
      HOPSHARD_MPI(MPI_Group_free, &world);
      result->comm.set_value(comm);
    } catch (...) {
      result->comm.set_exception(std::current_exception());
    }
  }).detach();
  if (future.wait_for(limit) != std::future_status::ready) {
    const std::lock_guard lock(mutex_);
    is_making_communicator_stuck_ = true;
    throw TimeoutError(concatenate("mpi connect: MPI_Comm_create_group of ",
                                   name_global_ranks(global_ranks), " did not return within ",
                                   limit.count(),
                                   " ms; all of them must connect the group, look at the others"));
  }
  MPI_Comm comm = future.get();
  const std::lock_guard lock(mutex_);
  communicators_.emplace(global_ranks, comm);
  return comm;
}

std::shared_ptr<GroupState> Progress::open(MPI_Comm comm, const std::vector<int>& comm_ranks,
                                           const Group& group, std::uint64_t parent) {
  std::vector<int> mpi_ranks;
  Fnv1a name;
  name.add(parent);
  name.add(hash_text(group.name));
  for (const int rank : group.ranks) {
    name.add(static_cast<std::uint64_t>(rank));
    const auto place = std::find(comm_ranks.begin(), comm_ranks.end(), rank);
    mpi_ranks.push_back(static_cast<int>(place - comm_ranks.begin()));
  }
  for (const int rank : comm_ranks) {
    name.add(static_cast<std::uint64_t>(rank));
  }
  Fnv1a key = name;
  {
    const std::lock_guard lock(mutex_);
    key.add(num_opened_[name.value()]++);
  }
  auto state =
      std::make_shared<GroupState>(*this, group, key.value(), comm, std::move(mpi_ranks), node_);
  submit(state, [this, state] { add_group(state); });
  return state;
}

void Progress::submit(std::shared_ptr<GroupState> group, std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    HOPSHARD_CHECK(!is_stopping_, CommError, "mpi: group '", group->group().name,
                   "' cannot be used any more: MPI was finalised, or this process ends");
    tasks_.push_back({std::move(group), std::move(task)});
  }
  wake_.notify_one();
}

void Progress::guard(GroupState& group, const std::function<void()>& act) {
  std::string cause;
  try {
    act();
    return;
  } catch (const std::exception& error) {
    cause = error.what();
  }
  has_failed_ = true;
  try {
    group.fail_all(cause);
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kError, "mpi: the peers of group '", group.group().name,
                 "' could not be told of a failure: ", error.what());
  }
}

void Progress::run() {
  bool is_stopping = false;
  while (!is_stopping) {
    {
      const std::lock_guard lock(mutex_);
      is_stopping = is_stopping_;  // Then the tasks below are the last.
    }
    bool moved = run_tasks();
    moved = receive_messages() || moved;
    moved = advance_groups() || moved;
    moved = flush_sends() || moved;
    if (!is_stopping) {
      pause(moved);
    }
  }
  end_mpi();
  ended_promise_.set_value();
}

bool Progress::run_tasks() {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const Task& task : tasks) {
    guard(*task.group, task.run);
  }
  return !tasks.empty();
}

void Progress::add_group(const std::shared_ptr<GroupState>& group) {
  groups_.emplace(group->key(), group);
  MPI_Comm comm = group->comm();
  const bool is_known = std::any_of(inboxes_.begin(), inboxes_.end(),
                                    [&](const auto& inbox) { return inbox->comm == comm; });
  if (!is_known) {
    inboxes_.push_back(std::make_unique<Inbox>());
    inboxes_.back()->comm = comm;
    inboxes_.back()->buffer.resize(kMaxMessageSize);
    post_receive(*inboxes_.back());
  }
  const auto early = early_messages_.find(group->key());
  if (early != early_messages_.end()) {
    const std::vector<Message> messages = std::move(early->second);
    early_messages_.erase(early);
    for (const Message& message : messages) {
      group->receive(message);
    }
  }
}

void Progress::post_receive(Inbox& inbox) {
  HOPSHARD_MPI(MPI_Irecv, inbox.buffer.data(), static_cast<int>(inbox.buffer.size()), MPI_BYTE,
               MPI_ANY_SOURCE, kAnnouncementTag, inbox.comm, &inbox.request);
}

bool Progress::receive_messages() {
  constexpr int kMaxAtOnce = 64;  // Data must move too.
  bool moved = false;
  for (const auto& inbox : inboxes_) {
    try {
      for (int i = 0; i < kMaxAtOnce && inbox->request != MPI_REQUEST_NULL; ++i) {
        int is_there = 0;
        HOPSHARD_MPI(MPI_Test, &inbox->request, &is_there, MPI_STATUS_IGNORE);
        if (is_there == 0) {
          break;
        }
        moved = true;
        Message message;
        std::memcpy(&message.header, inbox->buffer.data(), sizeof(MessageHeader));
        const char* payload = inbox->buffer.data() + sizeof(MessageHeader);
        message.payload.assign(payload, payload + message.header.payload_bytes);
        post_receive(*inbox);
        const auto group = groups_.find(message.header.group_key);
        if (group != groups_.end()) {
          guard(*group->second, [&] { group->second->receive(std::move(message)); });
        } else if (!closed_keys_.contains(message.header.group_key)) {
          early_messages_[message.header.group_key].push_back(std::move(message));
        }
      }
    } catch (const std::exception& error) {
      // No more is heard of the peers: all groups over this communicator are lost.
      inbox->request = MPI_REQUEST_NULL;
      const std::string cause = error.what();
      for (const auto& [key, group] : groups_) {
        if (group->comm() == inbox->comm) {
          guard(*group, [&] { throw CommError(cause); });
        }
      }
    }
  }
  return moved;
}

void Progress::send(MPI_Comm comm, int mpi_rank, MessageHeader header, const char* payload,
                    std::int64_t bytes) {
  header.payload_bytes = static_cast<std::int32_t>(bytes);
  std::vector<char> buffer(sizeof(header) + static_cast<std::size_t>(bytes));
  std::memcpy(buffer.data(), &header, sizeof(header));
  if (bytes > 0) {
    std::memcpy(buffer.data() + sizeof(header), payload, static_cast<std::size_t>(bytes));
  }
  MPI_Request request = MPI_REQUEST_NULL;
  HOPSHARD_MPI(MPI_Isend, buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, mpi_rank,
               kAnnouncementTag, comm, &request);
  int is_done = 0;
  HOPSHARD_MPI(MPI_Test, &request, &is_done, MPI_STATUS_IGNORE);
  if (is_done == 0) {
    send_requests_.push_back(request);
    send_buffers_.push_back(std::move(buffer));
  }
}

bool Progress::flush_sends() {
  if (send_requests_.empty()) {
    return false;
  }
  std::vector<int> indices(send_requests_.size());
  int count = 0;
  const int code = MPI_Testsome(static_cast<int>(send_requests_.size()), send_requests_.data(),
                                &count, indices.data(), MPI_STATUSES_IGNORE);
  if (code != MPI_SUCCESS) {
    // Whoever it was for misses it and says so at its time limit.
    HOPSHARD_LOG(kError, "mpi: an announcement could not be sent");
    has_failed_ = true;
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < send_requests_.size(); ++i) {
    if (send_requests_[i] != MPI_REQUEST_NULL) {
      send_requests_[kept] = send_requests_[i];
      std::swap(send_buffers_[kept], send_buffers_[i]);
      ++kept;
    }
  }
  send_requests_.resize(kept);
  send_buffers_.resize(kept);
  return count > 0;
}

bool Progress::advance_groups() {
  bool moved = false;
  for (auto entry = groups_.begin(); entry != groups_.end();) {
    GroupState& group = *entry->second;
    guard(group, [&] { moved = group.advance() || moved; });
    if (group.is_over()) {
      if (group.has_failed()) {
        has_failed_ = true;
      }
      closed_keys_.insert(entry->first);
      entry = groups_.erase(entry);
    } else {
      ++entry;
    }
  }
  return moved;
}

bool Progress::is_busy() const {
  return !send_requests_.empty() ||
         std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& entry) { return entry.second->is_busy(); });
}

void Progress::pause(bool moved) {
  if (moved) {
    num_idle_polls_ = 0;
    return;
  }
  const bool busy = is_busy();
  if (busy && ++num_idle_polls_ <= kPollsBeforeSleep) {
    std::this_thread::yield();
    return;
  }
  std::unique_lock lock(mutex_);
  const auto has_work = [&] { return !tasks_.empty() || is_stopping_; };
  if (!busy) {
    num_idle_polls_ = 0;
    if (groups_.empty()) {
      wake_.wait(lock, has_work);
    } else {
      wake_.wait_for(lock, kIdleSleep, has_work);
    }
    return;
  }
  const int doublings = std::min((num_idle_polls_ - kPollsBeforeSleep) / 4, 8);
  wake_.wait_for(lock, std::min(kFirstSleep * (1 << doublings), kLongestSleep), has_work);
}

int Progress::next_tag() {
  last_tag_ = last_tag_ < max_tag_ ? last_tag_ + 1 : 1;
  return last_tag_;
}

void Progress::stop(bool at_finalize) {
  {
    const std::lock_guard lock(mutex_);
    if (is_stopping_) {
      return;
    }
    is_stopping_ = true;
    is_finalizing_ = at_finalize;
  }
  wake_.notify_one();
  const auto start = std::chrono::steady_clock::now();
  while (ended_.wait_for(milliseconds(100)) != std::future_status::ready) {
    const milliseconds limit = has_failed_ ? kFinalizeLimitAfterFailure : env().timeout;
    if (std::chrono::steady_clock::now() - start > limit) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

void Progress::end_mpi() {
  for (const auto& [key, group] : groups_) {
    if (group->has_failed()) {
      has_failed_ = true;
    }
    guard(*group, [&group = group] {
      group->leave();
      group->end("this process ends");
    });
  }
  const auto farewell_until = std::chrono::steady_clock::now() + kFarewellLimit;
  while (!send_requests_.empty() && std::chrono::steady_clock::now() < farewell_until) {
    flush_sends();
    std::this_thread::yield();
  }
  bool is_stuck = false;
  bool is_finalizing = false;
  {
    const std::lock_guard lock(mutex_);
    is_stuck = is_making_communicator_stuck_;
    is_finalizing = is_finalizing_;
  }
  for (const auto& inbox : inboxes_) {
    if (inbox->request != MPI_REQUEST_NULL) {
      MPI_Cancel(&inbox->request);
      MPI_Wait(&inbox->request, MPI_STATUS_IGNORE);  // A cancelled receive ends at once.
    }
  }
  if (!owns_mpi_ || is_finalizing || is_stuck) {
    return;  // The launcher ends the other ranks of a job that ends without MPI_Finalize.
  }
  // Sends that nobody received do not hold it up; stop() waits no longer than its limit for it.
  MPI_Finalize();
}

}  // namespace hopshard::detail::mpi
