#include "hopshard/runtime/timeline.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <thread>

namespace hopshard {
namespace {

using std::chrono::milliseconds;

/// Done when told so; a wait takes as long as given.
class FakeWork final : public Work {
 public:
  explicit FakeWork(std::shared_ptr<bool> done, milliseconds wait = {}, bool fails = false)
      : done_(std::move(done)), wait_(wait), fails_(fails) {}
  void wait() override {
    std::this_thread::sleep_for(wait_);
    *done_ = true;
    if (fails_) {
      throw std::runtime_error("failed");
    }
  }
  bool test() override { return *done_; }

 private:
  std::shared_ptr<bool> done_;
  milliseconds wait_;
  bool fails_;
};

WorkPtr fake(std::shared_ptr<bool> done, milliseconds wait = {}, bool fails = false) {
  return std::make_unique<FakeWork>(std::move(done), wait, fails);
}

constexpr TimelineLane kLane = TimelineLane::kGather;

TEST(Timeline, WhatIsWaitedForIsNotHidden) {
  Timeline timeline;
  const WorkPtr work =
      timeline.watch(kLane, "gather h.0", fake(std::make_shared<bool>(), milliseconds(20)));
  work->wait();
  EXPECT_GE(timeline.seconds(kLane).waited, 0.02);
  EXPECT_LT(timeline.seconds(kLane).hidden, timeline.seconds(kLane).waited);
}

TEST(Timeline, WhatRunsBesideTheComputationIsHiddenAsFarAsItWasSeen) {
  Timeline timeline;
  const auto done = std::make_shared<bool>(false);
  const WorkPtr work = timeline.watch(kLane, "gather h.0", fake(done));
  std::this_thread::sleep_for(milliseconds(20));
  timeline.look();  // Still running: 20 ms are certain.
  *done = true;
  std::this_thread::sleep_for(milliseconds(30));
  work->wait();
  work->wait();  // Counts once.
  const LaneSeconds seconds = timeline.seconds(kLane);
  EXPECT_GE(seconds.hidden, 0.02);
  EXPECT_LT(seconds.hidden, 0.045);  // Not up to the wait.
  EXPECT_LT(seconds.waited, 0.01);
}

TEST(Timeline, ACollectiveBeginsWhenTheOneBeforeItHasEnded) {
  Timeline timeline;
  timeline.record(10);
  const auto never = std::make_shared<bool>(false);
  const WorkPtr first = timeline.watch(kLane, "first", fake(never, milliseconds(20)));
  const auto other = std::make_shared<bool>(false);
  const WorkPtr second = timeline.watch(kLane, "second", fake(other, milliseconds(5)));
  first->wait();
  second->wait();
  const std::vector<TimelineEvent> events = timeline.take_events();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].name, "first");
  EXPECT_GE(events[1].begin_us, events[0].end_us);
  EXPECT_GE(events[1].end_us - events[1].begin_us, 5000);
  EXPECT_TRUE(timeline.take_events().empty());
}

TEST(Timeline, FailedAndDroppedWorksLeaveIt) {
  Timeline timeline;
  timeline.record(10);
  const WorkPtr failed =
      timeline.watch(kLane, "failed", fake(std::make_shared<bool>(), {}, /*fails=*/true));
  EXPECT_THROW(failed->wait(), std::runtime_error);
  static_cast<void>(timeline.watch(kLane, "dropped", fake(std::make_shared<bool>())));
  timeline.look();
  EXPECT_TRUE(timeline.take_events().empty());
}

TEST(Timeline, WorksOutliveIt) {
  WorkPtr work;
  {
    Timeline timeline;
    work = timeline.watch(kLane, "late", fake(std::make_shared<bool>()));
  }
  work->wait();
  EXPECT_TRUE(work->test());
}

TEST(Timeline, SpansNestAndAreBounded) {
  Timeline timeline;
  timeline.begin_span(TimelineLane::kCompute, "before recording");
  timeline.end_span(TimelineLane::kCompute);
  timeline.record(2);
  timeline.begin_span(TimelineLane::kCompute, "outer");
  timeline.begin_span(TimelineLane::kCompute, "inner");
  timeline.end_span(TimelineLane::kCompute);
  timeline.end_span(TimelineLane::kCompute);
  timeline.begin_span(TimelineLane::kCompute, "one too many");
  timeline.end_span(TimelineLane::kCompute);
  const std::vector<TimelineEvent> events = timeline.take_events();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].name, "inner");
  EXPECT_EQ(events[1].name, "outer");
  EXPECT_LE(events[1].begin_us, events[0].begin_us);
  EXPECT_GE(events[1].end_us, events[0].end_us);
}

}  // namespace
}  // namespace hopshard
