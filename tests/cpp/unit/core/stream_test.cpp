#include "hopshard/core/stream.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace hopshard {
namespace {

constexpr std::chrono::microseconds kDelay{300};

TEST(Stream, RunsInTheOrderOfSubmission) {
  std::vector<int> seen;
  Stream stream({.name = "test", .seed = 1, .max_delay = kDelay});
  for (int i = 0; i < 20; ++i) {
    stream.submit([&seen, i] { seen.push_back(i); });
  }
  stream.synchronize();
  ASSERT_EQ(seen.size(), 20U);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
  }
}

TEST(Stream, AnEventIsDoneWhenWhatCameBeforeItHasRun) {
  std::atomic<bool> may_end = false;
  std::atomic<bool> has_ended = false;
  Stream stream;
  stream.submit([&] {
    while (!may_end) {
      std::this_thread::yield();
    }
    has_ended = true;
  });
  const Event event = stream.record();
  EXPECT_FALSE(event.is_done());
  may_end = true;
  event.wait();
  EXPECT_TRUE(has_ended);
  EXPECT_TRUE(event.is_done());
  EXPECT_TRUE(Event().is_done());
  Event().wait();
}

// Without the event the reader comes first, at the latest when the writer is delayed.
TEST(Stream, WaitsForAnEventOfAnotherStreamWithoutBlockingTheCaller) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    int value = 0;
    int seen = -1;
    std::atomic<bool> may_write = false;
    Stream writer({.name = "writer", .seed = seed, .max_delay = kDelay});
    Stream reader({.name = "reader", .seed = seed + 100, .max_delay = kDelay});
    writer.submit([&] {
      while (!may_write) {
        std::this_thread::yield();
      }
      value = 7;
    });
    reader.wait(writer.record());
    reader.submit([&] { seen = value; });
    const Event read = reader.record();
    EXPECT_FALSE(read.is_done());  // Both calls have returned.
    may_write = true;
    read.wait();
    EXPECT_EQ(seen, 7);
  }
}

TEST(Stream, ItsEndRunsWhatWasSubmitted) {
  int num_run = 0;
  {
    Stream stream({.name = "test", .seed = 3, .max_delay = kDelay});
    for (int i = 0; i < 5; ++i) {
      stream.submit([&] { ++num_run; });
    }
  }
  EXPECT_EQ(num_run, 5);
}

}  // namespace
}  // namespace hopshard
