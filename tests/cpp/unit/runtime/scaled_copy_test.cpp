// Every pair of dtypes, in one order and in another, against the same in doubles, rounded once.
#include "runtime/scaled_copy.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linspace.h>
#include <gtest/gtest.h>

#include <cmath>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

constexpr double kScale = 0.375;  // Products of these numbers have digits to round in 16 bit only.

class ScaledCopy
    : public ::testing::TestWithParam<std::tuple<at::ScalarType, at::ScalarType, bool>> {
 protected:
  [[nodiscard]] static at::Tensor values(at::ScalarType dtype, bool is_transposed) {
    const at::Tensor numbers = at::linspace(-3, 3, 7 * 19).to(at::kBFloat16).to(dtype);
    return is_transposed ? numbers.view({19, 7}).t() : numbers.view({7, 19});
  }
};

TEST_P(ScaledCopy, RoundsOnce) {
  const auto [to_dtype, from_dtype, is_transposed] = GetParam();
  const at::Tensor from = values(from_dtype, is_transposed);
  const at::Tensor exact = from.to(at::kDouble).mul(kScale);
  const at::Tensor copied = at::empty({7, 19}, at::TensorOptions().dtype(to_dtype));
  copy_scaled(copied, from, kScale);
  EXPECT_TRUE(at::equal(copied, exact.to(at::kFloat).to(to_dtype)));

  if (to_dtype == from_dtype) {
    return;  // Torch's own addition, which in 16 bit and another order rounds the product, too.
  }
  const at::Tensor sum = values(to_dtype, false).clone();
  const at::Tensor expected = sum.to(at::kDouble).add(exact).to(at::kFloat).to(to_dtype);
  add_scaled(sum, from, kScale);
  EXPECT_TRUE(at::equal(sum, expected));
}

constexpr std::array kDtypes = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

INSTANTIATE_TEST_SUITE_P(Dtypes, ScaledCopy,
                         ::testing::Combine(::testing::ValuesIn(kDtypes),
                                            ::testing::ValuesIn(kDtypes), ::testing::Bool()),
                         [](const auto& tested) {
                           return detail::concatenate(
                               std::get<1>(tested.param), "_into_", std::get<0>(tested.param),
                               std::get<2>(tested.param) ? "_transposed" : "");
                         });

TEST(ScaledCopies, KeepWhatIsNoNumber) {
  at::Tensor from = at::linspace(-1, 1, 40);
  from.mutable_data_ptr<float>()[3] = NAN;
  for (const at::ScalarType dtype : kDtypes) {
    const at::Tensor copied = at::empty({40}, at::TensorOptions().dtype(dtype));
    copy_scaled(copied, from, 2.0);
    EXPECT_TRUE(copied[3].isnan().item<bool>()) << dtype;
    EXPECT_FALSE(copied[4].isnan().item<bool>()) << dtype;
  }
}

}  // namespace
}  // namespace hopshard
