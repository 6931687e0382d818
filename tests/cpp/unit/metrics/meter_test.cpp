#include "hopshard/metrics/meter.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace hopshard {
namespace {

TEST(Meter, AddsAndForgets) {
  Meter meter;
  EXPECT_EQ(meter.value("calls"), 0);
  meter.add("calls");
  meter.add("calls", 41);
  EXPECT_EQ(meter.value("calls"), 42);
  EXPECT_EQ(meter.counters(), (std::map<std::string, std::int64_t>{{"calls", 42}}));
  meter.reset();
  EXPECT_TRUE(meter.counters().empty());
}

TEST(Meter, KeepsThePeak) {
  Meter meter;
  meter.record_peak("live_bytes", -5);
  EXPECT_EQ(meter.value("live_bytes"), -5);
  meter.record_peak("live_bytes", 10);
  meter.record_peak("live_bytes", 3);
  EXPECT_EQ(meter.value("live_bytes"), 10);
}

TEST(Meter, CountsFromSeveralThreads) {
  Meter meter;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&meter] {
      for (int i = 0; i < 1000; ++i) {
        meter.add("calls");
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(meter.value("calls"), 4000);
}

TEST(ScopedTimer, AddsItsLife) {
  Meter meter;
  {
    const ScopedTimer timer(meter, "step");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(meter.value("step_calls"), 1);
  EXPECT_GE(meter.value("step_us"), 5000);
}

}  // namespace
}  // namespace hopshard
