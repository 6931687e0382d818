// Kernels that take turns: each round runs every case once, so that what else the machine does hits
// all alike. A case is checked before anything is timed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace hopshard::benchmarks {

struct Case {
  std::string name;
  double gigabytes = 0;  ///< Read and written by one run, as an ideal kernel would.
  std::function<void()> run;
  std::function<bool()> is_right = [] { return true; };  ///< After its first run.
  std::vector<double> seconds{};
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline double seconds_of(const Case& entry) { return median(entry.seconds); }

inline void take_turns(std::vector<Case>& cases, int num_rounds) {
  for (const Case& entry : cases) {
    entry.run();
    if (!entry.is_right()) {
      std::fprintf(stderr, "%s: the result is wrong\n", entry.name.c_str());
      std::exit(1);
    }
  }
  for (int round = 0; round < num_rounds; ++round) {
    for (Case& entry : cases) {
      const auto start = std::chrono::steady_clock::now();
      entry.run();
      entry.seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
}

inline void print_cases(const std::vector<Case>& cases) {
  std::printf("%-52s %10s %8s\n", "one thread", "median ms", "GB/s");
  for (const Case& entry : cases) {
    std::printf("%-52s %10.2f %8.1f\n", entry.name.c_str(), seconds_of(entry) * 1e3,
                entry.gigabytes / seconds_of(entry));
  }
}

inline void print_figure(const char* name, double value, std::optional<double> goal = {}) {
  std::printf("%-62s %6.2f", name, value);
  if (goal) {
    std::printf("  goal >= %4.2f  %s", *goal, value >= *goal ? "met" : "MISSED");
  }
  std::printf("\n");
}

/// The main() of a benchmark: reads `[MiB of <what>] [rounds]` and calls `run` with both.
inline int run_benchmark(int argc, char** argv, const char* what,
                         void (*run)(long mib, int rounds)) {
  const long mib = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 64;
  const long rounds = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 15;
  if (mib < 1 || rounds < 1) {
    std::fprintf(stderr, "usage: %s [MiB of %s] [rounds]\n", argv[0], what);
    return 2;
  }
  run(mib, static_cast<int>(rounds));
  return 0;
}

}  // namespace hopshard::benchmarks
