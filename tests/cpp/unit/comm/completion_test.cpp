#include "comm/completion.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard::detail {
namespace {

using std::chrono::milliseconds;

const auto kNoGivingUp = [](bool) { ADD_FAILURE() << "it was given up"; };

std::shared_ptr<Completion> make_completion() { return std::make_shared<Completion>(); }

TEST(Completion, TheFirstEndCounts) {
  Completion finished;
  EXPECT_FALSE(finished.is_done());
  EXPECT_FALSE(finished.wait_for(milliseconds(1)));
  finished.finish();
  finished.fail(std::make_exception_ptr(CommError("too late")));
  EXPECT_TRUE(finished.is_done());
  EXPECT_TRUE(finished.wait_for(milliseconds(0)));
  EXPECT_FALSE(finished.take_error());

  Completion failed;
  failed.fail(std::make_exception_ptr(CommError("first")));
  failed.fail(std::make_exception_ptr(TimeoutError("second")));
  failed.finish();
  EXPECT_TRUE(failed.is_done());
  try {
    std::rethrow_exception(failed.take_error());
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "first");
  }
}

TEST(CompletionWork, WaitsForAnotherThread) {
  const auto completion = make_completion();
  const WorkPtr work = make_completion_work(completion, milliseconds(60'000), kNoGivingUp);
  EXPECT_FALSE(work->test());
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    completion->finish();
  });
  work->wait();
  EXPECT_TRUE(work->test());
  work->wait();
  other.join();
}

TEST(CompletionWork, EveryWaitThrowsTheError) {
  const auto completion = make_completion();
  const WorkPtr work = make_completion_work(completion, milliseconds(60'000), kNoGivingUp);
  completion->fail(std::make_exception_ptr(ScheduleError("different operations")));
  EXPECT_TRUE(work->test());
  EXPECT_THROW(work->wait(), ScheduleError);
  EXPECT_THROW(work->wait(), ScheduleError);
}

TEST(CompletionWork, GivesUpOnceAtItsLimitAndThenWaitsForTheBuffers) {
  const auto completion = make_completion();
  std::vector<bool> calls;
  std::thread mover;
  const auto start = std::chrono::steady_clock::now();
  const WorkPtr work = make_completion_work(completion, milliseconds(30), [&](bool unwinding) {
    calls.push_back(unwinding);
    mover = std::thread([&] {  // Who moves the data notices a moment later.
      std::this_thread::sleep_for(milliseconds(30));
      completion->fail(std::make_exception_ptr(TimeoutError("global rank 3 did not arrive")));
    });
  });
  EXPECT_THROW(work->wait(), TimeoutError);
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(60));
  EXPECT_THROW(work->wait(), TimeoutError);
  EXPECT_EQ(calls, std::vector<bool>{false});
  mover.join();
}

TEST(CompletionWork, ADroppedOneIsWaitedForAndLogsItsError) {
  const auto completion = make_completion();
  std::vector<std::string> lines;
  const LogSink before =
      set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(20));
    completion->fail(std::make_exception_ptr(CommError("a peer died")));
  });
  { const WorkPtr work = make_completion_work(completion, milliseconds(60'000), kNoGivingUp); }
  EXPECT_TRUE(completion->is_done());
  other.join();
  set_log_sink(before);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("dropped without wait() and failed: a peer died"), std::string::npos);
}

TEST(CompletionWork, OneThatWasWaitedForLogsNothing) {
  const auto completion = make_completion();
  completion->fail(std::make_exception_ptr(CommError("seen")));
  int num_lines = 0;
  const LogSink before = set_log_sink([&](LogLevel, std::string_view) { ++num_lines; });
  {
    const WorkPtr work = make_completion_work(completion, milliseconds(60'000), kNoGivingUp);
    EXPECT_THROW(work->wait(), CommError);
  }
  set_log_sink(before);
  EXPECT_EQ(num_lines, 0);
}

TEST(CompletionWork, AnUnwindingRankGivesUpAtOnce) {
  const auto completion = make_completion();
  std::vector<bool> calls;
  const LogSink before = set_log_sink([](LogLevel, std::string_view) {});
  const auto start = std::chrono::steady_clock::now();
  try {
    const WorkPtr work =
        make_completion_work(completion, milliseconds(60'000), [&](bool unwinding) {
          calls.push_back(unwinding);
          completion->fail(std::make_exception_ptr(CommError("dropped")));
        });
    throw std::runtime_error("something else broke");
  } catch (const std::runtime_error&) {
  }
  set_log_sink(before);
  EXPECT_EQ(calls, std::vector<bool>{true});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(CompletionWork, AFinishedOneIsDroppedInPeaceByAnUnwindingRank) {
  const auto completion = make_completion();
  completion->finish();
  try {
    const WorkPtr work = make_completion_work(completion, milliseconds(60'000), kNoGivingUp);
    throw std::runtime_error("something else broke");
  } catch (const std::runtime_error&) {
  }
}

TEST(CompletionWork, MadeWhileAnErrorIsHandledItWaitsAsUsual) {
  struct Cleanup {
    std::shared_ptr<Completion> completion;
    ~Cleanup() {  // Runs while the error unwinds; the work in it is no part of that.
      std::thread other([&] {
        std::this_thread::sleep_for(milliseconds(10));
        completion->finish();
      });
      { const WorkPtr work = make_completion_work(completion, milliseconds(60'000), kNoGivingUp); }
      EXPECT_TRUE(completion->is_done());
      other.join();
    }
  };
  const auto completion = make_completion();
  try {
    const Cleanup cleanup{completion};
    throw std::runtime_error("something broke");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(completion->is_done());
}

}  // namespace
}  // namespace hopshard::detail
