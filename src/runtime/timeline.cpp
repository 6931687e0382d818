#include "hopshard/runtime/timeline.hpp"

#include <algorithm>
#include <utility>

namespace hopshard {

namespace {

double seconds_between(std::chrono::steady_clock::time_point begin,
                       std::chrono::steady_clock::time_point end) {
  return std::max(0.0, std::chrono::duration<double>(end - begin).count());
}

}  // namespace

class Timeline::WatchedWork final : public Work {
 public:
  WatchedWork(Timeline& timeline, TimelineLane lane, std::string name, WorkPtr inner)
      : timeline_(&timeline),
        lane_(lane),
        name_(std::move(name)),
        inner_(std::move(inner)),
        issued_(Clock::now()),
        last_running_(issued_),
        first_done_(Clock::time_point::max()) {
    timeline.under_way_.push_back(this);
  }

  ~WatchedWork() override {
    inner_.reset();  // May wait.
    leave();
  }

  void wait() override {
    test();
    const Clock::time_point begin = Clock::now();
    try {
      inner_->wait();
    } catch (...) {
      leave();
      throw;
    }
    if (timeline_ != nullptr) {
      account(begin, Clock::now());
    }
    leave();
  }

  bool test() override {
    const bool is_done = inner_->test();
    if (!is_done) {
      last_running_ = Clock::now();
    } else if (first_done_ == Clock::time_point::max()) {
      first_done_ = Clock::now();
    }
    return is_done;
  }

  void forget_timeline() noexcept { timeline_ = nullptr; }

 private:
  void account(Clock::time_point wait_begin, Clock::time_point wait_end) {
    Lane& lane = timeline_->at(lane_);
    const Clock::time_point end = std::min(first_done_, wait_end);
    const Clock::time_point begin = std::max(issued_, std::min(lane.last_end, end));
    lane.seconds.waited += seconds_between(wait_begin, wait_end);
    lane.seconds.hidden += seconds_between(begin, std::min(last_running_, wait_begin));
    lane.last_end = std::max(lane.last_end, end);
    timeline_->keep(lane_, name_, begin, end);
  }

  void leave() noexcept {
    if (timeline_ != nullptr) {
      std::erase(timeline_->under_way_, this);
      timeline_ = nullptr;
    }
  }

  Timeline* timeline_;  // Null once its wait has returned.
  TimelineLane lane_;
  std::string name_;
  WorkPtr inner_;
  Clock::time_point issued_;
  Clock::time_point last_running_;
  Clock::time_point first_done_;
};

Timeline::Timeline()
    : epoch_us_(std::chrono::duration<double, std::micro>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count()),
      start_(Clock::now()) {}

Timeline::~Timeline() {
  for (WatchedWork* work : under_way_) {
    work->forget_timeline();
  }
}

WorkPtr Timeline::watch(TimelineLane lane, std::string name, WorkPtr work) {
  return std::make_unique<WatchedWork>(*this, lane, std::move(name), std::move(work));
}

void Timeline::look() {
  for (WatchedWork* work : under_way_) {
    static_cast<void>(work->test());
  }
}

void Timeline::begin_span(TimelineLane lane, std::string name) {
  if (is_recording()) {
    at(lane).open.push_back({std::move(name), Clock::now()});
  }
}

void Timeline::end_span(TimelineLane lane) {
  if (std::vector<Span>& open = at(lane).open; !open.empty()) {
    keep(lane, open.back().name, open.back().begin, Clock::now());
    open.pop_back();
  }
}

LaneSeconds Timeline::seconds(TimelineLane lane) const {
  return lanes_[static_cast<std::size_t>(lane)].seconds;
}

void Timeline::record(std::size_t max_events) { max_events_ = max_events; }

std::vector<TimelineEvent> Timeline::take_events() { return std::exchange(events_, {}); }

void Timeline::keep(TimelineLane lane, const std::string& name, Clock::time_point begin,
                    Clock::time_point end) {
  if (events_.size() < max_events_) {
    const auto since_epoch_us = [this](Clock::time_point time) {
      return epoch_us_ + std::chrono::duration<double, std::micro>(time - start_).count();
    };
    events_.push_back({lane, name, since_epoch_us(begin), since_epoch_us(end)});
  }
}

}  // namespace hopshard
