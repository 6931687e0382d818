#include "hopshard/core/log.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <vector>

#include "hopshard/core/version.hpp"

namespace hopshard {
namespace {

class Log : public testing::Test {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::kInfo);
    old_sink_ =
        set_log_sink([this](LogLevel, std::string_view line) { lines_.emplace_back(line); });
  }
  void TearDown() override {
    set_log_sink(old_sink_);
    set_thread_log_rank(-1);
    set_process_log_rank(-1);
    set_log_level(LogLevel::kInfo);
  }

  std::vector<std::string> lines_;
  LogSink old_sink_;
};

TEST_F(Log, PrefixesLevelAndRank) {
  log_message(LogLevel::kWarning, "no rank");
  set_process_log_rank(2);
  log_message(LogLevel::kError, "of the process");
  set_thread_log_rank(5);
  log_message(LogLevel::kInfo, "of the thread");
  EXPECT_EQ(lines_, (std::vector<std::string>{"[hopshard warning] no rank",
                                              "[hopshard error rank 2] of the process",
                                              "[hopshard info rank 5] of the thread"}));
}

TEST_F(Log, DropsWhatIsBelowTheLevel) {
  set_log_level(LogLevel::kWarning);
  log_message(LogLevel::kInfo, "quiet");
  log_message(LogLevel::kWarning, "loud");
  set_log_level(LogLevel::kOff);
  log_message(LogLevel::kError, "off");
  EXPECT_EQ(lines_, std::vector<std::string>{"[hopshard warning] loud"});
  EXPECT_FALSE(is_logged(LogLevel::kOff));
}

TEST_F(Log, MacroEvaluatesItsPartsOnlyIfPrinted) {
  int evaluated = 0;
  HOPSHARD_LOG(kDebug, "n = ", ++evaluated);
  EXPECT_EQ(evaluated, 0);
  HOPSHARD_LOG(kInfo, "n = ", ++evaluated);
  EXPECT_EQ(lines_, std::vector<std::string>{"[hopshard info] n = 1"});
}

TEST_F(Log, OnceIsPerKey) {
  for (int i = 0; i < 3; ++i) {
    log_message_once(LogLevel::kInfo, "log_test/a", "a");
    log_message_once(LogLevel::kInfo, "log_test/b", "b");
  }
  EXPECT_EQ(lines_, (std::vector<std::string>{"[hopshard info] a", "[hopshard info] b"}));
}

TEST_F(Log, AKeyThatWasTooQuietIsNotUsedUp) {
  log_message_once(LogLevel::kDebug, "log_test/c", "first");
  set_log_level(LogLevel::kDebug);
  log_message_once(LogLevel::kDebug, "log_test/c", "second");
  EXPECT_EQ(lines_, std::vector<std::string>{"[hopshard debug] second"});
}

TEST_F(Log, SurvivesASinkThatThrows) {
  set_log_sink([](LogLevel, std::string_view) { throw std::runtime_error("full"); });
  EXPECT_NO_THROW(log_message(LogLevel::kError, "x"));
}

TEST_F(Log, ThreadsDoNotTearLines) {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < kThreads; ++rank) {
      threads.emplace_back([rank] {
        set_thread_log_rank(rank);
        for (int i = 0; i < kLines; ++i) log_message(LogLevel::kInfo, "line");
      });
    }
  }
  std::vector<int> count(kThreads);
  for (const std::string& line : lines_) {
    for (int rank = 0; rank < kThreads; ++rank) {
      if (line == detail::concatenate("[hopshard info rank ", rank, "] line"))
        ++count.at(static_cast<std::size_t>(rank));
    }
  }
  EXPECT_EQ(count, std::vector<int>(kThreads, kLines));
}

TEST(Version, IsThreeNumbers) { EXPECT_EQ(std::count(version().begin(), version().end(), '.'), 2); }

}  // namespace
}  // namespace hopshard
