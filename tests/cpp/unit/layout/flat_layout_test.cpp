// Offsets, alignment and equal slices of a flat buffer.
#include "hopshard/layout/flat_layout.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

TEST(FlatLayout, ExampleOfTheHeader) {
  const FlatLayout layout({40, 3, 30}, 4, 2);
  EXPECT_EQ(layout.offset_of(0), 0);
  EXPECT_EQ(layout.offset_of(1), 64);
  EXPECT_EQ(layout.offset_of(2), 96);
  EXPECT_EQ(layout.slice_numel(), 64);
  EXPECT_EQ(layout.numel(), 128);
  EXPECT_EQ(layout.parameter_numel(), 73);
  EXPECT_EQ(layout.num_parameters(), 3);
  EXPECT_EQ(layout.numel_of(1), 3);
}

TEST(FlatLayout, AlignmentFollowsTheItemSize) {
  for (const std::int64_t itemsize : {1, 2, 4, 8, 16, 32, 64, 128}) {
    const FlatLayout layout({1, 1}, itemsize, 3);
    EXPECT_EQ(layout.offset_of(1) * itemsize, kFlatAlignmentBytes);
    EXPECT_EQ(layout.slice_numel() * itemsize, kFlatAlignmentBytes);
  }
}

TEST(FlatLayout, EmptyParametersTakeNoRoom) {
  const FlatLayout layout({0, 5, 0, 0, 1, 0}, 4, 1);
  EXPECT_EQ(layout.offset_of(1), 0);
  EXPECT_EQ(layout.offset_of(4), 32);
  EXPECT_EQ(layout.numel(), 64);
  EXPECT_EQ(FlatLayout({}, 4, 8).numel(), 0);
  EXPECT_EQ(FlatLayout({0, 0}, 4, 8).numel(), 0);
}

TEST(FlatLayout, AScalarOverManySlicesPadsAllOfThem) {
  const FlatLayout layout({1}, 4, 1000);
  EXPECT_EQ(layout.slice_numel(), 32);
  EXPECT_EQ(layout.numel(), 32000);
}

TEST(FlatLayout, AnExactFitHasNoTail) {
  const FlatLayout layout({64, 64}, 4, 4);
  EXPECT_EQ(layout.slice_numel(), 32);
  EXPECT_EQ(layout.numel(), layout.parameter_numel());
}

TEST(FlatLayout, RandomLayoutsAreAlignedOrderedAndTight) {
  std::mt19937 random(20220511);
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t itemsize = std::int64_t{1} << std::uniform_int_distribution(0, 3)(random);
    const int num_slices = std::uniform_int_distribution(1, 70)(random);
    std::vector<std::int64_t> numels(std::uniform_int_distribution<std::size_t>(0, 12)(random));
    for (auto& numel : numels) numel = std::uniform_int_distribution(0, 300)(random);
    const FlatLayout layout(numels, itemsize, num_slices);
    std::int64_t end = 0;
    for (int parameter = 0; parameter < layout.num_parameters(); ++parameter) {
      const std::int64_t offset = layout.offset_of(parameter);
      ASSERT_EQ(offset * itemsize % kFlatAlignmentBytes, 0);
      ASSERT_GE(offset, end);
      ASSERT_LT((offset - end) * itemsize, kFlatAlignmentBytes);
      end = offset + layout.numel_of(parameter);
    }
    ASSERT_EQ(layout.slice_numel() * itemsize % kFlatAlignmentBytes, 0);
    ASSERT_EQ(layout.numel(), layout.slice_numel() * num_slices);
    ASSERT_GE(layout.numel(), end);
    // Tight: slices smaller by one alignment unit would not hold everything.
    const std::int64_t unit = kFlatAlignmentBytes / itemsize;
    ASSERT_TRUE(layout.slice_numel() == 0 || (layout.slice_numel() - unit) * num_slices < end);
  }
}

TEST(FlatLayout, HugeBuffersAreExactAndOverflowThrows) {
  const std::int64_t numel = std::int64_t{30} << 30;  // 30 G elements
  const FlatLayout layout({numel, 1}, 4, 4096);
  EXPECT_EQ(layout.offset_of(1), numel);
  EXPECT_GE(layout.numel(), numel + 1);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(FlatLayout({kMax}, 1, 1), InvalidArgument);
  EXPECT_THROW(FlatLayout({kMax / 4, kMax / 4}, 4, 2), InvalidArgument);
}

TEST(FlatLayout, BadArgumentsThrow) {
  EXPECT_THROW(FlatLayout({-1}, 4, 1), InvalidArgument);
  EXPECT_THROW(FlatLayout({1}, 4, 0), InvalidArgument);
  for (const std::int64_t itemsize : {0, -4, 3, 256}) {
    EXPECT_THROW(FlatLayout({1}, itemsize, 1), InvalidArgument);
  }
}

}  // namespace
}  // namespace hopshard
