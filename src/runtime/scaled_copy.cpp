#include "runtime/scaled_copy.hpp"

#include <ATen/ops/mul.h>

#include <cstdint>

#include "core/vector_path.hpp"
#include "hopshard/runtime/flat_buffer.hpp"

namespace hopshard {
namespace {

// std::uint16_t stands for bf16.
HOPSHARD_LOOP void scale_loop(float* __restrict to, const std::uint16_t* __restrict from,
                              std::int64_t numel, float scale) {
  for (std::int64_t i = 0; i < numel; ++i) {
    to[i] = __builtin_bit_cast(float, std::uint32_t{from[i]} << 16U) * scale;
  }
}

HOPSHARD_LOOP void scale_loop(std::uint16_t* __restrict to, const float* __restrict from,
                              std::int64_t numel, float scale) {
  for (std::int64_t i = 0; i < numel; ++i) {
    to[i] = detail::to_bf16(from[i] * scale);
  }
}

#if HOPSHARD_HAS_AVX2_PATH
template <typename To, typename From>
HOPSHARD_AVX2 void scale_avx2(To* to, const From* from, std::int64_t numel, float scale) {
  scale_loop(to, from, numel, scale);
}
#endif

template <typename To, typename From>
void scale_on_any_cpu(To* to, const From* from, std::int64_t numel, float scale) {
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    scale_avx2(to, from, numel, scale);
    return;
  }
#endif
  scale_loop(to, from, numel, scale);
}

}  // namespace

void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  const bool is_one_order = from.strides() == to.strides() && is_dense(from);
  if (from.scalar_type() == to.scalar_type()) {
    at::Tensor output = to;
    at::mul_out(output, from, at::Scalar(scale));
  } else if (from.scalar_type() == at::kBFloat16 && to.scalar_type() == at::kFloat &&
             is_one_order) {
    scale_on_any_cpu(to.mutable_data_ptr<float>(),
                     static_cast<const std::uint16_t*>(from.const_data_ptr()), to.numel(),
                     static_cast<float>(scale));
  } else if (from.scalar_type() == at::kFloat && to.scalar_type() == at::kBFloat16 &&
             is_one_order) {
    scale_on_any_cpu(static_cast<std::uint16_t*>(to.mutable_data_ptr()),
                     from.const_data_ptr<float>(), to.numel(), static_cast<float>(scale));
  } else if (to.element_size() <= from.element_size()) {  // Rounded once, at the end.
    at::Tensor(to).copy_(from.to(c10::promoteTypes(from.scalar_type(), at::kFloat)).mul(scale));
  } else {
    // Two passes, and none in the precision of `from`.
    const_cast<at::Tensor&>(to).copy_(from).mul_(scale);
  }
}

}  // namespace hopshard
