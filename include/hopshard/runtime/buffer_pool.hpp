// Memory for gathered units and flat gradients: blocks that are used again, so that a steady
// step allocates nothing and memory does not fragment (D3). Next: flat_buffer.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

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
  BufferPool() = default;
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
  std::map<std::int64_t, std::vector<void*>> idle_;  // By size.
  std::int64_t taken_bytes_ = 0;
  std::int64_t idle_bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
  std::int64_t num_allocations_ = 0;
};

}  // namespace hopshard
