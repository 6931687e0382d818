#include "comm/reduce_parts.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace hopshard::detail {
namespace {

TEST(ReduceParts, AddsFromLeftToRight) {
  // (1e8 + -1e8) + 1 is 1 in fp32, 1e8 + (-1e8 + 1) is 0: only the order given is right.
  const at::Tensor out = at::empty({1}, at::kFloat);
  reduce_tensors(out, {at::tensor({1e8f}), at::tensor({-1e8f}), at::tensor({1.0f})},
                 ReduceOp::kSum);
  EXPECT_EQ(out.item<float>(), 1.0f);
  reduce_tensors(out, {at::tensor({1e8f}), at::tensor({1.0f}), at::tensor({-1e8f})},
                 ReduceOp::kSum);
  EXPECT_EQ(out.item<float>(), 0.0f);
}

TEST(ReduceParts, WrapsIntegersAndKeepsNan) {
  const std::int32_t most = std::numeric_limits<std::int32_t>::max();
  const at::Tensor ints = at::empty({1}, at::kInt);
  reduce_tensors(ints, {at::tensor({most}, at::kInt), at::tensor({1}, at::kInt)}, ReduceOp::kSum);
  EXPECT_EQ(ints.item<std::int32_t>(), std::numeric_limits<std::int32_t>::min());

  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor out = at::empty({3}, at::kFloat);
  reduce_tensors(out, {at::tensor({nan, 1.0f, 2.0f}), at::tensor({0.0f, nan, 3.0f})},
                 ReduceOp::kMax);
  EXPECT_TRUE(std::isnan(out[0].item<float>()));
  EXPECT_TRUE(std::isnan(out[1].item<float>()));
  EXPECT_EQ(out[2].item<float>(), 3.0f);
}

TEST(ReduceParts, WritesOverOneOfTheParts) {
  const at::Tensor first = at::tensor({1.0f, 2.0f});
  const at::Tensor second = at::tensor({10.0f, 20.0f});
  reduce_tensors(second, {first, second}, ReduceOp::kSum);
  EXPECT_EQ(second[0].item<float>(), 11.0f);
  EXPECT_EQ(second[1].item<float>(), 22.0f);
}

TEST(ReduceParts, AgreesBitForBitWithTheDevicePath) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble, at::kInt}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      std::vector<at::Tensor> parts;
      for (int part = 0; part < 5; ++part) {
        const at::Tensor values = at::empty({3000}, at::kFloat);
        for (int i = 0; i < 3000; ++i) {
          values.mutable_data_ptr<float>()[i] = std::sin(static_cast<float>(i * 7 + part)) * 50.0f;
        }
        parts.push_back(values.to(dtype));
      }
      const at::Tensor ours = at::empty({3000}, dtype);
      const at::Tensor theirs = at::empty({3000}, dtype);
      reduce_tensors(ours, parts, op);
      reduce_with_aten(theirs, parts, op);
      EXPECT_TRUE(ours.equal(theirs)) << dtype;
    }
  }
}

}  // namespace
}  // namespace hopshard::detail
