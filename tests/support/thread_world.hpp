// A world whose ranks are threads over the `local` backend, for C++ tests.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hopshard/comm/local.hpp"
#include "hopshard/comm/store.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::testing {

/// What the ranks of one test world share: a hub for `local`, and a store for other backends.
class ThreadWorld : public LocalHub {
 public:
  using LocalHub::LocalHub;
  [[nodiscard]] const StorePtr& store() const { return store_; }

 private:
  StorePtr store_ = make_memory_store();
};

using RankFunction = std::function<void(int rank, ThreadWorld& world)>;

/// What run_ranks() does where the ranks are processes, so that the same tests run there: calls
/// `run` if this process is one of the ranks, and throws what any of them threw.
using RunRanks =
    std::function<void(int world_size, const RankFunction& run, std::chrono::milliseconds limit)>;
inline RunRanks& process_runner() {
  static RunRanks runner;
  return runner;
}

/// Runs `run(rank, world)` for all ranks, each on its own thread, and rethrows the first error.
///
/// First the errors of a rank's own: an unwinding rank drops its communicators, so the CommError of
/// a rank that waits for it may come before its own error arrives here. A rank that throws counts
/// as failed, so the others do not wait for it. After `limit` the hub is aborted; ranks that even
/// then do not end are a hang outside the hub, which ends the process.
inline void run_ranks(int world_size, const RankFunction& run,
                      std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  if (process_runner()) {
    process_runner()(world_size, run, limit);
    return;
  }
  ThreadWorld hub(world_size, limit);
  std::mutex mutex;
  std::condition_variable ended;
  int num_running = world_size;
  std::exception_ptr own_error;   // The first that no other rank's failure explains ...
  std::exception_ptr peer_error;  // ... and the first CommError.

  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);  // A rank is one core; pools of threads per rank only get in the way.
      set_thread_log_rank(rank);
      std::string failure;
      std::exception_ptr error;
      bool is_own = true;
      try {
        run(rank, hub);
      } catch (const CommError& caught) {
        failure = caught.what();
        error = std::current_exception();
        is_own = false;
      } catch (const std::exception& caught) {
        failure = caught.what();
        error = std::current_exception();
      } catch (...) {
        failure = "an exception of unknown type";
        error = std::current_exception();
      }
      if (error) {
        {
          const std::lock_guard lock(mutex);
          std::exception_ptr& first = is_own ? own_error : peer_error;
          if (!first) {
            first = error;
          }
        }
        hub.rank_failed(rank, failure);
      }
      const std::lock_guard lock(mutex);
      --num_running;
      ended.notify_all();
    });
  }

  bool in_time = false;
  {
    std::unique_lock lock(mutex);
    const auto all_ended = [&] { return num_running == 0; };
    in_time = ended.wait_for(lock, limit, all_ended);
    if (!in_time) {
      lock.unlock();
      hub.abort("the time limit of the test world");
      lock.lock();
      if (!ended.wait_for(lock, std::chrono::seconds(10), all_ended)) {
        std::fputs("run_ranks: a rank hangs outside the hub\n", stderr);
        std::abort();
      }
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (!in_time) {
    throw TimeoutError("run_ranks: the ranks did not end within " + std::to_string(limit.count()) +
                       " ms");
  }
  if (own_error || peer_error) {
    std::rethrow_exception(own_error ? own_error : peer_error);
  }
}

/// The group of all ranks, as `rank` sees it.
inline Group world_of(int world_size, int rank, std::vector<int> slots = {}) {
  Group group{.name = "world", .ranks = {}, .rank = rank, .slots = std::move(slots)};
  for (int member = 0; member < world_size; ++member) {
    group.ranks.push_back(member);
  }
  return group;
}

}  // namespace hopshard::testing
