#include "hopshard/runtime/buffer_pool.hpp"

#include <algorithm>
#include <cstdlib>

#include "hopshard/core/error.hpp"

namespace hopshard {

namespace {
constexpr std::int64_t kBlockAlignmentBytes = 128;
}

BufferPool::~BufferPool() { trim(); }

PoolBlock BufferPool::take(std::int64_t nbytes) {
  HOPSHARD_CHECK(nbytes >= 0, InvalidArgument, "a block of ", nbytes, " bytes was asked for");
  const std::int64_t rounded =
      std::max<std::int64_t>(1, (nbytes + kBlockAlignmentBytes - 1) / kBlockAlignmentBytes) *
      kBlockAlignmentBytes;
  PoolBlock block{.data = nullptr, .nbytes = rounded};
  if (const auto found = idle_.find(rounded); found != idle_.end() && !found->second.empty()) {
    block.data = found->second.back();
    found->second.pop_back();
    idle_bytes_ -= rounded;
  } else {
    block.data = std::aligned_alloc(static_cast<std::size_t>(kBlockAlignmentBytes),
                                    static_cast<std::size_t>(rounded));
    HOPSHARD_CHECK(block.data != nullptr, Error, "out of memory: a buffer of ", rounded,
                   " bytes is needed beside ", taken_bytes_ + idle_bytes_,
                   " bytes held; use a smaller unit or a larger sharded_data_parallel_degree");
    ++num_allocations_;
  }
  taken_bytes_ += rounded;
  peak_bytes_ = std::max(peak_bytes_, taken_bytes_ + idle_bytes_);
  return block;
}

void BufferPool::give_back(PoolBlock block) {
  if (block.data == nullptr) {
    return;
  }
  idle_[block.nbytes].push_back(block.data);
  taken_bytes_ -= block.nbytes;
  idle_bytes_ += block.nbytes;
}

void BufferPool::trim() {
  for (auto& [nbytes, blocks] : idle_) {
    for (void* data : blocks) {
      std::free(data);
    }
  }
  idle_.clear();
  idle_bytes_ = 0;
}

}  // namespace hopshard
