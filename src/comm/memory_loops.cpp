// Picks the version of the loops for this CPU. The pragmas give each inclusion of the loops its
// instructions; no header may be included below them, or the linker could pick a copy of one of
// its functions that this CPU cannot run.
#include "memory_loops.hpp"

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hopshard::detail {
namespace {

namespace baseline {
#include "memory_loops_body.hpp"
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
namespace avx2 {
#include "memory_loops_body.hpp"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#include "memory_loops_body.hpp"
}  // namespace avx512
#pragma GCC pop_options
#endif

InstructionSet detect() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kBaseline;
}

/// Streaming stores are ordered with nothing; whoever is told that the data is there must see it.
void end_streaming() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

InstructionSet best_instruction_set() noexcept {
  static const InstructionSet kBest = detect();
  return kBest;
}

std::string_view to_string(InstructionSet set) noexcept {
  switch (set) {
    case InstructionSet::kBaseline:
      return "baseline";
    case InstructionSet::kAvx2:
      return "AVX2";
    case InstructionSet::kAvx512:
      return "AVX-512";
  }
  return "";
}

StoreMode store_mode_for(std::size_t num_bytes) noexcept {
  constexpr std::size_t kStreamingBytes = std::size_t{1} << 20;
  return num_bytes >= kStreamingBytes ? StoreMode::kStreaming : StoreMode::kCached;
}

void copy_memory(void* to, const void* from, std::size_t num_bytes, StoreMode mode,
                 [[maybe_unused]] InstructionSet set) noexcept {
  if (num_bytes == 0) {
    return;  // Empty tensors have null pointers, which memcpy may not be given.
  }
  if (mode == StoreMode::kCached) {
    std::memcpy(to, from, num_bytes);
    return;
  }
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) {
    avx512::copy_streaming(target, source, num_bytes);
  } else if (set == InstructionSet::kAvx2) {
    avx2::copy_streaming(target, source, num_bytes);
  } else {
    baseline::copy_streaming(target, source, num_bytes);
  }
#else
  baseline::copy_streaming(target, source, num_bytes);
#endif
  end_streaming();
}

bool is_reducible(at::ScalarType dtype) noexcept {
  constexpr std::array kDtypes = {at::kByte, at::kChar,     at::kInt,   at::kLong,
                                  at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  return std::find(kDtypes.begin(), kDtypes.end(), dtype) != kDtypes.end();
}

void reduce_memory(void* out, const void* const* parts, std::size_t num_parts, std::int64_t numel,
                   const ReduceLoop& loop, [[maybe_unused]] InstructionSet set) noexcept {
  constexpr std::size_t kFewParts = 64;
  std::array<const char*, kFewParts> few;
  std::vector<const char*> many;
  const char** sources = few.data();
  if (num_parts > kFewParts) {
    many.resize(num_parts);
    sources = many.data();
  }
  for (std::size_t part = 0; part < num_parts; ++part) {
    sources[part] = static_cast<const char*>(parts[part]);
  }
  auto* target = static_cast<char*>(out);
  const auto count = static_cast<std::size_t>(numel);
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) {
    avx512::reduce(target, sources, num_parts, count, loop);
  } else if (set == InstructionSet::kAvx2) {
    avx2::reduce(target, sources, num_parts, count, loop);
  } else {
    baseline::reduce(target, sources, num_parts, count, loop);
  }
#else
  baseline::reduce(target, sources, num_parts, count, loop);
#endif
  if (loop.mode == StoreMode::kStreaming) {
    end_streaming();
  }
}

}  // namespace hopshard::detail
