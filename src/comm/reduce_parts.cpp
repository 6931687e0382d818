#include "reduce_parts.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "hopshard/core/error.hpp"

namespace hopshard::detail {
namespace {

template <typename T>
inline constexpr bool kIsHalfType = std::is_same_v<T, at::BFloat16> || std::is_same_v<T, at::Half>;

template <typename T>
using Accumulator = std::conditional_t<kIsHalfType<T>, float, T>;

template <typename A>
A combine(A left, A right, ReduceOp op) {
  if (op == ReduceOp::kMax) {
    if constexpr (std::is_floating_point_v<A>) {
      return left != left || left > right ? left : right;
    } else {
      return std::max(left, right);
    }
  }
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;  // Signed overflow is undefined, wrapping is not.
    return static_cast<A>(static_cast<U>(static_cast<U>(left) + static_cast<U>(right)));
  } else {
    return left + right;
  }
}

template <typename T, ReduceOp op>
void reduce_typed(T* out, const std::vector<const void*>& parts, std::int64_t numel,
                  bool accumulate) {
  // A block's sums stay in the first-level cache; writing after reading all parts of the block
  // allows `out` to be one of them.
  constexpr std::int64_t kBlock = 1024;
  std::array<Accumulator<T>, kBlock> sums;
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const auto count = static_cast<std::size_t>(std::min(kBlock, numel - begin));
    const T* first = static_cast<const T*>(parts.front()) + begin;
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<Accumulator<T>>(first[i]);
    }
    for (std::size_t part = 1; part < parts.size(); ++part) {
      const T* next = static_cast<const T*>(parts[part]) + begin;
      for (std::size_t i = 0; i < count; ++i) {
        sums[i] = combine(sums[i], static_cast<Accumulator<T>>(next[i]), op);
      }
    }
    if (accumulate) {
      for (std::size_t i = 0; i < count; ++i) {
        sums[i] = combine(static_cast<Accumulator<T>>(out[begin + static_cast<std::int64_t>(i)]),
                          sums[i], op);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      out[begin + static_cast<std::int64_t>(i)] = static_cast<T>(sums[i]);
    }
  }
}

template <typename T>
void reduce_as(void* out, const std::vector<const void*>& parts, std::int64_t numel, ReduceOp op,
               bool accumulate) {
  if (op == ReduceOp::kSum) {
    reduce_typed<T, ReduceOp::kSum>(static_cast<T*>(out), parts, numel, accumulate);
  } else {
    reduce_typed<T, ReduceOp::kMax>(static_cast<T*>(out), parts, numel, accumulate);
  }
}

}  // namespace

void reduce_parts(void* out, const std::vector<const void*>& parts, std::int64_t numel,
                  at::ScalarType dtype, ReduceOp op, bool accumulate) {
  switch (dtype) {
    case at::kByte:
      return reduce_as<std::uint8_t>(out, parts, numel, op, accumulate);
    case at::kChar:
      return reduce_as<std::int8_t>(out, parts, numel, op, accumulate);
    case at::kInt:
      return reduce_as<std::int32_t>(out, parts, numel, op, accumulate);
    case at::kLong:
      return reduce_as<std::int64_t>(out, parts, numel, op, accumulate);
    case at::kHalf:
      return reduce_as<at::Half>(out, parts, numel, op, accumulate);
    case at::kBFloat16:
      return reduce_as<at::BFloat16>(out, parts, numel, op, accumulate);
    case at::kFloat:
      return reduce_as<float>(out, parts, numel, op, accumulate);
    case at::kDouble:
      return reduce_as<double>(out, parts, numel, op, accumulate);
    default:
      throw InvalidArgument(concatenate("tensors of dtype ", dtype, " cannot be reduced"));
  }
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
