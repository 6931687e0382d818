#include "hopshard/runtime/buffer_pool.hpp"

#include <algorithm>

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
    const at::Tensor memory = allocate(rounded);
    block.data = memory.mutable_data_ptr();
    memory_.emplace(block.data, memory);
    ++num_allocations_;
  }
  taken_bytes_ += rounded;
  peak_bytes_ = std::max(peak_bytes_, taken_bytes_ + idle_bytes_);
  return block;
}

at::Tensor BufferPool::allocate(std::int64_t num_bytes) const {
  const auto more = [&] {
    return detail::concatenate("a buffer of ", num_bytes, " bytes is needed beside ",
                               taken_bytes_ + idle_bytes_,
                               " bytes held; use a smaller unit or a larger "
                               "sharded_data_parallel_degree");
  };
  try {
    return allocate_(num_bytes);
  } catch (const Error& error) {
    throw Error(detail::concatenate(error.what(), "; ", more()));
  }
}

void BufferPool::give_back(PoolBlock block) {
  if (block.data == nullptr) {
    return;
  }
  if (fills_with_nan_) {
    fill_with_nan(block.data, block.nbytes);
  }
  idle_[block.nbytes].push_back(block.data);
  taken_bytes_ -= block.nbytes;
  idle_bytes_ += block.nbytes;
}

void BufferPool::trim() {
  for (auto& [nbytes, blocks] : idle_) {
    for (void* data : blocks) {
      memory_.erase(data);
    }
  }
  idle_.clear();
  idle_bytes_ = 0;
}

}  // namespace hopshard
