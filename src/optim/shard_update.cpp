// Merging is pure; applying checks everything first, because a step that stops half way leaves
// master and moments of different ages.
#include "hopshard/optim/shard_update.hpp"

#include <algorithm>
#include <cstddef>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

template <typename T>
std::span<T> part(std::span<T> arena, const Segment& segment) {
  return arena.subspan(static_cast<std::size_t>(segment.begin),
                       static_cast<std::size_t>(segment.end - segment.begin));
}

template <typename T>
std::span<T> part_or_none(std::span<T> arena, const Segment& segment) {
  return arena.empty() ? arena : part(arena, segment);
}

void check_arena(const char* name, std::size_t numel, std::int64_t arena_numel) {
  HOPSHARD_CHECK(numel == static_cast<std::size_t>(arena_numel), InvalidArgument,
                 "shard update: ", name, " has ", numel, " elements, the arena ", arena_numel);
}

template <typename Settings>
const Settings& settings_of(const Segment& segment, std::span<const Settings> settings) {
  HOPSHARD_CHECK(static_cast<std::size_t>(segment.group) < settings.size(), InvalidArgument,
                 "shard update: segment [", segment.begin, ", ", segment.end, ") is of group ",
                 segment.group, ", but there are settings for ", settings.size(), " groups");
  return settings[static_cast<std::size_t>(segment.group)];
}

/// The bits of an element are the same in whatever pass it is.
StochasticRounding part(const StochasticRounding& arena, const Segment& segment) {
  StochasticRounding result = arena;
  result.first_element += segment.begin;
  return result;
}

/// @param step  takes the pass and what adam_step takes first.
template <typename T, typename Moment, typename Step>
void apply_adam(std::int64_t arena_numel, std::span<const Segment> passes, std::span<T> master,
                std::span<const T> grad, std::span<Moment> exp_avg, std::span<Moment> exp_avg_sq,
                std::span<const AdamSettings> settings, const Step& step) {
  check_arena("master", master.size(), arena_numel);
  check_arena("grad", grad.size(), arena_numel);
  check_arena("exp_avg", exp_avg.size(), arena_numel);
  check_arena("exp_avg_sq", exp_avg_sq.size(), arena_numel);
  for (const Segment& pass : passes) static_cast<void>(settings_of(pass, settings));
  for (const Segment& pass : passes) {
    step(pass, part(master, pass), part(grad, pass), part(exp_avg, pass), part(exp_avg_sq, pass),
         settings_of(pass, settings));
  }
}

/// @param step  takes the pass and what sgd_step takes first.
template <typename T, typename Moment, typename Step>
void apply_sgd(std::int64_t arena_numel, std::span<const Segment> passes, std::span<T> master,
               std::span<const T> grad, std::span<Moment> momentum_buffer,
               std::span<const SgdSettings> settings, const Step& step) {
  check_arena("master", master.size(), arena_numel);
  check_arena("grad", grad.size(), arena_numel);
  const bool has_momentum = std::any_of(passes.begin(), passes.end(), [&](const Segment& pass) {
    return settings_of(pass, settings).momentum != 0;
  });
  if (has_momentum || !momentum_buffer.empty()) {
    check_arena("momentum_buffer", momentum_buffer.size(), arena_numel);
  }
  for (const Segment& pass : passes) {
    const SgdSettings& group = settings_of(pass, settings);
    HOPSHARD_CHECK(!group.nesterov || (group.momentum > 0 && group.dampening == 0), InvalidArgument,
                   "shard update: nesterov of group ", pass.group,
                   " needs a momentum above 0 and no dampening");
  }
  for (const Segment& pass : passes) {
    step(pass, part(master, pass), part(grad, pass), part_or_none(momentum_buffer, pass),
         settings_of(pass, settings));
  }
}

}  // namespace

std::vector<Segment> merge_segments(std::span<const Segment> segments, Padding padding) {
  std::vector<Segment> merged;
  bool may_join = false;  // False at the start and after a skipped segment.
  std::int64_t previous_end = 0;
  for (const Segment& segment : segments) {
    HOPSHARD_CHECK(segment.begin >= previous_end && segment.begin <= segment.end, InvalidArgument,
                   "segment [", segment.begin, ", ", segment.end,
                   ") is reversed or does not follow the one that ends at ", previous_end);
    const bool is_skipped = segment.group == Segment::kSkipped;
    HOPSHARD_CHECK(is_skipped || (segment.group >= 0 && segment.step >= 1), InvalidArgument,
                   "segment [", segment.begin, ", ", segment.end, ") has group ", segment.group,
                   " and step ", segment.step);
    previous_end = segment.end;
    if (segment.begin == segment.end) continue;
    if (is_skipped) {
      may_join = false;
      continue;
    }
    const bool joins = may_join && merged.back().group == segment.group &&
                       merged.back().step == segment.step &&
                       (padding == Padding::kSwallow || merged.back().end == segment.begin);
    if (joins) {
      merged.back().end = segment.end;
    } else {
      merged.push_back(segment);
    }
    may_join = true;
  }
  return merged;
}

ShardUpdate::ShardUpdate(std::int64_t arena_numel, std::span<const Segment> segments)
    : arena_numel_(arena_numel),
      exact_passes_(merge_segments(segments, Padding::kKeepOut)),
      passes_(merge_segments(segments, Padding::kSwallow)) {
  HOPSHARD_CHECK(arena_numel >= 0, InvalidArgument, "shard update: an arena of ", arena_numel,
                 " elements");
  HOPSHARD_CHECK(segments.empty() || segments.back().end <= arena_numel, InvalidArgument,
                 "shard update: segment [", segments.back().begin, ", ", segments.back().end,
                 ") is outside an arena of ", arena_numel, " elements");
}

void ShardUpdate::advance() noexcept {
  for (Segment& pass : exact_passes_) ++pass.step;
  for (Segment& pass : passes_) ++pass.step;
}

const std::vector<Segment>& ShardUpdate::passes_of(std::span<const AdamSettings> settings) const {
  const bool keeps_out = std::any_of(passes_.begin(), passes_.end(), [&](const Segment& pass) {
    return settings_of(pass, settings).eps == 0;
  });
  return keeps_out ? exact_passes_ : passes_;
}

void ShardUpdate::adam(std::span<float> master, std::span<const float> grad,
                       std::span<float> exp_avg, std::span<float> exp_avg_sq,
                       std::span<const AdamSettings> settings, double grad_scale,
                       std::span<std::uint16_t> bf16_shard) const {
  if (!bf16_shard.empty()) check_arena("bf16_shard", bf16_shard.size(), arena_numel_);
  apply_adam(arena_numel_, passes_of(settings), master, grad, exp_avg, exp_avg_sq, settings,
             [&](const Segment& pass, const auto&... parts) {
               adam_step(parts..., pass.step, grad_scale, part_or_none(bf16_shard, pass));
             });
}

void ShardUpdate::adam(std::span<double> master, std::span<const double> grad,
                       std::span<double> exp_avg, std::span<double> exp_avg_sq,
                       std::span<const AdamSettings> settings, double grad_scale) const {
  apply_adam(arena_numel_, passes_of(settings), master, grad, exp_avg, exp_avg_sq, settings,
             [&](const Segment& pass, const auto&... parts) {
               adam_step(parts..., pass.step, grad_scale);
             });
}

void ShardUpdate::adam(std::span<float> master, std::span<const float> grad,
                       std::span<std::uint16_t> exp_avg, std::span<std::uint16_t> exp_avg_sq,
                       std::span<const AdamSettings> settings, const StochasticRounding& rounding,
                       double grad_scale, std::span<std::uint16_t> bf16_shard) const {
  if (!bf16_shard.empty()) check_arena("bf16_shard", bf16_shard.size(), arena_numel_);
  apply_adam(arena_numel_, passes_of(settings), master, grad, exp_avg, exp_avg_sq, settings,
             [&](const Segment& pass, const auto&... parts) {
               adam_step(parts..., pass.step, part(rounding, pass), grad_scale,
                         part_or_none(bf16_shard, pass));
             });
}

void ShardUpdate::sgd(std::span<float> master, std::span<const float> grad,
                      std::span<float> momentum_buffer, std::span<const SgdSettings> settings,
                      double grad_scale) const {
  apply_sgd(arena_numel_, passes_, master, grad, momentum_buffer, settings,
            [&](const Segment& pass, const auto&... parts) {
              sgd_step(parts..., pass.step == 1, grad_scale);
            });
}

void ShardUpdate::sgd(std::span<double> master, std::span<const double> grad,
                      std::span<double> momentum_buffer, std::span<const SgdSettings> settings,
                      double grad_scale) const {
  apply_sgd(arena_numel_, passes_, master, grad, momentum_buffer, settings,
            [&](const Segment& pass, const auto&... parts) {
              sgd_step(parts..., pass.step == 1, grad_scale);
            });
}

void ShardUpdate::sgd(std::span<float> master, std::span<const float> grad,
                      std::span<std::uint16_t> momentum_buffer,
                      std::span<const SgdSettings> settings, const StochasticRounding& rounding,
                      double grad_scale) const {
  apply_sgd(arena_numel_, passes_, master, grad, momentum_buffer, settings,
            [&](const Segment& pass, const auto&... parts) {
              sgd_step(parts..., pass.step, part(rounding, pass), grad_scale);
            });
}

}  // namespace hopshard
