#include "reduce_parts.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <c10/core/ScalarType.h>

#include "hopshard/core/error.hpp"
#include "memory_loops.hpp"

namespace hopshard::detail {
void reduce_parts(void* out, const std::vector<const void*>& parts, std::int64_t numel,
                  at::ScalarType dtype, ReduceOp op, bool accumulate) {
  HOPSHARD_CHECK(is_reducible(dtype), InvalidArgument, "tensors of dtype ", dtype,
                 " cannot be reduced");
  const auto num_bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  reduce_memory(
      out, parts.data(), parts.size(), numel,
      {.dtype = dtype, .op = op, .accumulate = accumulate, .mode = store_mode_for(num_bytes)});
}

void reduce_with_aten(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op,
                      bool accumulate) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = out.scalar_type();
  const bool half_type = dtype == at::kBFloat16 || dtype == at::kHalf;
  const at::ScalarType accumulator = half_type ? at::kFloat : dtype;
  at::Tensor result = parts.front().to(accumulator, /*non_blocking=*/false, /*copy=*/true);
  const auto add = [&](const at::Tensor& next) {
    if (op == ReduceOp::kSum) {
      result.add_(next.to(accumulator));
    } else {
      result = at::maximum(result, next.to(accumulator));
    }
  };
  for (std::size_t part = 1; part < parts.size(); ++part) {
    add(parts[part]);
  }
  if (accumulate) {
    add(out);
  }
  out.copy_(result);
}

void reduce_tensors(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op,
                    bool accumulate) {
  if (!out.device().is_cpu()) {
    reduce_with_aten(out, parts, op, accumulate);
    return;
  }
  std::vector<const void*> pointers;
  pointers.reserve(parts.size());
  for (const at::Tensor& part : parts) {
    pointers.push_back(part.const_data_ptr());
  }
  reduce_parts(out.mutable_data_ptr(), pointers, out.numel(), out.scalar_type(), op, accumulate);
}

}  // namespace hopshard::detail
