// sgd_step on values whose exact results are known, and its contract. The comparison with torch
// itself is tests/python/unit/test_optim_kernels.py.
#include "hopshard/optim/sgd.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <span>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

template <typename T>
class SgdStep : public testing::Test {
 protected:
  // 19 elements: whole vectors and a tail. All values are exact in binary.
  std::vector<T> master = std::vector<T>(19, T{8});
  std::vector<T> grad = std::vector<T>(19, T{4});
  std::vector<T> buffer = std::vector<T>(19, T{2});

  void step(const SgdSettings& settings, bool first_step, double grad_scale = 1.0) {
    sgd_step(std::span<T>(master), std::span<const T>(grad), std::span<T>(buffer), settings,
             first_step, grad_scale);
  }
  static std::vector<T> all(double value) { return std::vector<T>(19, static_cast<T>(value)); }
};
using ElementTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(SgdStep, ElementTypes);

TYPED_TEST(SgdStep, WithoutMomentumLeavesTheBuffer) {
  this->step({.lr = 0.5}, false);
  EXPECT_EQ(this->master, this->all(6));
  EXPECT_EQ(this->buffer, this->all(2));
}

TYPED_TEST(SgdStep, FirstStepCopiesTheGradientUndamped) {
  this->buffer = this->all(std::numeric_limits<double>::quiet_NaN());
  this->step({.lr = 0.5, .momentum = 0.5, .dampening = 0.5}, true);
  EXPECT_EQ(this->buffer, this->all(4));
  EXPECT_EQ(this->master, this->all(6));
}

TYPED_TEST(SgdStep, MomentumDampeningAndDecay) {
  this->step({.lr = 0.5, .momentum = 0.5, .dampening = 0.25, .weight_decay = 0.5}, false);
  EXPECT_EQ(this->buffer, this->all(0.5 * 2 + 0.75 * (4 + 0.5 * 8)));
  EXPECT_EQ(this->master, this->all(8 - 0.5 * 7));
}

TYPED_TEST(SgdStep, NesterovLooksAhead) {
  this->step({.lr = 0.5, .momentum = 0.5, .nesterov = true}, false);
  EXPECT_EQ(this->buffer, this->all(5));
  EXPECT_EQ(this->master, this->all(8 - 0.5 * (4 + 0.5 * 5)));
  this->master = this->all(8);
  this->step({.lr = 0.5, .momentum = 0.5, .nesterov = true}, true);
  EXPECT_EQ(this->buffer, this->all(4));
  EXPECT_EQ(this->master, this->all(8 - 0.5 * (4 + 0.5 * 4)));
}

TYPED_TEST(SgdStep, ScaleAndMaximizeReachTheGradientBeforeTheDecay) {
  this->step({.lr = 0.5, .weight_decay = 0.5, .maximize = true}, false, 0.25);
  EXPECT_EQ(this->master, this->all(8 - 0.5 * (-1 + 4)));
}

TYPED_TEST(SgdStep, BadArgumentsThrow) {
  EXPECT_THROW(this->step({.momentum = 0.5, .dampening = 0.5, .nesterov = true}, true),
               InvalidArgument);
  EXPECT_THROW(this->step({.nesterov = true}, true), InvalidArgument);
  this->buffer.clear();
  EXPECT_NO_THROW(this->step({}, true));
  EXPECT_THROW(this->step({.momentum = 0.5}, true), InvalidArgument);
  this->grad.pop_back();
  EXPECT_THROW(this->step({}, true), InvalidArgument);
}

}  // namespace
}  // namespace hopshard
