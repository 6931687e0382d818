// Memory for gathered units and flat gradients: blocks that are used again, so that a steady
// step allocates nothing and memory does not fragment (D3). Next: flat_buffer.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "hopshard/comm/memory.hpp"

namespace hopshard {

/// A piece of the pool's memory. Plain handle: give it back to the pool that it came from.
struct PoolBlock {
  void* data = nullptr;
  std::int64_t nbytes = 0;
};

/// Hands out blocks by size and keeps those that come back.
///
/// Alignment: 128 bytes. Threads: one at a time; every rank has its own pool.
class BufferPool {
 public:
  /// Makes uint8 memory [num_bytes], aligned to 128 bytes.
  using Allocate = std::function<at::Tensor(std::int64_t num_bytes)>;

  /// @param allocate  e.g. Communicator::allocate, so that the transport reaches the blocks
  /// fastest.
  /// @param fills_with_nan  what comes back, so that whoever still uses it reads NaN; for tests.
  explicit BufferPool(Allocate allocate = allocate_memory, bool fills_with_nan = false)
      : allocate_(std::move(allocate)), fills_with_nan_(fills_with_nan) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// A block of exactly `nbytes`, contents undefined. @throws Error  out of memory.
  [[nodiscard]] PoolBlock take(std::int64_t nbytes);
  void give_back(PoolBlock block);
  /// Frees the blocks that nobody holds.
  void trim();

  [[nodiscard]] std::int64_t taken_bytes() const noexcept { return taken_bytes_; }
  [[nodiscard]] std::int64_t idle_bytes() const noexcept { return idle_bytes_; }
  /// Largest taken + idle so far.
  [[nodiscard]] std::int64_t peak_bytes() const noexcept { return peak_bytes_; }
  /// Allocations that reached the system; constant in a steady step.
  [[nodiscard]] std::int64_t num_allocations() const noexcept { return num_allocations_; }

 private:
  [[nodiscard]] at::Tensor allocate(std::int64_t num_bytes) const;

  Allocate allocate_;
  bool fills_with_nan_;
  std::map<std::int64_t, std::vector<void*>> idle_;  // By size.
  std::map<void*, at::Tensor> memory_;               // Of all blocks, by their address.
  std::int64_t taken_bytes_ = 0;
  std::int64_t idle_bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
  std::int64_t num_allocations_ = 0;
};

}  // namespace hopshard
