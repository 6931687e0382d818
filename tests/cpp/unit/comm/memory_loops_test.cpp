#include "comm/memory_loops.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

namespace hopshard::detail {
namespace {

constexpr std::size_t kNumParts = 3;

std::vector<InstructionSet> available_sets() {
  std::vector<InstructionSet> sets;
  for (const auto set :
       {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (set <= best_instruction_set()) {
      sets.push_back(set);
    }
  }
  return sets;
}

/// Any bits at all, so that halves and floats hold infinities, denormals and, if wanted, NaN.
std::vector<char> random_bytes(std::size_t count, std::uint32_t seed) {
  std::vector<char> bytes(count);
  std::uint32_t state = seed * 2654435761U + 1;
  for (char& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

TEST(MemoryLoops, AllInstructionSetsGiveTheSameBits) {
  constexpr std::array kDtypes = {at::kByte, at::kChar,     at::kInt,   at::kLong,
                                  at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  for (const at::ScalarType dtype : kDtypes) {
    ASSERT_TRUE(is_reducible(dtype));
    for (const std::int64_t numel : {0, 1, 7, 64, 1000}) {
      for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
        const std::size_t element = c10::elementSize(dtype);
        const std::size_t bytes = static_cast<std::size_t>(numel) * element;
        const std::size_t offset = shift * element;
        std::array<std::vector<char>, kNumParts> memory;
        std::array<const void*, kNumParts> parts{};
        for (std::size_t part = 0; part < kNumParts; ++part) {
          memory[part] = random_bytes(bytes + offset, static_cast<std::uint32_t>(part) + 1);
          // Which of two different NaN a sum keeps is the processor's affair: one is enough.
          if (part > 0 && c10::isFloatingType(dtype)) {
            for (std::size_t i = offset + element - 1; i < memory[part].size(); i += element) {
              memory[part][i] &= 0x3F;
            }
          }
          parts[part] = memory[part].data() + offset;
        }
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          for (const bool accumulate : {false, true}) {
            for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming}) {
              std::vector<char> first;
              for (const InstructionSet set : available_sets()) {
                std::vector<char> out(bytes + offset + 8, 1);
                reduce_memory(out.data() + offset, parts.data(), kNumParts, numel,
                              {.dtype = dtype, .op = op, .accumulate = accumulate, .mode = mode},
                              set);
                EXPECT_TRUE(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(offset + bytes),
                                        out.end(), [](char byte) { return byte == 1; }))
                    << "wrote beyond its end";
                if (first.empty()) {
                  first = out;
                }
                EXPECT_EQ(std::memcmp(first.data(), out.data(), out.size()), 0)
                    << dtype << ' ' << to_string(set) << ' ' << numel << " elements";
              }
            }
          }
        }
      }
    }
  }
}

TEST(MemoryLoops, CopyWholeAndNothingElse) {
  for (const InstructionSet set : available_sets()) {
    for (const std::size_t bytes : {0U, 1U, 63U, 64U, 65U, 1000U, 5000U}) {
      for (const std::size_t shift : {0U, 3U}) {
        for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming}) {
          const std::vector<char> from = random_bytes(bytes, 5);
          std::vector<char> to(bytes + shift + 64, 77);
          copy_memory(to.data() + shift, from.data(), bytes, mode, set);
          EXPECT_TRUE(std::equal(from.begin(), from.end(),
                                 to.begin() + static_cast<std::ptrdiff_t>(shift)));
          EXPECT_TRUE(std::all_of(to.begin() + static_cast<std::ptrdiff_t>(shift + bytes), to.end(),
                                  [](char byte) { return byte == 77; }));
          EXPECT_TRUE(std::all_of(to.begin(), to.begin() + static_cast<std::ptrdiff_t>(shift),
                                  [](char byte) { return byte == 77; }));
        }
      }
    }
  }
}

TEST(MemoryLoops, HalfPrecisionRoundsOnceToNearestEven) {
  // 1 + 2^-8 lies halfway between two bf16; 257/256 rounds down to the even 1, 259/256 up.
  for (const InstructionSet set : available_sets()) {
    const std::array<std::uint16_t, 2> ones = {0x3F80, 0x3F81};   // 1, 1 + 2^-7
    const std::array<std::uint16_t, 2> small = {0x3B80, 0x3B80};  // 2^-8
    const std::array<const void*, 2> parts = {ones.data(), small.data()};
    std::array<std::uint16_t, 2> out{};
    reduce_memory(out.data(), parts.data(), parts.size(), 2, {.dtype = at::kBFloat16}, set);
    EXPECT_EQ(out[0], 0x3F80) << to_string(set);
    EXPECT_EQ(out[1], 0x3F82) << to_string(set);
  }
}

}  // namespace
}  // namespace hopshard::detail
