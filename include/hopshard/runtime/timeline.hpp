// What the computation waited for, what ran beside it, and when: the share of communication that
// was hidden, and the events of a trace. Knows collectives by their Work alone. Next:
// shard_engine.hpp.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "hopshard/comm/work.hpp"

namespace hopshard {

enum class TimelineLane { kCompute, kGather, kReduce, kSecondHop, kStep };

struct TimelineEvent {
  TimelineLane lane = TimelineLane::kCompute;
  std::string name;     ///< "forward h.3", "gather h.3"
  double begin_us = 0;  ///< Since the epoch.
  double end_us = 0;
};

/// Seconds of one lane's collectives, of this rank. A collective begins when it was issued and the
/// one before it in its lane has ended.
struct LaneSeconds {
  double waited = 0;  ///< The computation stood still.
  double hidden =
      0;  ///< It went on. A lower bound: up to when the collective was last seen running.
};

/// Threads: one at a time; works that it watches may outlive it.
class Timeline {
 public:
  Timeline();
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// The same work, watched.
  [[nodiscard]] WorkPtr watch(TimelineLane lane, std::string name, WorkPtr work);
  /// Looks at what is under way. Cheap; the more often, the sharper the lower bound.
  void look();

  /// Opens a span of the lane; spans may lie inside one another.
  void begin_span(TimelineLane lane, std::string name);
  void end_span(TimelineLane lane);
  /// Of what an exception cut off, nothing is kept.
  void drop_spans(TimelineLane lane) { at(lane).open.clear(); }

  [[nodiscard]] LaneSeconds seconds(TimelineLane lane) const;

  /// From here on events are kept, up to so many.
  void record(std::size_t max_events);
  [[nodiscard]] bool is_recording() const noexcept { return max_events_ > 0; }
  [[nodiscard]] std::vector<TimelineEvent> take_events();

 private:
  class WatchedWork;
  using Clock = std::chrono::steady_clock;
  struct Span {
    std::string name;
    Clock::time_point begin;
  };
  struct Lane {
    LaneSeconds seconds;
    Clock::time_point last_end;  // Of its collectives.
    std::vector<Span> open;
  };

  void keep(TimelineLane lane, const std::string& name, Clock::time_point begin,
            Clock::time_point end);
  Lane& at(TimelineLane lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  std::array<Lane, 5> lanes_;
  std::vector<WatchedWork*> under_way_;
  std::vector<TimelineEvent> events_;
  std::size_t max_events_ = 0;
  double epoch_us_ = 0;  // Of start_.
  Clock::time_point start_;
};

/// `work`, watched if there is a timeline.
[[nodiscard]] inline WorkPtr watched(Timeline* timeline, TimelineLane lane, std::string name,
                                     WorkPtr work) {
  return timeline == nullptr ? std::move(work)
                             : timeline->watch(lane, std::move(name), std::move(work));
}

}  // namespace hopshard
