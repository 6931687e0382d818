// What a parameter points at while its unit is sharded, and what a flat buffer's storage points
// at while it has no memory (D3). Next: flat_buffer.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace hopshard {

/// A tensor with `like`'s shape, strides, dtype and device, and no memory.
///
/// Shape, numel, strides and dtype can be read; every read or write of an element throws `message`
/// through torch (a RuntimeError in Python). The text can not be taken back: one placeholder
/// belongs to one parameter.
[[nodiscard]] at::Tensor make_placeholder(const at::Tensor& like, const std::string& message);

/// Read-only memory of at least `nbytes` in which every float is NaN.
///
/// A flat buffer's storage points here while it is detached, never at null: a stale view that a
/// backward saved then yields NaN, which the check on the parameter's gradient reports by name,
/// where a null pointer would end the process. Shared by all buffers, never freed, backed by a
/// few MiB however long the mapping. Threads: any.
[[nodiscard]] void* detached_memory(std::int64_t nbytes);

}  // namespace hopshard
