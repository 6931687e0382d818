#include "runtime/scaled_copy.hpp"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "core/vector_path.hpp"
#include "hopshard/runtime/flat_buffer.hpp"

namespace hopshard {
namespace {

// std::uint16_t stands for bf16.
HOPSHARD_LOOP float load(float x) { return x; }
HOPSHARD_LOOP float load(std::uint16_t x) { return detail::from_bf16(x); }
HOPSHARD_LOOP float load(c10::Half x) { return static_cast<float>(x); }
HOPSHARD_LOOP void store(float& to, float x) { to = x; }
HOPSHARD_LOOP void store(std::uint16_t& to, float x) { to = detail::to_bf16(x); }
HOPSHARD_LOOP void store(c10::Half& to, float x) { to = c10::Half(x); }

enum class Into { kCopy, kSum };

template <Into kInto, typename To, typename From>
HOPSHARD_LOOP void scale_loop(To* __restrict to, const From* __restrict from, std::int64_t numel,
                              float scale) {
  for (std::int64_t i = 0; i < numel; ++i) {
    if constexpr (kInto == Into::kSum) {
      store(to[i], detail::fused_multiply_add(load(from[i]), scale, load(to[i])));
    } else {
      store(to[i], load(from[i]) * scale);
    }
  }
}

#if HOPSHARD_HAS_AVX2_PATH
template <Into kInto, typename To, typename From>
HOPSHARD_AVX2 void scale_avx2(To* to, const From* from, std::int64_t numel, float scale) {
  scale_loop<kInto>(to, from, numel, scale);
}
#endif

template <Into kInto, typename To, typename From>
void scale_on_any_cpu(To* to, const From* from, std::int64_t numel, float scale) {
#if HOPSHARD_HAS_AVX2_PATH
  if (detail::has_avx2()) {
    scale_avx2<kInto>(to, from, numel, scale);
    return;
  }
#endif
  scale_loop<kInto>(to, from, numel, scale);
}

template <Into kInto, typename To>
bool try_scale_into(To* to, const at::Tensor& from, float scale) {
  const void* const data = from.const_data_ptr();
  switch (from.scalar_type()) {
    case at::kFloat:
      scale_on_any_cpu<kInto>(to, static_cast<const float*>(data), from.numel(), scale);
      return true;
    case at::kBFloat16:
      scale_on_any_cpu<kInto>(to, static_cast<const std::uint16_t*>(data), from.numel(), scale);
      return true;
    case at::kHalf:
      scale_on_any_cpu<kInto>(to, static_cast<const c10::Half*>(data), from.numel(), scale);
      return true;
    default:
      return false;
  }
}

/// In one pass and without memory of its own, where both lie in one order; false where no loop is.
template <Into kInto>
bool try_scale(const at::Tensor& to, const at::Tensor& from, double scale) {
  if (from.strides() != to.strides() || !is_dense(from)) {
    return false;
  }
  void* const data = to.mutable_data_ptr();
  const auto factor = static_cast<float>(scale);
  switch (to.scalar_type()) {
    case at::kFloat:
      return try_scale_into<kInto>(static_cast<float*>(data), from, factor);
    case at::kBFloat16:
      return try_scale_into<kInto>(static_cast<std::uint16_t*>(data), from, factor);
    case at::kHalf:
      return try_scale_into<kInto>(static_cast<c10::Half*>(data), from, factor);
    default:
      return false;
  }
}

/// Torch's kernel, which uses all threads. It would make a tensor of a number on each call.
template <typename Number>
void scale_by_torch(const at::Tensor& to, const at::Tensor& from, double scale) {
  auto number = static_cast<Number>(scale);
  at::Tensor output = to;
  at::mul_out(output, from, at::from_blob(&number, {}, from.options()));
}

}  // namespace

void copy_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  at::Tensor output = to;
  if (to.scalar_type() == at::kFloat && from.scalar_type() == at::kFloat) {
    scale_by_torch<float>(to, from, scale);
  } else if (to.scalar_type() == at::kDouble && from.scalar_type() == at::kDouble) {
    scale_by_torch<double>(to, from, scale);
  } else if (try_scale<Into::kCopy>(to, from, scale)) {
    return;
  } else if (to.element_size() <= from.element_size()) {  // Rounded once, at the end.
    output.copy_(from.to(c10::promoteTypes(from.scalar_type(), at::kFloat)).mul(scale));
  } else {
    // Two passes, and none in the precision of `from`.
    output.copy_(from).mul_(scale);
  }
}

void add_scaled(const at::Tensor& to, const at::Tensor& from, double scale) {
  // Torch adds one dtype in place, but casts another one into memory of its own first.
  if (from.scalar_type() == to.scalar_type() || !try_scale<Into::kSum>(to, from, scale)) {
    at::Tensor(to).add_(from, scale);
  }
}

}  // namespace hopshard
