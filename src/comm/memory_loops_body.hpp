// The loops of memory_loops.cpp, which includes this file once for each instruction set, inside a
// namespace and under the target options of that set; hence no include guard and no includes.
// Written with the compiler's vectors of 64 bytes, which it splits where registers are shorter:
// one source for all sets is what keeps their results equal.

inline constexpr std::size_t kVectorBytes = 64;

template <typename T>
struct VectorOf {
  using Type [[gnu::vector_size(64)]] = T;
};
template <typename T>
using Vector = typename VectorOf<T>::Type;

/// 16 half-precision values, what one vector of floats is made of.
using HalfVector [[gnu::vector_size(32)]] = std::uint16_t;
using Words = Vector<std::uint32_t>;
using Floats = Vector<float>;

[[gnu::always_inline]] inline void stream_vector(void* to, const void* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  auto* target = static_cast<__m256i*>(to);
  const auto* source = static_cast<const __m256i*>(from);
  _mm256_stream_si256(target, _mm256_loadu_si256(source));
  _mm256_stream_si256(target + 1, _mm256_loadu_si256(source + 1));
#elif defined(__SSE2__)
  auto* target = static_cast<__m128i*>(to);
  const auto* source = static_cast<const __m128i*>(from);
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
  }
#else
  std::memcpy(to, from, kVectorBytes);
#endif
}

/// What a dtype is in memory (Stored), is computed in (Computed), and how one becomes the other.
/// Integers are computed unsigned where they are added, because signed overflow is undefined.
template <typename T, ReduceOp op>
struct Plain {
  using Stored = T;
  using Computed = typename std::conditional_t<std::is_integral_v<T> && op == ReduceOp::kSum,
                                               std::make_unsigned<T>, std::type_identity<T>>::type;
  using Value = Vector<Computed>;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(T);

  [[gnu::always_inline]] static Value load(const char* from) {
    Value value;
    std::memcpy(&value, from, kVectorBytes);
    return value;
  }
  [[gnu::always_inline]] static Value pack(Value value) { return value; }
};

struct BFloat16s {
  using Stored = std::uint16_t;
  using Value = Floats;
  static constexpr std::size_t kLanes = 16;

  [[gnu::always_inline]] static Value load(const char* from) {
    HalfVector half;
    std::memcpy(&half, from, sizeof(half));
    return __builtin_bit_cast(Floats, __builtin_convertvector(half, Words) << 16);
  }
  /// Rounds to nearest, ties to even; every NaN becomes the same quiet one.
  [[gnu::always_inline]] static HalfVector pack(Value value) {
    const Words bits = __builtin_bit_cast(Words, value);
    const Words rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    const Words is_nan = __builtin_bit_cast(Words, value != value);
    return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7FC0U), HalfVector);
  }
};

struct Float16s {
  using Stored = std::uint16_t;
  using Value = Floats;
  static constexpr std::size_t kLanes = 16;

  [[gnu::always_inline]] static Value load(const char* from) {
    Value value;
#if defined(__AVX512F__)
    value = __builtin_bit_cast(Floats,
                               _mm512_cvtph_ps(_mm256_loadu_si256(
                                   static_cast<const __m256i*>(static_cast<const void*>(from)))));
#elif defined(__F16C__)
    const auto* half = static_cast<const __m128i*>(static_cast<const void*>(from));
    const std::array<__m256, 2> pair = {_mm256_cvtph_ps(_mm_loadu_si128(half)),
                                        _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
    value = __builtin_bit_cast(Floats, pair);
#else
    std::array<at::Half, kLanes> half;
    std::memcpy(half.data(), from, sizeof(half));
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      value[lane] = static_cast<float>(half[lane]);
    }
#endif
    return value;
  }
  /// Rounds to nearest, ties to even; every NaN becomes the same quiet one of its sign.
  [[gnu::always_inline]] static HalfVector pack(Value value) {
    HalfVector half;
#if defined(__AVX512F__)
    half = __builtin_bit_cast(HalfVector,
                              _mm512_cvtps_ph(__builtin_bit_cast(__m512, value),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    const auto pair = __builtin_bit_cast(std::array<__m256, 2>, value);
    const std::array<__m128i, 2> halves = {_mm256_cvtps_ph(pair[0], _MM_FROUND_TO_NEAREST_INT),
                                           _mm256_cvtps_ph(pair[1], _MM_FROUND_TO_NEAREST_INT)};
    half = __builtin_bit_cast(HalfVector, halves);
#else
    std::array<at::Half, kLanes> lanes;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = static_cast<at::Half>(value[lane]);
    }
    half = __builtin_bit_cast(HalfVector, lanes);
#endif
    const HalfVector is_nan = __builtin_bit_cast(HalfVector, (half & 0x7FFF) > 0x7C00);
    return (half & ~is_nan) | (is_nan & ((half & 0x8000) | 0x7E00));
  }
};

/// A maximum with NaN is NaN, the left one if both are.
template <ReduceOp op, typename Value>
[[gnu::always_inline]] inline Value combine(Value left, Value right) {
  if constexpr (op == ReduceOp::kSum) {
    return left + right;
  } else {
    return ((left != left) | (left > right)) ? left : right;
  }
}

template <typename Format, ReduceOp op, StoreMode mode, bool accumulate, std::size_t kUnroll>
inline void reduce_vectors(char* out, const char* const* parts, std::size_t num_parts,
                           std::size_t offset) {
  using Value = typename Format::Value;
  constexpr std::size_t kStep = Format::kLanes * sizeof(typename Format::Stored);
  std::array<Value, kUnroll> values;
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kUnroll; ++i) {
    values[i] = Format::load(parts[0] + offset + i * kStep);
  }
  for (std::size_t part = 1; part < num_parts; ++part) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kUnroll; ++i) {
      values[i] = combine<op>(values[i], Format::load(parts[part] + offset + i * kStep));
    }
  }
  std::array<decltype(Format::pack(values[0])), kUnroll> packed;
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kUnroll; ++i) {
    if constexpr (accumulate) {
      values[i] = combine<op>(Format::load(out + offset + i * kStep), values[i]);
    }
    packed[i] = Format::pack(values[i]);
  }
  static_assert(sizeof(packed) == kUnroll * kStep);
  if constexpr (mode == StoreMode::kStreaming && sizeof(packed) % kVectorBytes == 0) {
    const char* from = static_cast<const char*>(static_cast<const void*>(packed.data()));
#pragma GCC unroll 8
    for (std::size_t i = 0; i < sizeof(packed); i += kVectorBytes) {
      stream_vector(out + offset + i, from + i);
    }
  } else {
    std::memcpy(out + offset, packed.data(), sizeof(packed));
  }
}

/// A few elements, fewer than a vector has lanes: through padded copies, by the same code.
template <typename Format, ReduceOp op, bool accumulate>
inline void reduce_rest(char* out, const char* const* parts, std::size_t num_parts,
                        std::size_t offset, std::size_t num_bytes) {
  using Value = typename Format::Value;
  constexpr std::size_t kStep = Format::kLanes * sizeof(typename Format::Stored);
  const auto load = [&](const char* from) {
    std::array<char, kStep> padded{};
    std::memcpy(padded.data(), from + offset, num_bytes);
    return Format::load(padded.data());
  };
  Value value = load(parts[0]);
  for (std::size_t part = 1; part < num_parts; ++part) {
    value = combine<op>(value, load(parts[part]));
  }
  if constexpr (accumulate) {
    value = combine<op>(load(out), value);
  }
  const auto packed = Format::pack(value);
  std::memcpy(out + offset, &packed, num_bytes);
}

template <typename Format, ReduceOp op, StoreMode mode, bool accumulate>
void reduce_loop(char* out, const char* const* parts, std::size_t num_parts,
                 std::size_t num_bytes) {
  constexpr std::size_t kStep = Format::kLanes * sizeof(typename Format::Stored);
  constexpr std::size_t kUnroll = 4;
  std::size_t offset = 0;
  if constexpr (mode == StoreMode::kStreaming) {
    const std::size_t ahead = (kVectorBytes - reinterpret_cast<std::uintptr_t>(out)) % kVectorBytes;
    const std::size_t head = std::min(ahead, num_bytes);
    for (; offset < head; offset += std::min(kStep, head - offset)) {
      reduce_rest<Format, op, accumulate>(out, parts, num_parts, offset,
                                          std::min(kStep, head - offset));
    }
  }
  for (; offset + kUnroll * kStep <= num_bytes; offset += kUnroll * kStep) {
    reduce_vectors<Format, op, mode, accumulate, kUnroll>(out, parts, num_parts, offset);
  }
  for (; offset + kStep <= num_bytes; offset += kStep) {
    reduce_vectors<Format, op, StoreMode::kCached, accumulate, 1>(out, parts, num_parts, offset);
  }
  if (offset < num_bytes) {
    reduce_rest<Format, op, accumulate>(out, parts, num_parts, offset, num_bytes - offset);
  }
}

template <typename Format, ReduceOp op>
void reduce_format(char* out, const char* const* parts, std::size_t num_parts,
                   std::size_t num_bytes, const ReduceLoop& loop) {
  // Streams need a destination that can be aligned by whole elements.
  const bool aligned = reinterpret_cast<std::uintptr_t>(out) % sizeof(typename Format::Stored) == 0;
  const bool streaming = loop.mode == StoreMode::kStreaming && aligned;
  if (loop.accumulate) {
    // The destination is read anyway.
    reduce_loop<Format, op, StoreMode::kCached, true>(out, parts, num_parts, num_bytes);
  } else if (streaming) {
    reduce_loop<Format, op, StoreMode::kStreaming, false>(out, parts, num_parts, num_bytes);
  } else {
    reduce_loop<Format, op, StoreMode::kCached, false>(out, parts, num_parts, num_bytes);
  }
}

template <ReduceOp op>
void reduce_dtype(char* out, const char* const* parts, std::size_t num_parts, std::size_t numel,
                  const ReduceLoop& loop) {
  switch (loop.dtype) {
    case at::kByte:
      return reduce_format<Plain<std::uint8_t, op>, op>(out, parts, num_parts, numel, loop);
    case at::kChar:
      return reduce_format<Plain<std::int8_t, op>, op>(out, parts, num_parts, numel, loop);
    case at::kInt:
      return reduce_format<Plain<std::int32_t, op>, op>(out, parts, num_parts, numel * 4, loop);
    case at::kLong:
      return reduce_format<Plain<std::int64_t, op>, op>(out, parts, num_parts, numel * 8, loop);
    case at::kHalf:
      return reduce_format<Float16s, op>(out, parts, num_parts, numel * 2, loop);
    case at::kBFloat16:
      return reduce_format<BFloat16s, op>(out, parts, num_parts, numel * 2, loop);
    case at::kFloat:
      return reduce_format<Plain<float, op>, op>(out, parts, num_parts, numel * 4, loop);
    case at::kDouble:
      return reduce_format<Plain<double, op>, op>(out, parts, num_parts, numel * 8, loop);
    default:
      return;
  }
}

void reduce(char* out, const char* const* parts, std::size_t num_parts, std::size_t numel,
            const ReduceLoop& loop) {
  if (loop.op == ReduceOp::kSum) {
    reduce_dtype<ReduceOp::kSum>(out, parts, num_parts, numel, loop);
  } else {
    reduce_dtype<ReduceOp::kMax>(out, parts, num_parts, numel, loop);
  }
}

void copy_streaming(char* to, const char* from, std::size_t num_bytes) {
  const std::size_t ahead = (kVectorBytes - reinterpret_cast<std::uintptr_t>(to)) % kVectorBytes;
  const std::size_t head = std::min(ahead, num_bytes);
  std::memcpy(to, from, head);
  std::size_t offset = head;
  for (; offset + 4 * kVectorBytes <= num_bytes; offset += 4 * kVectorBytes) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      stream_vector(to + offset + i * kVectorBytes, from + offset + i * kVectorBytes);
    }
  }
  std::memcpy(to + offset, from + offset, num_bytes - offset);
}
