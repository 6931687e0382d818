#include "hopshard/comm/memory.hpp"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "hopshard/core/error.hpp"

namespace hopshard {

at::Tensor allocate_memory(std::int64_t num_bytes) {
  HOPSHARD_CHECK(num_bytes >= 0, InvalidArgument, "memory of ", num_bytes, " bytes was asked for");
  constexpr std::size_t kAlignment = 4096;
  const std::size_t num_pages =
      std::max<std::size_t>((static_cast<std::size_t>(num_bytes) + kAlignment - 1) / kAlignment, 1);
  void* data = std::aligned_alloc(kAlignment, num_pages * kAlignment);
  HOPSHARD_CHECK(data != nullptr, Error, "out of memory: ", num_bytes, " bytes are not to be had");
  std::memset(data, 0, num_pages * kAlignment);
  return at::from_blob(
      data, {num_bytes}, [](void* memory) { std::free(memory); },
      at::TensorOptions().dtype(at::kByte));
}

void fill_with_nan(void* memory, std::int64_t num_bytes) {
  if (num_bytes > 0) {
    std::memset(memory, 0xff, static_cast<std::size_t>(num_bytes));
  }
}

}  // namespace hopshard
