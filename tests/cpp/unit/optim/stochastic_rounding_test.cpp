// Moments in bf16: right on average, the same bits wherever they are computed, and arithmetic that
// is that of fp32 moments. A first step of SGD stores its gradient, rounded: it shows the rounding.
#include "hopshard/optim/stochastic_rounding.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "hopshard/core/error.hpp"
#include "hopshard/optim/shard_update.hpp"

namespace hopshard {
namespace {

using Floats = std::vector<float>;
using Bits = std::vector<std::uint16_t>;

float widened(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16U); }

Floats widened(const Bits& bits) {
  Floats values;
  for (const std::uint16_t x : bits) values.push_back(widened(x));
  return values;
}

Bits rounded(const Floats& values, const StochasticRounding& rounding, std::int64_t step = 1) {
  Floats master(values.size());
  Bits buffer(values.size());
  // Past the first step, no momentum to speak of: the buffer was zero.
  sgd_step(master, values, buffer, {.momentum = 0.5}, step, rounding);
  return buffer;
}

double mean(const Bits& bits) {
  double sum = 0;
  for (const std::uint16_t x : bits) sum += static_cast<double>(widened(x));
  return sum / static_cast<double>(bits.size());
}

/// Five standard deviations of the mean of `n` values rounded to neighbours `ulp` apart.
double tolerance(double ulp, std::size_t n) {
  return 2.5 * ulp / std::sqrt(static_cast<double>(n));
}

TEST(StochasticRounding, IsRightOnAverageAndNeverFurtherThanANeighbour) {
  constexpr std::size_t kNumel = 1U << 18U;
  std::uint64_t seed = 0;
  for (const float x : {1.001F, 1.0F / 3, -3.7e-5F, 1.99999F, 65432.1F, 1e-39F, -1e38F}) {
    const auto below = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16U);
    const auto above = static_cast<std::uint16_t>(below + 1U);
    const Bits result = rounded(Floats(kNumel, x), {.seed = ++seed});
    for (const std::uint16_t bits : result) ASSERT_TRUE(bits == below || bits == above) << x;
    const double ulp = static_cast<double>(std::abs(widened(above) - widened(below)));
    EXPECT_NEAR(mean(result), x, tolerance(ulp, kNumel)) << x;
  }
}

TEST(StochasticRounding, IsRightOnAverageOverTheStepsOfOneElement) {
  constexpr std::size_t kNumSteps = 1U << 14U;
  Bits result;
  for (std::size_t step = 1; step <= kNumSteps; ++step) {
    result.push_back(rounded({1.003F}, {}, static_cast<std::int64_t>(step))[0]);
  }
  EXPECT_NEAR(mean(result), 1.003F, tolerance(0x1p-7, kNumSteps));
}

TEST(StochasticRounding, KeepsWhatBf16HoldsAndInfinityAndNan) {
  Floats values;
  for (unsigned bits = 0; bits < 0x10000U; ++bits) {
    values.push_back(widened(static_cast<std::uint16_t>(bits)));
  }
  // A NaN whose lower bits would carry into the sign.
  values.push_back(std::bit_cast<float>(0x7fffffffU));
  values.push_back(std::bit_cast<float>(0x7f800001U));
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const Bits result = rounded(values, {.seed = seed});
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) {
        ASSERT_TRUE(std::isnan(widened(result[i]))) << i;
      } else {
        ASSERT_EQ(widened(result[i]), values[i]) << i;
      }
    }
  }
}

TEST(StochasticRounding, EqualKeysGiveEqualBitsAndOthersOthers) {
  const Floats values(1000, 1.003F);
  const StochasticRounding rounding{.seed = 7, .stream = 1, .first_element = 100};
  const Bits result = rounded(values, rounding);
  EXPECT_EQ(rounded(values, rounding), result);
  const auto differing = [&](const Bits& other) {
    int count = 0;
    for (std::size_t i = 0; i < values.size(); ++i) count += other[i] != result[i] ? 1 : 0;
    return count;
  };
  // 1.003 is 0.38 of the way: two independent roundings differ 47 times in a hundred.
  for (const Bits& other :
       {rounded(values, {.seed = 8, .stream = 1, .first_element = 100}),
        rounded(values, {.seed = 7 + (std::uint64_t{1} << 40U), .stream = 1, .first_element = 100}),
        rounded(values, {.seed = 7, .stream = 2, .first_element = 100}),
        rounded(values, {.seed = 7, .stream = 1, .first_element = 101}),
        rounded(values, rounding, 2)}) {
    EXPECT_NEAR(differing(other), 470, 80);
  }
}

/// A step of Adam with moments in bf16.
struct State {
  Floats master, grad;
  Bits exp_avg, exp_avg_sq, shard;

  explicit State(std::size_t numel) : shard(numel) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < numel; ++i) {
      master.push_back(normal(random));
      grad.push_back(normal(random));
      exp_avg.push_back(
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16U));
      exp_avg_sq.push_back(static_cast<std::uint16_t>(
          std::bit_cast<std::uint32_t>(std::abs(normal(random))) >> 16U));
    }
  }

  void step(std::size_t begin, std::size_t end, const AdamSettings& settings) {
    const std::size_t n = end - begin;
    adam_step(std::span(master).subspan(begin, n), std::span(grad).subspan(begin, n),
              std::span(exp_avg).subspan(begin, n), std::span(exp_avg_sq).subspan(begin, n),
              settings, 3, {.seed = 9, .first_element = static_cast<std::int64_t>(begin)}, 0.5,
              std::span(shard).subspan(begin, n));
  }
};

TEST(Bf16Adam, ComputesInFp32AndRoundsWhatItStores) {
  for (const AdamSettings& settings :
       {AdamSettings{}, AdamSettings{.beta1 = 0.3, .decoupled_weight_decay = false}}) {
    State state(1001);
    Floats master = state.master;
    Floats exp_avg = widened(state.exp_avg);
    Floats exp_avg_sq = widened(state.exp_avg_sq);
    Bits shard(1001);
    adam_step(std::span<float>(master), state.grad, exp_avg, exp_avg_sq, settings, 3, 0.5, shard);
    state.step(0, 1001, settings);
    EXPECT_EQ(state.master, master);
    EXPECT_EQ(state.shard, shard);
    const auto expect_neighbours = [](const Bits& ours, const Floats& exact) {
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const std::uint32_t below = std::bit_cast<std::uint32_t>(exact[i]) >> 16U;
        ASSERT_LE(ours[i] - below, 1U) << i;
      }
    };
    expect_neighbours(state.exp_avg, exp_avg);
    expect_neighbours(state.exp_avg_sq, exp_avg_sq);
  }
}

TEST(Bf16Adam, BitsDoNotDependOnHowARangeIsCut) {
  State whole(1001);
  State cut = whole;
  whole.step(0, 1001, {});
  const std::vector<std::size_t> ends{0, 1, 30, 517, 1001};
  for (std::size_t i = 1; i < ends.size(); ++i) cut.step(ends[i - 1], ends[i], {});
  EXPECT_EQ(cut.exp_avg, whole.exp_avg);
  EXPECT_EQ(cut.exp_avg_sq, whole.exp_avg_sq);
}

TEST(Bf16Adam, TheMomentsRoundIndependently) {
  constexpr int kNumel = 1 << 16;
  // Both moments become a quarter of the way between two bf16 numbers.
  const float x = 1 + 0x1p-9F;
  Floats master(kNumel);
  const Floats grad(kNumel, x);
  Bits exp_avg(kNumel), exp_avg_sq(kNumel);
  const AdamSettings settings{.beta1 = 0.0, .beta2 = 1 - 1 / static_cast<double>(x)};
  adam_step(master, grad, exp_avg, exp_avg_sq, settings, 1, {});
  int first = 0, second = 0, both = 0;
  for (std::size_t i = 0; i < master.size(); ++i) {
    const bool up = widened(exp_avg[i]) > x;
    const bool squared_up = widened(exp_avg_sq[i]) > x;
    first += up ? 1 : 0;
    second += squared_up ? 1 : 0;
    both += up && squared_up ? 1 : 0;
  }
  EXPECT_NEAR(first, kNumel * 0.25, 600);
  EXPECT_NEAR(second, kNumel * 0.25, 600);
  EXPECT_NEAR(both, kNumel * 0.0625, 400);
}

TEST(Bf16Adam, AnAverageMovesBelowTheResolutionOfBf16) {
  constexpr std::size_t kNumel = 256;
  Floats master(kNumel);
  const Floats grad(kNumel, 1.0F);
  Bits exp_avg(kNumel), exp_avg_sq(kNumel);
  for (std::int64_t step = 1; step <= 2000; ++step) {
    adam_step(master, grad, exp_avg, exp_avg_sq, {.lr = 0}, step, {});
  }
  // Rounded to nearest it would stop near 0.25, where a thousandth of what is missing is lost.
  EXPECT_NEAR(mean(exp_avg_sq), 1 - std::pow(0.999, 2000), 0.01);
}

TEST(Bf16ShardUpdate, PartsOfAnArenaRoundAsTheWhole) {
  const std::vector<Segment> segments{{0, 40, 0, 7}, {64, 67, 0, 7}, {96, 126, 1, 2}};
  const std::vector<AdamSettings> adam{{}, {.lr = 0.1, .eps = 0}};
  const std::vector<SgdSettings> sgd{{.momentum = 0.9}, {.momentum = 0.5, .nesterov = true}};
  State whole(128);
  State parts = whole;
  const StochasticRounding rounding{.seed = 3, .stream = 2};
  const ShardUpdate update(128, segments);
  update.adam(std::span<float>(whole.master), whole.grad, whole.exp_avg, whole.exp_avg_sq, adam,
              rounding);
  update.sgd(std::span<float>(whole.master), whole.grad, whole.exp_avg, sgd, rounding);
  const std::vector<std::vector<Segment>> of_parts{{{0, 32, 0, 7}},
                                                   {{0, 8, 0, 7}, {32, 35, 0, 7}, {64, 94, 1, 2}}};
  std::int64_t begin = 0;
  for (const std::vector<Segment>& segments_here : of_parts) {
    const std::int64_t numel = begin == 0 ? 32 : 96;
    const auto of = [&](auto& arena) {
      return std::span(arena).subspan(static_cast<std::size_t>(begin),
                                      static_cast<std::size_t>(numel));
    };
    const ShardUpdate here(numel, segments_here);
    StochasticRounding from_here = rounding;
    from_here.first_element = begin;
    here.adam(of(parts.master), of(parts.grad), of(parts.exp_avg), of(parts.exp_avg_sq), adam,
              from_here);
    here.sgd(of(parts.master), of(parts.grad), of(parts.exp_avg), sgd, from_here);
    begin += numel;
  }
  EXPECT_EQ(parts.master, whole.master);
  EXPECT_EQ(parts.exp_avg, whole.exp_avg);
  EXPECT_EQ(parts.exp_avg_sq, whole.exp_avg_sq);
}

TEST(Bf16ShardUpdate, ChecksLengths) {
  Floats ones(16, 1.0F);
  Bits moments(16), short_one(15);
  const ShardUpdate update(16, std::vector<Segment>{{0, 16, 0, 1}});
  EXPECT_THROW(update.adam(std::span<float>(ones), ones, moments, short_one,
                           std::vector<AdamSettings>(1), StochasticRounding{}),
               InvalidArgument);
  EXPECT_THROW(update.sgd(std::span<float>(ones), ones, short_one,
                          std::vector<SgdSettings>{{.momentum = 0.9}}, StochasticRounding{}),
               InvalidArgument);
  EXPECT_THROW(adam_step(ones, ones, moments, short_one, {}, 1, {}), InvalidArgument);
  EXPECT_EQ(ones, Floats(16, 1.0F));
}

}  // namespace
}  // namespace hopshard
