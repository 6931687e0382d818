// Gradients on their way into a flat buffer: cast and scaled in one pass over memory. A steady step
// allocates nothing, so neither do these for fp32, bf16 and fp16 in one order.
#pragma once

#include <ATen/core/Tensor.h>

namespace hopshard {

/// to = from * scale, in the precision of `to`. Any strides.
/// @param to    any floating dtype.
/// @param from  same shape; one pass where it lies in the same order as `to`, which gradients do.
void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale);

/// to += from * scale.
void add_scaled(const at::Tensor& to, const at::Tensor& from, double scale);

}  // namespace hopshard
