// How close shm comes to what memory can do: its collectives beside plain loops that move the same
// bytes, all ranks at once, in the same run. Every result is checked before anything is timed.
//
//   shm_collectives [ranks] [MiB]...   medians over interleaved rounds, a row for each operation
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "comm/memory_loops.hpp"
#include "hopshard/comm/registry.hpp"
#include "support/fork_world.hpp"
#include "turns.hpp"

namespace hopshard::testing {
namespace {

using benchmarks::median;
using Clock = std::chrono::steady_clock;

struct Case {
  std::string name;
  std::function<void()> prepare;
  std::function<void()> run;
  std::function<bool()> is_right;
  std::vector<double> times_us{};
};

void fill(const at::Tensor& tensor, int rank) {
  auto* data = tensor.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    data[i] = static_cast<float>((i * 3 + rank * 5) % 11);
  }
}

bool holds_sum(const at::Tensor& tensor, std::int64_t begin, int size) {
  const auto* data = tensor.const_data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::int64_t sum = 0;
    for (int rank = 0; rank < size; ++rank) {
      sum += ((begin + i) * 3 + rank * 5) % 11;
    }
    if (data[i] != static_cast<float>(sum)) {
      return false;
    }
  }
  return true;
}

/// What one operation leaves in the caches must not help or burden the next one: only reads, so
/// that nothing has to be written back.
void empty_caches() {
  static const std::vector<std::uint64_t> memory(std::size_t{8} << 20, 1);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < memory.size(); i += 8) {
    sum += memory[i];
  }
  volatile std::uint64_t sink = sum;
  static_cast<void>(sink);
}

void measure(const CommunicatorPtr& world, std::vector<Case>& cases, int num_rounds, int repeat) {
  for (Case& entry : cases) {
    entry.prepare();
    world->barrier();
    entry.run();
    world->barrier();
    if (!entry.is_right()) {
      std::fprintf(stderr, "rank %d: %s is wrong\n", world->rank(), entry.name.c_str());
      std::abort();
    }
  }
  for (int round = 0; round < num_rounds; ++round) {
    for (Case& entry : cases) {
      if (repeat == 1) {
        empty_caches();
      }
      world->barrier();
      const auto start = Clock::now();
      for (int i = 0; i < repeat; ++i) {
        entry.run();
      }
      world->barrier();
      entry.times_us.push_back(
          std::chrono::duration<double, std::micro>(Clock::now() - start).count() / repeat);
    }
  }
}

void run_rank(int rank, int size, const std::vector<std::int64_t>& sizes_mib, SharedBoard& board) {
  at::set_num_threads(1);
  // Three ranks on one core and one on the other would measure the scheduler.
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(static_cast<unsigned>(rank) % std::thread::hardware_concurrency(), &cpus);
  ::sched_setaffinity(0, sizeof(cpus), &cpus);
  Group group{.name = "world", .ranks = {}, .rank = rank, .slots = {}};
  for (int member = 0; member < size; ++member) {
    group.ranks.push_back(member);
  }
  const CommunicatorPtr world = connect_backend(
      "shm", {.store = board.store(), .group = group, .timeout = std::chrono::seconds(30)});
  const auto always = [] { return true; };
  const auto nothing = [] {};

  const at::Tensor small = at::empty({1024}, at::kFloat);
  std::vector<Case> latency = {
      {"all_reduce 4 KiB", [&] { fill(small, rank); }, [&] { world->all_reduce(small)->wait(); },
       [&] { return holds_sum(small, 0, size); }},
      {"barrier", nothing, [&] { world->barrier(); }, always},
  };
  measure(world, latency, 51, 200);
  if (rank == 0) {
    for (const Case& entry : latency) {
      std::printf("%-34s %9.2f us\n", entry.name.c_str(), median(entry.times_us));
    }
  }

  for (const std::int64_t mib : sizes_mib) {
    const std::int64_t numel = (mib << 20) / 4;
    const std::int64_t part = numel / size;
    const std::int64_t begin = part * rank;
    std::vector<Case> cases;
    for (const bool allocated : {true, false}) {
      const auto make = [&](std::int64_t count) {
        return allocated ? world->allocate(count * 4).view(at::kFloat)
                         : at::empty({count}, at::kFloat);
      };
      const std::string suffix = allocated ? "" : " private";
      const at::Tensor whole = make(numel);
      const at::Tensor mine = make(part);
      const at::Tensor reduced = make(numel);
      cases.push_back({"reduce_scatter" + suffix, [=] { fill(whole, rank); },
                       [=] { world->reduce_scatter(mine, whole)->wait(); },
                       [=] { return holds_sum(mine, begin, size); }});
      cases.push_back({"all_gather" + suffix, [=] { fill(whole.narrow(0, begin, part), rank); },
                       [=] { world->all_gather(whole, whole.narrow(0, begin, part))->wait(); },
                       always});
      cases.push_back({"all_reduce" + suffix, [=] { fill(reduced, rank); },
                       [=] { world->all_reduce(reduced)->wait(); },
                       [=] { return holds_sum(reduced, 0, size); }});
      if (!allocated) {
        continue;
      }
      // The roofs: each rank on its own, over its own memory, by the same loops.
      const at::Tensor source = make(numel);
      fill(source, rank);
      const auto* from = source.const_data_ptr<float>();
      auto* to = whole.mutable_data_ptr<float>();
      auto* sum = mine.mutable_data_ptr<float>();
      cases.push_back({"roof of reduce_scatter", nothing,
                       [=, keep = source] {
                         std::vector<const void*> parts;
                         for (int member = 0; member < size; ++member) {
                           parts.push_back(from + part * member);
                         }
                         detail::reduce_memory(
                             sum, parts.data(), parts.size(), part,
                             {.dtype = at::kFloat,
                              .mode = detail::store_mode_for(static_cast<std::size_t>(part) * 4)});
                       },
                       always});
      cases.push_back({"roof of all_gather", nothing,
                       [=, keep = source] {
                         for (int member = 0; member < size; ++member) {
                           if (member != rank) {
                             detail::copy_memory(to + part * member, from + part * member,
                                                 static_cast<std::size_t>(part) * 4,
                                                 detail::StoreMode::kStreaming);
                           }
                         }
                       },
                       always});
    }
    measure(world, cases, 15, 1);
    if (rank == 0) {
      for (const Case& entry : cases) {
        std::printf("%3lld MiB %-26s %9.2f ms\n", static_cast<long long>(mib), entry.name.c_str(),
                    median(entry.times_us) / 1000.0);
      }
    }
  }
  world->barrier();
  std::fflush(stdout);
}

}  // namespace
}  // namespace hopshard::testing

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 4;
  std::vector<std::int64_t> sizes_mib;
  for (int i = 2; i < argc; ++i) {
    sizes_mib.push_back(std::atoll(argv[i]));
  }
  if (sizes_mib.empty()) {
    sizes_mib = {16, 64};
  }
  hopshard::testing::ForkWorld world;
  world.start(size, [&](int rank, hopshard::testing::SharedBoard& board) {
    hopshard::testing::run_rank(rank, size, sizes_mib, board);
  });
  int result = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (world.wait_for(rank, std::chrono::minutes(5)) != 0) {
      std::fprintf(stderr, "rank %d failed: %s\n", rank, world.board().report_of(rank).c_str());
      result = 1;
    }
  }
  return result;
}
