// The piece table covers every element once, in both directions, for thousands of random layouts.
#include "hopshard/layout/piece_table.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

using Pieces = std::vector<Piece>;

TEST(PieceTable, ExampleOfTheHeader) {
  const PieceTable table(FlatLayout({40, 3, 30}, 4, 2));
  const Piece w{.parameter = 0, .slice = 0, .parameter_begin = 0, .slice_begin = 0, .numel = 40};
  const Piece b{.parameter = 1, .slice = 1, .parameter_begin = 0, .slice_begin = 0, .numel = 3};
  const Piece v{.parameter = 2, .slice = 1, .parameter_begin = 0, .slice_begin = 32, .numel = 30};
  EXPECT_EQ(table.in_slice(0), Pieces{w});
  EXPECT_EQ(table.in_slice(1), (Pieces{b, v}));
  EXPECT_EQ(table.of_parameter(1), Pieces{b});
}

TEST(PieceTable, AParameterOverSeveralSlices) {
  const PieceTable table(FlatLayout({100}, 4, 4));
  ASSERT_EQ(table.of_parameter(0).size(), 4U);
  EXPECT_EQ(
      table.of_parameter(0)[3],
      (Piece{.parameter = 0, .slice = 3, .parameter_begin = 96, .slice_begin = 0, .numel = 4}));
  EXPECT_EQ(
      table.of_range(0, 30, 66),
      (Pieces{{.parameter = 0, .slice = 0, .parameter_begin = 30, .slice_begin = 30, .numel = 2},
              {.parameter = 0, .slice = 1, .parameter_begin = 32, .slice_begin = 0, .numel = 32},
              {.parameter = 0, .slice = 2, .parameter_begin = 64, .slice_begin = 0, .numel = 2}}));
}

TEST(PieceTable, EmptyParametersScalarsAndEmptySlices) {
  const PieceTable table(FlatLayout({0, 1, 0}, 4, 3));
  EXPECT_TRUE(table.of_parameter(0).empty());
  EXPECT_TRUE(table.of_parameter(2).empty());
  EXPECT_TRUE(table.of_range(0, 0, 0).empty());
  EXPECT_EQ(table.of_parameter(1).size(), 1U);
  EXPECT_EQ(table.in_slice(0).size(), 1U);
  EXPECT_TRUE(table.in_slice(1).empty());
  EXPECT_TRUE(table.in_slice(2).empty());
  EXPECT_TRUE(PieceTable(FlatLayout({}, 4, 2)).in_slice(1).empty());
}

/// Checks a table against the layout element by element: owner[i] is filled from the slices, then
/// compared with the offsets and with the pieces of the parameters.
void expect_consistent(const FlatLayout& layout) {
  using Owner = std::pair<int, std::int64_t>;
  constexpr Owner kPadding{-1, -1};
  const PieceTable table(layout);
  std::vector<Owner> owner(static_cast<std::size_t>(layout.numel()), kPadding);
  std::int64_t covered = 0;
  for (int slice = 0; slice < layout.num_slices(); ++slice) {
    std::int64_t end = 0;
    for (const Piece& piece : table.in_slice(slice)) {
      ASSERT_EQ(piece.slice, slice);
      ASSERT_GT(piece.numel, 0);
      ASSERT_GE(piece.slice_begin, end) << "overlap, or not ascending";
      end = piece.slice_begin + piece.numel;
      for (std::int64_t i = 0; i < piece.numel; ++i) {
        owner[static_cast<std::size_t>(slice * layout.slice_numel() + piece.slice_begin + i)] = {
            piece.parameter, piece.parameter_begin + i};
      }
      covered += piece.numel;
    }
    ASSERT_LE(end, layout.slice_numel());
  }
  ASSERT_EQ(covered, layout.parameter_numel());
  for (int parameter = 0; parameter < layout.num_parameters(); ++parameter) {
    std::int64_t next = 0;
    for (const Piece& piece : table.of_parameter(parameter)) {
      ASSERT_EQ(piece.parameter, parameter);
      ASSERT_EQ(piece.parameter_begin, next);
      const std::int64_t flat = piece.slice * layout.slice_numel() + piece.slice_begin;
      ASSERT_EQ(flat, layout.offset_of(parameter) + next);
      next += piece.numel;
    }
    ASSERT_EQ(next, layout.numel_of(parameter));
    for (std::int64_t i = 0; i < layout.numel_of(parameter); ++i) {
      ASSERT_EQ(owner[static_cast<std::size_t>(layout.offset_of(parameter) + i)],
                Owner(parameter, i));
    }
  }
}

FlatLayout random_layout(std::mt19937& random) {
  const std::int64_t itemsize = std::int64_t{1} << std::uniform_int_distribution(0, 3)(random);
  const int num_slices = std::uniform_int_distribution(1, 40)(random);
  std::vector<std::int64_t> numels(std::uniform_int_distribution<std::size_t>(0, 10)(random));
  for (auto& numel : numels) {
    // Empty, scalar and larger parameters all occur often.
    const int kind = std::uniform_int_distribution(0, 3)(random);
    numel = kind < 2 ? kind : std::uniform_int_distribution(2, 700)(random);
  }
  return FlatLayout(numels, itemsize, num_slices);
}

TEST(PieceTable, RandomLayoutsAreCoveredOnceInBothDirections) {
  std::mt19937 random(2205);
  for (int round = 0; round < 3000; ++round) {
    expect_consistent(random_layout(random));
    if (HasFatalFailure()) FAIL() << "round " << round;
  }
}

TEST(PieceTable, RandomRangesAreClippedExactly) {
  std::mt19937 random(119);
  for (int round = 0; round < 3000; ++round) {
    const FlatLayout layout = random_layout(random);
    const PieceTable table(layout);
    for (int parameter = 0; parameter < layout.num_parameters(); ++parameter) {
      std::uniform_int_distribution<std::int64_t> pick(0, layout.numel_of(parameter));
      auto [begin, end] = std::minmax({pick(random), pick(random)});
      std::int64_t next = begin;
      for (const Piece& part : table.of_range(parameter, begin, end)) {
        ASSERT_GT(part.numel, 0);
        ASSERT_EQ(part.parameter_begin, next);
        ASSERT_EQ(part.slice * layout.slice_numel() + part.slice_begin,
                  layout.offset_of(parameter) + next);
        next += part.numel;
        // And back: the same range of the slice is this part alone.
        ASSERT_EQ(table.of_slice_range(part.slice, part.slice_begin, part.slice_begin + part.numel),
                  Pieces{part});
      }
      ASSERT_EQ(next, end);
    }
    const int slice = std::uniform_int_distribution(0, layout.num_slices() - 1)(random);
    std::uniform_int_distribution<std::int64_t> pick(0, layout.slice_numel());
    auto [begin, end] = std::minmax({pick(random), pick(random)});
    std::int64_t found = 0;
    for (const Piece& part : table.of_slice_range(slice, begin, end)) {
      ASSERT_GE(part.slice_begin, begin);
      ASSERT_LE(part.slice_begin + part.numel, end);
      found += part.numel;
    }
    std::int64_t expected = 0;
    for (const Piece& piece : table.in_slice(slice)) {
      for (std::int64_t i = piece.slice_begin; i < piece.slice_begin + piece.numel; ++i) {
        expected += i >= begin && i < end ? 1 : 0;
      }
    }
    ASSERT_EQ(found, expected);
  }
}

TEST(PieceTable, ThousandsOfSlices) {
  expect_consistent(FlatLayout({50257 * 3, 768, 1, 0, 768 * 7}, 4, 4096));
  expect_consistent(FlatLayout({1, 1, 1}, 2, 4096));
}

TEST(PieceTable, BadArgumentsThrow) {
  const PieceTable table(FlatLayout({10, 0}, 4, 2));
  EXPECT_THROW(static_cast<void>(table.in_slice(2)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.in_slice(-1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.of_parameter(2)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.of_range(0, 0, 11)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.of_range(0, 5, 4)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.of_range(0, -1, 4)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.of_range(1, 0, 1)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(table.of_slice_range(0, -1, 4)), InvalidArgument);
  EXPECT_TRUE(table.of_range(0, 4, 4).empty());
}

}  // namespace
}  // namespace hopshard
