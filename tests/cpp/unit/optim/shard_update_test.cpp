// Merging keeps what must be apart apart, and one pass gives the bits of one call per segment.
#include "hopshard/optim/shard_update.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

using Segments = std::vector<Segment>;

TEST(MergeSegments, SwallowsPaddingBetweenEqualNeighbours) {
  EXPECT_EQ(merge_segments(Segments{{0, 40, 0, 7}, {64, 67, 0, 7}, {96, 126, 1, 7}}),
            (Segments{{0, 67, 0, 7}, {96, 126, 1, 7}}));
}

TEST(MergeSegments, KeepsAgesGroupsAndSkippedParametersApart) {
  EXPECT_EQ(merge_segments(Segments{{0, 8, 0, 7}, {8, 16, 0, 6}, {16, 24, 1, 6}}),
            (Segments{{0, 8, 0, 7}, {8, 16, 0, 6}, {16, 24, 1, 6}}));
  const Segments with_skipped{{0, 8, 0, 7}, {8, 9, Segment::kSkipped, 0}, {32, 40, 0, 7}};
  EXPECT_EQ(merge_segments(with_skipped), (Segments{{0, 8, 0, 7}, {32, 40, 0, 7}}));
  EXPECT_TRUE(merge_segments(Segments{{0, 8, Segment::kSkipped, 0}}).empty());
}

TEST(MergeSegments, EmptySegmentsSeparateNothing) {
  EXPECT_EQ(merge_segments(Segments{{0, 8, 0, 1}, {8, 8, 1, 5}, {8, 16, 0, 1}}),
            (Segments{{0, 16, 0, 1}}));
  EXPECT_EQ(merge_segments(Segments{{0, 8, 0, 1}, {8, 8, Segment::kSkipped, 0}, {8, 16, 0, 1}}),
            (Segments{{0, 16, 0, 1}}));
  EXPECT_TRUE(merge_segments(Segments{}).empty());
}

TEST(MergeSegments, KeepOutJoinsOnlyWhatTouches) {
  EXPECT_EQ(
      merge_segments(Segments{{0, 8, 0, 1}, {8, 16, 0, 1}, {32, 40, 0, 1}}, Padding::kKeepOut),
      (Segments{{0, 16, 0, 1}, {32, 40, 0, 1}}));
}

TEST(MergeSegments, BadSegmentsThrow) {
  for (const Segments& bad :
       {Segments{{0, 8, 0, 1}, {7, 9, 0, 1}}, Segments{{8, 4, 0, 1}}, Segments{{-1, 4, 0, 1}},
        Segments{{0, 4, -2, 1}}, Segments{{0, 4, 0, 0}}, Segments{{8, 9, 0, 1}, {0, 4, 0, 1}}}) {
    EXPECT_THROW(static_cast<void>(merge_segments(bad)), InvalidArgument);
  }
}

/// Random arenas with zero padding, random groups, ages and skipped parameters.
struct Arena {
  Segments segments;
  std::vector<float> master, grad, exp_avg, exp_avg_sq;

  explicit Arena(std::mt19937& random) {
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution(low, high)(random);
    };
    std::int64_t end = 0;
    for (int i = pick(0, 12); i > 0; --i) {
      const std::int64_t begin = end + 8 * pick(0, 2);
      end = begin + pick(0, 30);
      segments.push_back({begin, end, pick(-1, 1), pick(1, 2)});
    }
    const auto numel = static_cast<std::size_t>(end + pick(0, 16));
    for (auto* buffer : {&master, &grad, &exp_avg, &exp_avg_sq}) {
      buffer->assign(numel, 0.0F);
      for (const Segment& segment : segments) {
        for (std::int64_t j = segment.begin; j < segment.end; ++j) {
          (*buffer)[static_cast<std::size_t>(j)] = static_cast<float>(pick(1, 9));
        }
      }
    }
  }

  std::span<float> part(std::vector<float>& buffer, const Segment& segment) const {
    return std::span(buffer).subspan(static_cast<std::size_t>(segment.begin),
                                     static_cast<std::size_t>(segment.end - segment.begin));
  }
};

TEST(ShardUpdate, OnePassHasTheBitsOfOneCallPerSegment) {
  std::mt19937 random(31);
  for (int round = 0; round < 2000; ++round) {
    const double eps = round % 3 == 0 ? 0.0 : 1e-8;
    const std::vector<AdamSettings> adam{{.lr = 0.1, .eps = eps, .weight_decay = 0.1},
                                         {.lr = 0.3, .eps = eps, .decoupled_weight_decay = false}};
    const std::vector<SgdSettings> sgd{{.lr = 0.1, .momentum = 0.9}, {.lr = 0.3}};
    Arena merged(random);
    Arena single = merged;
    const ShardUpdate update(static_cast<std::int64_t>(merged.master.size()), merged.segments);
    update.adam(std::span<float>(merged.master), merged.grad, merged.exp_avg, merged.exp_avg_sq,
                adam, 0.5);
    update.sgd(std::span<float>(merged.master), merged.grad, merged.exp_avg, sgd, 0.5);
    for (const Segment& segment : single.segments) {
      if (segment.group == Segment::kSkipped) continue;
      const auto group = static_cast<std::size_t>(segment.group);
      adam_step(single.part(single.master, segment), single.part(single.grad, segment),
                single.part(single.exp_avg, segment), single.part(single.exp_avg_sq, segment),
                adam[group], segment.step, 0.5);
      sgd_step(single.part(single.master, segment), single.part(single.grad, segment),
               single.part(single.exp_avg, segment), sgd[group], segment.step == 1, 0.5);
    }
    // Comparing whole arenas also proves that padding and skipped parameters were left alone.
    ASSERT_EQ(merged.master, single.master) << "round " << round;
    ASSERT_EQ(merged.exp_avg, single.exp_avg) << "round " << round;
    ASSERT_EQ(merged.exp_avg_sq, single.exp_avg_sq) << "round " << round;
  }
}

TEST(ShardUpdate, ASteadyStepIsOnePassPerGroup) {
  Segments segments;
  for (std::int64_t i = 0; i < 1000; ++i) {
    segments.push_back({i * 64, i * 64 + 33, i < 600 ? 0 : 1, 12});
  }
  EXPECT_EQ(ShardUpdate(64'000, segments).passes(),
            (Segments{{0, 599 * 64 + 33, 0, 12}, {600 * 64, 999 * 64 + 33, 1, 12}}));
}

TEST(ShardUpdate, AdvancingMakesEveryPassOneUpdateOlder) {
  const auto segments = [](std::int64_t step) {
    return Segments{{0, 8, 0, step},
                    {8, 16, 0, step + 5},
                    {16, 24, Segment::kSkipped, 0},
                    {24, 28, 0, step},
                    {32, 40, 0, step}};
  };
  for (const double eps : {1e-8, 0.0}) {  // 0 keeps padding out, in passes of its own.
    const std::vector<AdamSettings> settings{{.eps = eps}};
    std::vector<float> master(40, 1.0F), exp_avg(40), exp_avg_sq(40);
    auto other_master = master, other_avg = exp_avg, other_avg_sq = exp_avg_sq;
    const std::vector<float> grad(40, 0.5F);
    ShardUpdate update(40, segments(1));
    for (std::int64_t step = 1; step <= 3; ++step) {
      const ShardUpdate anew(40, segments(step));
      EXPECT_EQ(update.passes(), anew.passes());
      update.adam(std::span<float>(master), grad, exp_avg, exp_avg_sq, settings);
      anew.adam(std::span<float>(other_master), grad, other_avg, other_avg_sq, settings);
      update.advance();
    }
    EXPECT_EQ(master, other_master);
    EXPECT_EQ(exp_avg_sq, other_avg_sq);
  }
}

TEST(ShardUpdate, ChecksEverythingBeforeTheFirstWrite) {
  std::vector<float> ones(16, 1.0F);
  auto master = ones, exp_avg = ones, exp_avg_sq = ones;
  const std::vector<AdamSettings> one_group(1);
  const ShardUpdate two_groups(16, Segments{{0, 8, 0, 1}, {8, 16, 1, 1}});
  EXPECT_THROW(two_groups.adam(std::span<float>(master), ones, exp_avg, exp_avg_sq, one_group),
               InvalidArgument);
  const std::vector<SgdSettings> bad_second{{.momentum = 0.9}, {.nesterov = true}};
  EXPECT_THROW(two_groups.sgd(std::span<float>(master), ones, exp_avg, bad_second),
               InvalidArgument);
  const std::vector<SgdSettings> with_momentum(2, SgdSettings{.momentum = 0.9});
  EXPECT_THROW(two_groups.sgd(std::span<float>(master), ones, {}, with_momentum), InvalidArgument);
  EXPECT_EQ(master, ones);
  EXPECT_EQ(exp_avg, ones);
  EXPECT_NO_THROW(two_groups.sgd(std::span<float>(master), ones, {}, std::vector<SgdSettings>(2)));
  EXPECT_THROW(ShardUpdate(15, Segments{{0, 16, 0, 1}}), InvalidArgument);
  EXPECT_THROW(ShardUpdate(-1, Segments{}), InvalidArgument);
}

}  // namespace
}  // namespace hopshard
