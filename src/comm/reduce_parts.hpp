// Sums and maxima of several buffers in a fixed order; the arithmetic that `local`, `c10d` and
// `recording` share, so that their results are bit-equal.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "hopshard/comm/communicator.hpp"

namespace hopshard::detail {

/// out[i] = parts[0][i] op parts[1][i] op ... from left to right; bf16 and fp16 in fp32, rounded
/// once. `out` may be one of the parts. Integer sums wrap; a maximum with NaN is NaN. CPU memory.
/// With `accumulate`, out[i] = out[i] op (the result above), rounded once as well.
void reduce_parts(void* out, const std::vector<const void*>& parts, std::int64_t numel,
                  at::ScalarType dtype, ReduceOp op, bool accumulate = false);

/// The same for tensors on any device, all contiguous, of one dtype and numel.
void reduce_tensors(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op,
                    bool accumulate = false);

/// The device path of reduce_tensors, callable on CPU tensors so that both can be compared.
void reduce_with_aten(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op,
                      bool accumulate = false);

}  // namespace hopshard::detail
