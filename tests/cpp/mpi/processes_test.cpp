// What only ranks that are processes can show, or what they show in another way than threads.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "cpp/conformance/backends.hpp"
#include "hopshard/core/error.hpp"
#include "process_world.hpp"

namespace hopshard::testing {
namespace {

using std::chrono::milliseconds;

constexpr std::int64_t kLarge = 1 << 20;  // Elements: does not fit into an announcement.

Group all_processes(const std::string& name, std::vector<int> slots = {}) {
  Group group = world_of(process_world().size, process_world().rank, std::move(slots));
  group.name = name;
  return group;
}

std::int64_t now_us() {
  // One clock for all processes of a host.
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

TEST(Processes, ABarrierHoldsEverybodyBack) {
  const CommunicatorPtr world = connect_processes(all_processes("barrier"));
  std::this_thread::sleep_for(milliseconds(20 * world->rank()));
  const std::vector<std::int64_t> came = gather_numbers(now_us());
  const std::int64_t before = now_us();
  std::this_thread::sleep_for(milliseconds(20 * (world->size() - world->rank())));
  const std::int64_t arrived = now_us();
  world->barrier();
  const std::int64_t left = now_us();
  const std::vector<std::int64_t> all_arrived = gather_numbers(arrived);
  const std::vector<std::int64_t> all_left = gather_numbers(left);
  EXPECT_LE(*std::max_element(came.begin(), came.end()), before);
  EXPECT_LE(*std::max_element(all_arrived.begin(), all_arrived.end()),
            *std::min_element(all_left.begin(), all_left.end()));
}

TEST(Processes, LargeOperationsProgressWhileNobodyWaits) {
  const CommunicatorPtr world = connect_processes(all_processes("compute"));
  const at::Tensor tensor = floats(kLarge);
  const WorkPtr work = world->all_reduce(tensor);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!work->test() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(work->test());
  work->wait();
  expect_equal(tensor, [&](auto) { return world->size(); });
}

TEST(Processes, SeveralLargeOperationsOfSeveralGroupsInterleave) {
  const CommunicatorPtr one = connect_processes(all_processes("one"));
  const CommunicatorPtr other = one->split(all_processes("other"));
  const int size = one->size();
  std::vector<at::Tensor> sums;
  std::vector<at::Tensor> wholes;
  std::vector<WorkPtr> works;
  for (int round = 0; round < 6; ++round) {
    sums.push_back(make_tensor(50'001, at::kInt, [&](auto i) { return i + one->rank() + round; }));
    wholes.push_back(make_tensor(size * 20'000, at::kInt, [](auto) { return -1; }));
    works.push_back(one->all_reduce(sums.back()));
    const at::Tensor part =
        make_tensor(20'000, at::kInt, [&](auto i) { return i * (one->rank() + 1) + round; });
    works.push_back(other->all_gather(wholes.back(), part));
    works.push_back(other->broadcast(sums.back().new_zeros({30'000}), round % size));
  }
  if (one->rank() % 2 == 1) {
    std::reverse(works.begin(), works.end());
  }
  for (const WorkPtr& work : works) {
    work->wait();
  }
  for (int round = 0; round < 6; ++round) {
    expect_equal(sums[static_cast<std::size_t>(round)],
                 [&](auto i) { return size * (i + round) + size * (size - 1) / 2; });
    expect_equal(wholes[static_cast<std::size_t>(round)],
                 [&](auto i) { return i % 20'000 * (i / 20'000 + 1) + round; });
  }
}

TEST(Processes, ADeadRankEndsTheOthersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  EXPECT_THROW(run_ranks(2,
                         [&](int rank, ThreadWorld&) {
                           const CommunicatorPtr world = connect_processes(world_of(2, rank));
                           world->barrier();
                           if (rank == 1) {
                             throw std::runtime_error("out of memory");
                           }
                           try {
                             world->all_reduce(floats(4))->wait();
                           } catch (const CommError& error) {
                             text = error.what();
                           }
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  if (process_world().rank == 0) {
    EXPECT_NE(text.find("global rank 1"), std::string::npos) << text;
  }
}

TEST(Processes, APlaceThatIsNotMpisIsRefused) {
  Group group = all_processes("turned");
  group.rank = (group.rank + 1) % group.size();
  expect_error<ConfigError>([&] { static_cast<void>(connect_processes(group)); },
                            {"this process is global rank", "of MPI", "mpirun"});
  Group larger = all_processes("larger");
  larger.ranks.push_back(larger.size());
  expect_error<ConfigError>([&] { static_cast<void>(connect_processes(larger)); },
                            {"it holds global rank", "mpirun"});
}

TEST(Processes, ARankThatDoesNotConnectIsNamed) {
  run_ranks(2, [](int rank, ThreadWorld&) {
    if (rank == 0) {
      Group group = world_of(2, rank);
      group.name = "alone";
      expect_error<TimeoutError>(
          [&] { static_cast<void>(connect_processes(group, milliseconds(200))); },
          {"mpi connect 'alone'", "global rank 1 did not arrive", "200 ms"});
    }
  });
}

TEST(Processes, ARankThatDoesNotSplitIsNamed) {
  run_ranks(2, [](int rank, ThreadWorld&) {
    const CommunicatorPtr world = connect_processes(world_of(2, rank), milliseconds(1'000));
    if (rank == 0) {
      Group part = world_of(2, rank);
      part.name = "part";
      expect_error<TimeoutError>([&] { static_cast<void>(world->split(part)); },
                                 {"mpi connect 'part'", "global rank 1 did not arrive"});
    }
    world->barrier({.timeout = std::chrono::seconds(20), .tag = "still whole"});
  });
}

TEST(Processes, DifferentSlotsAreFoundWhenConnecting) {
  run_ranks(2, [](int rank, ThreadWorld&) {
    const Group group = world_of(2, rank, rank == 0 ? std::vector<int>{} : std::vector<int>{1, 0});
    expect_error<ScheduleError>([&] { static_cast<void>(connect_processes(group)); },
                                {"global rank 0: connect 'world'; global rank 1: connect 'world' "
                                 "with slots 1 0"});
  });
}

/// Stops this process; a child of its own wakes it after `pause`.
void stop_for(milliseconds pause) {
  const pid_t process = getpid();
  const pid_t child = fork();
  if (child == 0) {
    // Between fork and _exit nothing but system calls: other threads may have held any lock.
    usleep(static_cast<useconds_t>(pause.count() * 1000));
    kill(process, SIGCONT);
    _exit(0);
  }
  raise(SIGSTOP);
  waitpid(child, nullptr, 0);
}

TEST(Processes, ARankThatIsStoppedWhileDataMovesCostsNoMoreThanTheTimeLimit) {
  run_ranks(2, [](int rank, ThreadWorld&) {
    const CommunicatorPtr world = connect_processes(world_of(2, rank));
    const at::Tensor tensor = floats(16 * kLarge);
    world->barrier();
    const auto start = std::chrono::steady_clock::now();
    const WorkPtr work = world->all_reduce(
        tensor, ReduceOp::kSum, {.timeout = milliseconds(rank == 0 ? 300 : 20'000), .tag = "big"});
    if (rank == 1) {
      stop_for(milliseconds(4'000));
      // Whether it was through before it stopped is a matter of luck; it must not hang.
      try {
        work->wait();
      } catch (const CommError& error) {
        EXPECT_NE(std::string(error.what()).find("global rank 0 gave up waiting"),
                  std::string::npos)
            << error.what();
      }
      return;
    }
    try {
      work->wait();
    } catch (const TimeoutError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("300 ms"), std::string::npos) << text;
      EXPECT_NE(text.find("global rank 1"), std::string::npos) << text;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(2'500));
  });
}

}  // namespace
}  // namespace hopshard::testing
