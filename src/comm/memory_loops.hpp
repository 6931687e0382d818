// Loops over plain memory for backends that move CPU data themselves: copies that bypass the cache
// and sums of several buffers in one pass. Versions for AVX-512, AVX2 and any CPU, picked at run
// time; all give the same bits. What a sum means is defined in reduce_parts.hpp.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "hopshard/comm/communicator.hpp"

namespace hopshard::detail {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

/// The best that this CPU and this build have.
[[nodiscard]] InstructionSet best_instruction_set() noexcept;
[[nodiscard]] std::string_view to_string(InstructionSet set) noexcept;

/// How results are written: through the cache, or past it. Past it saves reading the old contents
/// of the destination, and pays if nobody reads the result before it would be evicted anyway.
enum class StoreMode { kCached, kStreaming };

/// Streaming for operations that write this much or more.
[[nodiscard]] StoreMode store_mode_for(std::size_t num_bytes) noexcept;

/// The two do not overlap. `set` is for tests.
void copy_memory(void* to, const void* from, std::size_t num_bytes, StoreMode mode,
                 InstructionSet set = best_instruction_set()) noexcept;

struct ReduceLoop {
  at::ScalarType dtype = at::ScalarType::Undefined;
  ReduceOp op = ReduceOp::kSum;
  bool accumulate = false;  ///< out = out op (the reduced parts)
  StoreMode mode = StoreMode::kCached;
};

/// out[i] = parts[0][i] op parts[1][i] op ..., as reduce_parts(). `out` may be one of the parts.
/// The dtype must be reducible: see is_reducible().
void reduce_memory(void* out, const void* const* parts, std::size_t num_parts, std::int64_t numel,
                   const ReduceLoop& loop, InstructionSet set = best_instruction_set()) noexcept;

[[nodiscard]] bool is_reducible(at::ScalarType dtype) noexcept;

}  // namespace hopshard::detail
