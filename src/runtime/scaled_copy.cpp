#include "runtime/scaled_copy.hpp"

#include <ATen/ops/mul.h>

#include <cstdint>

#include "core/vector_path.hpp"
#include "hopshard/runtime/flat_buffer.hpp"

namespace hopshard {
namespace {

HOPSHARD_LOOP void scale_bf16(float* __restrict to, const std::uint16_t* __restrict from,
                              std::int64_t numel, float scale) {
  for (std::int64_t i = 0; i < numel; ++i) {
    to[i] = __builtin_bit_cast(float, std::uint32_t{from[i]} << 16U) * scale;
  }
}

#if HOPSHARD_HAS_AVX2_PATH
HOPSHARD_AVX2 void scale_bf16_avx2(float* to, const std::uint16_t* from, std::int64_t numel,
                                   float scale) {
  scale_bf16(to, from, numel, scale);
}
#endif

void scale_bf16_on_any_cpu(float* to, const std::uint16_t* from, std::int64_t numel, float scale) {
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    scale_bf16_avx2(to, from, numel, scale);
    return;
  }
#endif
  scale_bf16(to, from, numel, scale);
}

}  // namespace

void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  if (from.scalar_type() == to.scalar_type()) {
    at::Tensor output = to;
    at::mul_out(output, from, at::Scalar(scale));
  } else if (from.scalar_type() == at::kBFloat16 && to.scalar_type() == at::kFloat &&
             from.strides() == to.strides() && is_dense(from)) {
    scale_bf16_on_any_cpu(to.mutable_data_ptr<float>(),
                          static_cast<const std::uint16_t*>(from.const_data_ptr()), to.numel(),
                          static_cast<float>(scale));
  } else {
    // Two passes, and none in the precision of `from`.
    const_cast<at::Tensor&>(to).copy_(from).mul_(scale);
  }
}

}  // namespace hopshard
