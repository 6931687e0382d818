// adam_step against a scalar transcription of the formulas in long double, and its contract. The
// comparison with torch itself is tests/python/unit/test_optim_kernels.py.
#include "hopshard/optim/adamw.hpp"

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

namespace hopshard {
namespace {

template <typename T>
struct State {
  std::vector<T> master, grad, exp_avg, exp_avg_sq;

  State(std::size_t numel, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; i < numel; ++i) {
      master.push_back(static_cast<T>(normal(random)));
      grad.push_back(static_cast<T>(normal(random)));
      exp_avg.push_back(static_cast<T>(normal(random)));
      exp_avg_sq.push_back(static_cast<T>(std::abs(normal(random))));
    }
  }

  void step(const AdamSettings& settings, std::int64_t step, double grad_scale) {
    adam_step(std::span<T>(master), std::span<const T>(grad), std::span<T>(exp_avg),
              std::span<T>(exp_avg_sq), settings, step, grad_scale);
  }
};

using Wide = long double;

struct Reference {
  Wide master, exp_avg, exp_avg_sq;
};

Reference reference_step(Wide w, Wide g, Wide m, Wide v, const AdamSettings& s, std::int64_t step,
                         double grad_scale) {
  g *= s.maximize ? -grad_scale : grad_scale;
  if (s.decoupled_weight_decay) {
    w -= static_cast<Wide>(s.lr) * s.weight_decay * w;
  } else {
    g += s.weight_decay * w;
  }
  m = s.beta1 * m + (1 - static_cast<Wide>(s.beta1)) * g;
  v = s.beta2 * v + (1 - static_cast<Wide>(s.beta2)) * g * g;
  const Wide m_hat = m / (1 - std::pow(static_cast<Wide>(s.beta1), static_cast<Wide>(step)));
  const Wide v_hat = v / (1 - std::pow(static_cast<Wide>(s.beta2), static_cast<Wide>(step)));
  return {w - s.lr * m_hat / (std::sqrt(v_hat) + s.eps), m, v};
}

template <typename T>
class AdamStep : public testing::Test {};
using ElementTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(AdamStep, ElementTypes);

TYPED_TEST(AdamStep, FollowsTheFormulas) {
  const Wide tolerance = 8 * std::numeric_limits<TypeParam>::epsilon();
  unsigned seed = 1;
  for (const bool decoupled : {false, true}) {
    for (const bool maximize : {false, true}) {
      for (const double beta1 : {0.9, 0.4}) {
        const AdamSettings settings{.lr = 0.01,
                                    .beta1 = beta1,
                                    .beta2 = 0.99,
                                    .eps = 1e-6,
                                    .weight_decay = 0.1,
                                    .decoupled_weight_decay = decoupled,
                                    .maximize = maximize};
        for (const std::int64_t step : {1, 2, 100, 100'000}) {
          State<TypeParam> state(37, ++seed);
          const State<TypeParam> before = state;
          state.step(settings, step, 0.5);
          for (std::size_t i = 0; i < state.master.size(); ++i) {
            const Reference expected =
                reference_step(before.master[i], before.grad[i], before.exp_avg[i],
                               before.exp_avg_sq[i], settings, step, 0.5);
            const Wide size = 1 + std::abs(static_cast<Wide>(before.grad[i])) +
                              std::abs(static_cast<Wide>(before.master[i]));
            ASSERT_LE(std::abs(state.master[i] - expected.master), tolerance * size);
            ASSERT_LE(std::abs(state.exp_avg[i] - expected.exp_avg), tolerance * size);
            ASSERT_LE(std::abs(state.exp_avg_sq[i] - expected.exp_avg_sq), tolerance * size * size);
          }
          ASSERT_EQ(state.grad, before.grad);
        }
      }
    }
  }
}

TYPED_TEST(AdamStep, FirstStepMovesByTheLearningRate) {
  std::vector<TypeParam> master(5, 0), exp_avg(5, 0), exp_avg_sq(5, 0);
  const std::vector<TypeParam> grad{4, -4, 256, 1, -1};
  adam_step(std::span(master), std::span(grad), std::span(exp_avg), std::span(exp_avg_sq),
            {.lr = 0.5, .eps = 0, .weight_decay = 0}, 1);
  for (std::size_t i = 0; i < grad.size(); ++i) {
    EXPECT_NEAR(master[i], grad[i] > 0 ? -0.5 : 0.5, 1e-6);
  }
}

TYPED_TEST(AdamStep, EveryCutHasTheSameBits) {
  const AdamSettings settings{.lr = 0.01, .weight_decay = 0.1};
  State<TypeParam> whole(67, 3);
  const State<TypeParam> before = whole;
  whole.step(settings, 4, 0.3);
  for (std::size_t cut = 0; cut <= 67; ++cut) {
    State<TypeParam> parts = before;
    const auto step_part = [&](std::size_t begin, std::size_t numel) {
      adam_step(std::span(parts.master).subspan(begin, numel),
                std::span<const TypeParam>(parts.grad).subspan(begin, numel),
                std::span(parts.exp_avg).subspan(begin, numel),
                std::span(parts.exp_avg_sq).subspan(begin, numel), settings, 4, 0.3);
    };
    step_part(0, cut);
    step_part(cut, 67 - cut);
    ASSERT_EQ(parts.master, whole.master) << "cut at " << cut;
    ASSERT_EQ(parts.exp_avg, whole.exp_avg);
    ASSERT_EQ(parts.exp_avg_sq, whole.exp_avg_sq);
  }
}

TYPED_TEST(AdamStep, PaddingStaysZero) {
  for (const bool decoupled : {false, true}) {
    std::vector<TypeParam> zeros(40, 0);
    auto master = zeros, exp_avg = zeros, exp_avg_sq = zeros;
    for (std::int64_t step = 1; step <= 5; ++step) {
      adam_step(std::span(master), std::span<const TypeParam>(zeros), std::span(exp_avg),
                std::span(exp_avg_sq), {.weight_decay = 0.1, .decoupled_weight_decay = decoupled},
                step);
    }
    EXPECT_EQ(master, zeros);
    EXPECT_EQ(exp_avg, zeros);
    EXPECT_EQ(exp_avg_sq, zeros);
  }
}

TYPED_TEST(AdamStep, BadArgumentsThrow) {
  State<TypeParam> state(4, 1);
  EXPECT_THROW(state.step({}, 0, 1.0), InvalidArgument);
  state.exp_avg.pop_back();
  EXPECT_THROW(state.step({}, 1, 1.0), InvalidArgument);
}

TEST(AdamStep, WritesTheNewMasterAsBf16) {
  for (const std::size_t numel : {0U, 1U, 7U, 64U, 1003U}) {
    State<float> state(numel, 5);
    State<float> other = state;
    std::vector<std::uint16_t> shard(numel, 0x1234);
    adam_step(std::span(state.master), std::span<const float>(state.grad), std::span(state.exp_avg),
              std::span(state.exp_avg_sq), {.lr = 0.1}, 3, 0.5, shard);
    other.step({.lr = 0.1}, 3, 0.5);
    EXPECT_EQ(state.master, other.master);
    for (std::size_t i = 0; i < numel; ++i) {
      const float rounded = std::bit_cast<float>(std::uint32_t{shard[i]} << 16U);
      const float master = state.master[i];
      // To the nearest: half a unit in the last of 8 bits, and even where two are as near.
      EXPECT_LE(std::abs(rounded - master), std::abs(master) / 256) << master;
    }
  }
}

TEST(AdamStep, Bf16RoundsToEvenAndKeepsNaN) {
  // A step of rate 0 and without decay leaves the master as it is.
  const auto bits_of = [](float master) {
    std::vector<float> w{master}, m{0.0F}, v{0.0F};
    const std::vector<float> g{0.0F};
    std::vector<std::uint16_t> shard(1);
    adam_step(std::span(w), std::span<const float>(g), std::span(m), std::span(v),
              {.lr = 0.0, .weight_decay = 0.0}, 1, 1.0, shard);
    return shard[0];
  };
  const auto number = [](std::uint32_t bits) { return std::bit_cast<float>(bits); };
  EXPECT_EQ(bits_of(1.0F), 0x3f80);
  EXPECT_EQ(bits_of(number(0x3f808000)), 0x3f80);  // Half way: to even.
  EXPECT_EQ(bits_of(number(0x3f818000)), 0x3f82);
  EXPECT_EQ(bits_of(number(0x3f808001)), 0x3f81);
  EXPECT_EQ(bits_of(number(0xbf807fff)), 0xbf80);
  EXPECT_EQ(bits_of(std::numeric_limits<float>::max()), 0x7f80);  // Rounds to infinity.
  EXPECT_TRUE(std::isnan(number(std::uint32_t{bits_of(number(0x7f800001))} << 16U)));
}

TEST(AdamStep, AShardOfAnotherLengthIsRefused) {
  State<float> state(4, 1);
  std::vector<std::uint16_t> shard(3);
  EXPECT_THROW(adam_step(std::span(state.master), std::span<const float>(state.grad),
                         std::span(state.exp_avg), std::span(state.exp_avg_sq), {}, 1, 1.0, shard),
               InvalidArgument);
}

}  // namespace
}  // namespace hopshard
