// Ordinary memory for buffers that travel. Next: communicator.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace hopshard {

/// Zero-filled CPU memory (uint8) [num_bytes], aligned to a page.
/// @throws InvalidArgument  negative; Error: out of memory.
[[nodiscard]] at::Tensor allocate_memory(std::int64_t num_bytes);

/// So that a use that comes too early or too late shows: every float type reads NaN.
void fill_with_nan(void* memory, std::int64_t num_bytes);

}  // namespace hopshard
