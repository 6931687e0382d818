#include "hopshard/runtime/placeholder.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {

at::Tensor make_placeholder(const at::Tensor& like, const std::string& message) {
  std::int64_t extent = like.numel() == 0 ? 0 : 1;
  for (std::int64_t dim = 0; dim < like.dim() && extent > 0; ++dim) {
    extent += (like.size(dim) - 1) * like.stride(dim);
  }
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), like.element_size(), c10::GetCPUAllocator(),
      /*resizable=*/false);
  at::Tensor placeholder = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  placeholder.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  // The true size, so that size checks pass and the access itself is what fails, with our text.
  storage->set_nbytes(static_cast<std::size_t>(extent * like.element_size()));
  return placeholder;
}

namespace {

// All bits set: NaN in every float format, and memory that stands out in the integer ones.
int make_nan_file(std::size_t chunk_bytes) {
  const int file = memfd_create("hopshard-detached", MFD_CLOEXEC);
  HOPSHARD_CHECK(file >= 0, Error, "memfd_create failed: ", std::strerror(errno));
  const std::vector<char> ones(chunk_bytes, static_cast<char>(0xFF));
  std::size_t written = 0;
  while (written < chunk_bytes) {
    const ssize_t count = write(file, ones.data() + written, chunk_bytes - written);
    HOPSHARD_CHECK(count > 0, Error, "writing ", chunk_bytes,
                   " bytes of memory failed: ", std::strerror(errno));
    written += static_cast<std::size_t>(count);
  }
  return file;
}

// One file is mapped again and again. The number of mappings of a process is limited (65,530),
// so the file grows with what it must cover.
constexpr std::size_t kMinChunkBytes = std::size_t{2} << 20;
constexpr std::size_t kMaxMappings = 512;

void* map_nans(std::size_t nbytes) {
  std::size_t chunk_bytes = kMinChunkBytes;
  while (nbytes / chunk_bytes > kMaxMappings) {
    chunk_bytes *= 2;
  }
  const std::size_t total = (nbytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes;
  void* const base =
      mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  HOPSHARD_CHECK(base != MAP_FAILED, Error, "reserving ", total,
                 " bytes of addresses failed: ", std::strerror(errno));
  const int file = make_nan_file(chunk_bytes);
  for (std::size_t offset = 0; offset < total; offset += chunk_bytes) {
    void* const mapped = mmap(static_cast<char*>(base) + offset, chunk_bytes, PROT_READ,
                              MAP_SHARED | MAP_FIXED, file, 0);
    HOPSHARD_CHECK(mapped != MAP_FAILED, Error, "mapping failed: ", std::strerror(errno));
  }
  close(file);
  return base;
}

}  // namespace

void* detached_memory(std::int64_t nbytes) {
  static std::mutex mutex;
  static void* memory = nullptr;
  static std::size_t size = 0;
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(nbytes, 1));
  const std::lock_guard lock(mutex);
  if (wanted > size) {  // The old mapping stays: other buffers point at it.
    memory = map_nans(wanted);
    size = wanted;
  }
  return memory;
}

}  // namespace hopshard
