// shm between processes: memory that is really another's, and ranks that are killed at any moment.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "comm/backends/shm/connect.hpp"
#include "hopshard/comm/registry.hpp"
#include "support/fork_world.hpp"

namespace hopshard::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Group world_of(int size, int rank) {
  Group group{.name = "world", .ranks = {}, .rank = rank, .slots = {}};
  for (int member = 0; member < size; ++member) {
    group.ranks.push_back(member);
    group.slots.push_back(size - 1 - member);
  }
  return group;
}

CommunicatorPtr connect(int size, int rank, SharedBoard& board,
                        const detail::shm::Restrictions& restrictions = {},
                        milliseconds timeout = seconds(20)) {
  at::set_num_threads(1);
  return detail::shm::connect(
      {.store = board.store(), .group = world_of(size, rank), .timeout = timeout}, restrictions);
}

void expect(bool is_true, const char* what) {
  if (!is_true) {
    throw std::runtime_error(what);
  }
}

std::int64_t value_of(int rank, std::int64_t i) { return (i * 3 + rank * 5) % 11; }

void fill(const at::Tensor& tensor, int rank) {
  auto* data = tensor.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    data[i] = static_cast<float>(value_of(rank, i));
  }
}

void expect_sum(const at::Tensor& tensor, std::int64_t begin, int size, const char* what) {
  const auto* data = tensor.const_data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::int64_t sum = 0;
    for (int rank = 0; rank < size; ++rank) {
      sum += value_of(rank, begin + i);
    }
    expect(data[i] == static_cast<float>(sum), what);
  }
}

/// All operations, on memory of both kinds, small and large.
void run_everything(const CommunicatorPtr& world) {
  const int size = world->size();
  const int rank = world->rank();
  for (const bool allocated : {true, false}) {
    for (const std::int64_t part : {std::int64_t{0}, std::int64_t{5}, std::int64_t{100'003}}) {
      const auto make = [&](std::int64_t numel) {
        return allocated ? world->allocate(numel * 4).view(at::kFloat)
                         : at::empty({numel}, at::kFloat);
      };
      const std::int64_t begin = part * world->group().my_slot();
      const at::Tensor whole = make(part * size);
      const at::Tensor mine = make(part);
      fill(whole, rank);
      world->reduce_scatter(mine, whole)->wait();
      expect_sum(mine, begin, size, "reduce_scatter");
      world->all_gather(whole, mine)->wait();
      expect_sum(whole, 0, size, "all_gather");
      fill(whole, rank);
      world->all_reduce(whole)->wait();
      expect_sum(whole, 0, size, "all_reduce");
      fill(whole, rank);
      world->broadcast(whole, size - 1)->wait();
      const auto* data = whole.const_data_ptr<float>();
      for (std::int64_t i = 0; i < whole.numel(); ++i) {
        expect(data[i] == static_cast<float>(value_of(size - 1, i)), "broadcast");
      }
      world->barrier();
    }
  }
}

void expect_clean_end(ForkWorld& world, int size) {
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(world.wait_for(rank, seconds(60)), 0) << world.board().report_of(rank);
  }
}

std::set<std::string> posix_segments() {
  std::set<std::string> names;
  if (std::filesystem::exists("/dev/shm")) {
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      // Other programs come and go there as well.
      if (entry.path().filename().string().starts_with("hopshard-")) {
        names.insert(entry.path().filename());
      }
    }
  }
  return names;
}

struct Host {
  std::string name;
  detail::shm::Restrictions restrictions;
};

class ShmProcesses : public ::testing::TestWithParam<Host> {};

TEST_P(ShmProcesses, MoveDataBetweenAddressSpaces) {
  const int size = 3;
  const std::set<std::string> before = posix_segments();
  ForkWorld world;
  world.start(size, [&](int rank, SharedBoard& board) {
    const CommunicatorPtr everyone = connect(size, rank, board, GetParam().restrictions);
    run_everything(everyone);
    const CommunicatorPtr again = everyone->split(everyone->group());
    run_everything(again);
  });
  expect_clean_end(world, size);
  EXPECT_EQ(posix_segments(), before);
}

TEST_P(ShmProcesses, ADeadRankIsNamedAtOnce) {
  const int size = 3;
  ForkWorld world;
  world.start(size, [&](int rank, SharedBoard& board) {
    const CommunicatorPtr everyone = connect(size, rank, board, GetParam().restrictions);
    everyone->barrier();
    board.counter().fetch_add(1);
    if (rank == 1) {
      std::this_thread::sleep_for(seconds(60));
    }
    const auto start = std::chrono::steady_clock::now();
    try {
      const at::Tensor tensor = at::empty({100'000}, at::kFloat);
      fill(tensor, rank);
      everyone->all_reduce(tensor, ReduceOp::kSum, {.timeout = {}, .tag = "norm"})->wait();
    } catch (const CommError& error) {
      board.report(rank, error.what());
      expect(std::chrono::steady_clock::now() - start < seconds(5), "it took too long");
      return;
    }
    throw std::runtime_error("no error");
  });
  while (world.board().counter() < 3) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  std::this_thread::sleep_for(milliseconds(20));
  world.kill(1);  // And not reaped: a zombie must count as dead.
  for (const int rank : {0, 2}) {
    EXPECT_EQ(world.wait_for(rank, seconds(20)), 0);
    const std::string text = world.board().report_of(rank);
    EXPECT_NE(text.find("shm all_reduce 'norm' in group 'world' on rank "), std::string::npos)
        << text;
    EXPECT_NE(text.find("global rank 1 died (process " + std::to_string(world.pid_of(1))),
              std::string::npos)
        << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, ShmProcesses,
                         ::testing::Values(Host{"unrestricted", {}},
                                           Host{"no_process_memory", {.no_process_memory = true}},
                                           Host{"no_memory_files", {.no_memory_files = true}},
                                           Host{"other_pid_namespace", {.no_pid = true}}),
                         [](const auto& test) { return test.param.name; });

TEST(ShmProcessesFailures, AKillAtAnyMomentIsNamedAndLeavesNothing) {
  const int size = 3;
  const std::set<std::string> before = posix_segments();
  for (int trial = 0; trial < 30; ++trial) {
    SCOPED_TRACE(trial);
    const int victim = trial % size;
    ForkWorld world;
    world.start(size, [&](int rank, SharedBoard& board) {
      try {
        // A rank that dies before it says hello can only be missed: hence the short time limit.
        const CommunicatorPtr everyone = connect(size, rank, board, {}, seconds(2));
        board.counter().fetch_add(1);
        const at::Tensor shared = everyone->allocate(4 * 80'000 * size).view(at::kFloat);
        const at::Tensor own = at::empty({60'000}, at::kFloat);
        while (true) {
          everyone->all_reduce(shared)->wait();
          const WorkPtr pending = everyone->all_reduce(own);
          everyone
              ->all_gather(shared,
                           shared.narrow(0, everyone->group().my_slot() * (shared.numel() / size),
                                         shared.numel() / size))
              ->wait();
        }
      } catch (const CommError& error) {
        board.report(rank, error.what());
        return;
      }
    });
    // From the first moments, while they connect, to the midst of the data.
    std::this_thread::sleep_for(std::chrono::microseconds(trial * 700));
    world.kill(victim);
    const auto killed = std::chrono::steady_clock::now();
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) {
        continue;
      }
      EXPECT_EQ(world.wait_for(rank, seconds(30)), 0) << world.board().report_of(rank);
      const std::string text = world.board().report_of(rank);
      EXPECT_NE(text.find("global rank " + std::to_string(victim)), std::string::npos) << text;
    }
    if (world.board().counter() == size) {
      EXPECT_LT(std::chrono::steady_clock::now() - killed, seconds(3));
    }
  }
  EXPECT_EQ(posix_segments(), before);
}

TEST(ShmProcessesFailures, ARankOnAnotherHostIsRefused) {
  ForkWorld world;
  world.start(1, [&](int rank, SharedBoard& board) {
    board.store()->set("shm/hello/1", "1 1 1 another-boot another-host 1,0");
    try {
      static_cast<void>(connect(2, rank, board));
    } catch (const ConfigError& error) {
      board.report(rank, error.what());
      return;
    }
    throw std::runtime_error("no error");
  });
  expect_clean_end(world, 1);
  const std::string text = world.board().report_of(0);
  EXPECT_NE(text.find("global rank 1 runs on host 'another-host'"), std::string::npos) << text;
  EXPECT_NE(text.find("c10d"), std::string::npos) << text;
}

TEST(ShmProcessesFailures, ARankThatDoesNotConnectIsNamed) {
  ForkWorld world;
  world.start(2, [&](int rank, SharedBoard& board) {
    if (rank == 1) {
      return;
    }
    try {
      static_cast<void>(connect(2, rank, board, {}, milliseconds(200)));
    } catch (const TimeoutError& error) {
      board.report(rank, error.what());
      return;
    }
    throw std::runtime_error("no error");
  });
  expect_clean_end(world, 2);
  const std::string text = world.board().report_of(0);
  EXPECT_NE(text.find("global rank 1 did not"), std::string::npos) << text;
  EXPECT_NE(text.find("200 ms"), std::string::npos) << text;
}

TEST(ShmProcessesMemory, FreedMemoryGoesBackAlthoughPeersHaveItMapped) {
  ForkWorld world;
  world.start(2, [&](int rank, SharedBoard& board) {
    const CommunicatorPtr everyone = connect(2, rank, board);
    const auto shared_kib = [] {
      std::ifstream info("/proc/self/smaps_rollup");
      std::string word;
      std::int64_t kib = 0;
      while (info >> word) {
        if (word == "Pss_Shmem:") {
          info >> kib;
        }
      }
      return kib;
    };
    std::int64_t first = 0;
    for (int round = 0; round < 40; ++round) {
      const at::Tensor whole = everyone->allocate(4 << 20).view(at::kFloat);
      everyone->all_reduce(whole)->wait();
      everyone->barrier();
      if (round == 3) {
        first = shared_kib();
      }
    }
    expect(shared_kib() < first + (8 << 10), "shared memory grows");
    everyone->barrier();
  });
  expect_clean_end(world, 2);
}

}  // namespace
}  // namespace hopshard::testing
