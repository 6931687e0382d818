// Norm parts: exact where arithmetic allows, indifferent to padding, never fooled by a NaN.
#include "hopshard/optim/grad_norm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

template <typename T>
class GradNorm : public testing::Test {};
using ElementTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(GradNorm, ElementTypes);

TYPED_TEST(GradNorm, SumsOfIntegersAreExactAtEveryBlockBoundary) {
  for (const std::size_t numel :
       {0UL, 1UL, 15UL, 16UL, 17UL, 1023UL, 1024UL, 1025UL, 2048UL, 3071UL, 65'536UL, 70'001UL}) {
    std::vector<TypeParam> values(numel);
    double squares = 0, absolutes = 0, cubes = 0, not_zero = 0, largest = 0;
    for (std::size_t i = 0; i < numel; ++i) {
      const double value = static_cast<double>(i * 7 % 19) - 9;
      values[i] = static_cast<TypeParam>(value);
      squares += value * value;
      absolutes += std::abs(value);
      cubes += std::abs(value * value * value);
      not_zero += value != 0 ? 1 : 0;
      largest = std::max(largest, std::abs(value));
    }
    const std::span<const TypeParam> span(values);
    EXPECT_EQ(sum_of_squares(span), squares) << numel;
    EXPECT_EQ(power_sum(span, 2), squares) << numel;
    EXPECT_EQ(power_sum(span, 1), absolutes) << numel;
    EXPECT_EQ(power_sum(span, 3), cubes) << numel;
    EXPECT_EQ(power_sum(span, 0), not_zero) << numel;
    EXPECT_EQ(abs_max(span), largest) << numel;
    EXPECT_TRUE(all_finite(span));
  }
}

TYPED_TEST(GradNorm, PairwiseSumsDoNotDrift) {
  // A plain running sum of 3 million times 0.1^2 is off by more than 1e-12.
  const std::vector<TypeParam> values(3'000'000, static_cast<TypeParam>(0.1));
  const double square = static_cast<double>(values[0]) * static_cast<double>(values[0]);
  EXPECT_NEAR(sum_of_squares(std::span<const TypeParam>(values)) / (3e6 * square), 1.0, 1e-14);
}

TYPED_TEST(GradNorm, TrailingZerosChangeNoBit) {
  std::vector<TypeParam> values;
  for (int i = 0; i < 5000; ++i) values.push_back(static_cast<TypeParam>(std::sin(i)));
  const double before = sum_of_squares(std::span<const TypeParam>(values));
  values.resize(9000, 0);
  EXPECT_EQ(sum_of_squares(std::span<const TypeParam>(values)), before);
}

TYPED_TEST(GradNorm, FindsEveryNonFinitePlace) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const std::size_t numel : {1UL, 16UL, 50UL}) {
    for (std::size_t place = 0; place < numel; ++place) {
      for (const TypeParam bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
        std::vector<TypeParam> values(numel, Limits::lowest());
        const std::span<const TypeParam> span(values);
        ASSERT_TRUE(all_finite(span));
        ASSERT_EQ(abs_max(span), static_cast<double>(Limits::max()));
        values[place] = bad;
        ASSERT_FALSE(all_finite(span)) << place << " of " << numel;
        ASSERT_EQ(std::isnan(abs_max(span)), std::isnan(bad)) << place << " of " << numel;
        ASSERT_FALSE(std::isfinite(abs_max(span)));
        ASSERT_FALSE(std::isfinite(sum_of_squares(span)));
      }
    }
  }
}

TYPED_TEST(GradNorm, IllegalPowersThrow) {
  const std::vector<TypeParam> values(3, 1);
  for (const double p :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(static_cast<void>(power_sum(std::span<const TypeParam>(values), p)),
                 InvalidArgument);
  }
}

}  // namespace
}  // namespace hopshard
