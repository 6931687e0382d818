// The engine's memory: what allocate() gives out, what is registered, and scratch blocks.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "engine.hpp"
#include "group_state.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "operation.hpp"

namespace hopshard::detail::ofi {
namespace {

constexpr std::size_t kMaxPooledScratchBytes = std::size_t{512} << 20;
constexpr std::size_t kMinScratchBytes = std::size_t{64} << 10;
constexpr std::size_t kPageBytes = 4096;

void free_memory(void* memory) { std::free(memory); }

std::byte* allocate_pages(std::size_t num_bytes) {
  const std::size_t rounded =
      std::max<std::size_t>((num_bytes + kPageBytes - 1) / kPageBytes, 1) * kPageBytes;
  void* memory = std::aligned_alloc(kPageBytes, rounded);
  HOPSHARD_CHECK(memory != nullptr, Error, "ofi: out of memory: ", rounded, " bytes are needed");
  return static_cast<std::byte*>(memory);
}

}  // namespace

/// Blocks of a power of two that are free, by size. Used by the progress thread only.
struct Engine::ScratchPool {
  std::map<std::size_t, std::vector<ScratchBlock>> free_blocks;
  std::size_t num_bytes = 0;

  ~ScratchPool() {
    for (auto& [size, blocks] : free_blocks) {
      for (ScratchBlock& block : blocks) {
        destroy(std::move(block));
      }
    }
  }

  static void destroy(ScratchBlock block) {
    block.registrations.reset();
    free_memory(block.data);
  }

  void give_back(ScratchBlock block) {
    if (num_bytes + block.num_bytes > kMaxPooledScratchBytes) {
      destroy(std::move(block));
      return;
    }
    num_bytes += block.num_bytes;
    free_blocks[block.num_bytes].push_back(std::move(block));
  }
};

std::shared_ptr<Engine::ScratchPool> Engine::make_pool() { return std::make_shared<ScratchPool>(); }

std::shared_ptr<void> Engine::allocate(std::size_t num_bytes) {
  std::byte* data = allocate_pages(num_bytes);
  std::memset(data, 0, num_bytes);
  remember_memory(data, num_bytes);
  // The last view may go on any thread, and after the engine.
  return {data, [alive = alive_](void* memory) {
            const std::lock_guard lock(alive->mutex);
            if (alive->engine == nullptr) {
              free_memory(memory);
            } else {
              alive->engine->release_memory(memory);
            }
          }};
}

void Engine::remember_memory(const void* data, std::size_t num_bytes) {
  if (num_bytes == 0) {
    return;
  }
  post([this, data, num_bytes] {
    Remembered& entry = remembered_[reinterpret_cast<std::uintptr_t>(data)];
    ++entry.num_uses;
    if (entry.num_bytes >= num_bytes) {
      return;
    }
    entry.num_bytes = num_bytes;
    try {
      entry.registrations = register_now(data, num_bytes);
    } catch (const CommError& error) {
      // Only a hint: operations register what they need.
      HOPSHARD_LOG(kWarning, "memory stays unregistered: ", error.what());
    }
  });
}

void Engine::forget_memory(const void* data, std::size_t num_bytes) {
  if (num_bytes == 0) {
    return;
  }
  post([this, data] {
    const auto entry = remembered_.find(reinterpret_cast<std::uintptr_t>(data));
    if (entry != remembered_.end() && --entry->second.num_uses == 0) {
      remembered_.erase(entry);
    }
  });
}

void Engine::release_memory(void* memory) {
  post([this, memory] {
    remembered_.erase(reinterpret_cast<std::uintptr_t>(memory));
    free_memory(memory);
  });
}

Registrations Engine::register_now(const void* data, std::size_t num_bytes) {
  auto result = std::make_shared<std::vector<Registration>>();
  for (const auto& rail : rails_) {
    result->push_back(rail->register_memory(data, num_bytes));
  }
  return result;
}

Registrations Engine::registrations_of(const void* data, std::size_t num_bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  auto entry = remembered_.upper_bound(begin);
  if (entry != remembered_.begin()) {
    --entry;
    if (entry->second.registrations &&
        begin + num_bytes <= entry->first + entry->second.num_bytes) {
      return entry->second.registrations;
    }
  }
  return register_now(data, num_bytes);
}

Scratch Engine::scratch(std::size_t num_bytes) {
  const std::size_t rounded = std::bit_ceil(std::max(num_bytes, kMinScratchBytes));
  ScratchBlock block;
  auto& blocks = pool_->free_blocks[rounded];
  if (!blocks.empty()) {
    block = std::move(blocks.back());
    blocks.pop_back();
    pool_->num_bytes -= rounded;
  } else {
    block.data = allocate_pages(rounded);
    block.num_bytes = rounded;
    try {
      block.registrations = register_now(block.data, rounded);
    } catch (...) {
      free_memory(block.data);
      throw;
    }
  }
  return {new ScratchBlock(std::move(block)), [pool = pool_](const ScratchBlock* used) {
            pool->give_back(*used);
            delete used;
          }};
}

}  // namespace hopshard::detail::ofi
