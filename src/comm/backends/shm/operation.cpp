// What each rank does, with s ranks and a whole buffer of S bytes:
//
//   all_gather      copies the s - 1 other parts into its output                 reads S, writes S
//   reduce_scatter  adds its slot of all inputs, in one pass                     reads S, writes
//   S/s all_reduce      adds its share of all tensors and writes it to all tensors   reads S,
//   writes S broadcast       copies the root's tensor                                     reads S,
//   writes S
//
// All_reduce needs no second phase: nobody else reads or writes a rank's share. Inline everyone
// adds everything, because S is small.
#include "operation.hpp"

#include <algorithm>
#include <cstring>

#include "../../memory_loops.hpp"
#include "hopshard/core/error.hpp"
#include "peers.hpp"

namespace hopshard::detail::shm {
namespace {

/// Sums stay in the first-level cache until they are written to all ranks.
constexpr std::size_t kDirectBlockBytes = std::size_t{16} << 10;
/// One call to the kernel for this much; the blocks of all peers stay in the second-level cache.
constexpr std::size_t kRemoteBlockBytes = std::size_t{128} << 10;

bool any_remote(const std::vector<PeerBuffer>& peers) {
  return std::any_of(peers.begin(), peers.end(),
                     [](const PeerBuffer& peer) { return peer.data == nullptr; });
}

void copy(char* to, const char* from, std::size_t num_bytes, StoreMode mode) {
  if (to != from) {
    copy_memory(to, from, num_bytes, mode);
  }
}

void fetch(char* to, const PeerBuffer& from, std::size_t num_bytes, StoreMode mode) {
  if (from.data != nullptr) {
    copy(to, from.data, num_bytes, mode);
  } else {
    read_process_memory(from.pid, to, from.address, num_bytes);
  }
}

void all_gather(const Operation& operation, const Group& group,
                const std::vector<PeerBuffer>& peers) {
  const int size = group.size();
  const StoreMode mode = store_mode_for(operation.part_bytes * static_cast<std::size_t>(size));
  // Each rank starts with another peer, so that not all read the same memory at once.
  for (int step = 0; step < size; ++step) {
    const int member = (group.rank + step) % size;
    char* const to = operation.output_data +
                     static_cast<std::size_t>(group.slot_of(member)) * operation.part_stride;
    if (member == group.rank) {
      copy(to, operation.input_data, operation.part_bytes, mode);
    } else {
      fetch(to, peers[static_cast<std::size_t>(member)], operation.part_bytes, mode);
    }
  }
}

/// Reduces [offset, offset + num_bytes) of all peers into blocks, and gives each block to `take`.
template <typename Take>
void reduce_blocks(const std::vector<PeerBuffer>& peers, std::size_t offset, std::size_t num_bytes,
                   Take take) {
  const bool remote = any_remote(peers);
  const std::size_t most = remote ? kRemoteBlockBytes : kDirectBlockBytes;
  thread_local std::vector<char> scratch;
  const std::size_t buffers = remote ? peers.size() + 1 : 1;
  scratch.resize(buffers * most + kLineBytes);
  const auto misplaced = reinterpret_cast<std::uintptr_t>(scratch.data()) % kLineBytes;
  char* const buffer = scratch.data() + (kLineBytes - misplaced) % kLineBytes;
  std::vector<const void*> parts(peers.size());
  for (std::size_t begin = 0; begin < num_bytes; begin += most) {
    const std::size_t count = std::min(most, num_bytes - begin);
    for (std::size_t member = 0; member < peers.size(); ++member) {
      const PeerBuffer& peer = peers[member];
      if (peer.data != nullptr) {
        parts[member] = peer.data + offset + begin;
      } else {
        char* const fetched = buffer + (member + 1) * most;
        read_process_memory(peer.pid, fetched, peer.address + offset + begin, count);
        parts[member] = fetched;
      }
    }
    take(buffer, parts, begin, count);
  }
}

ReduceLoop loop_of(const Operation& operation, StoreMode mode) {
  return {.dtype = operation.dtype(),
          .op = operation.reduce_op(),
          .accumulate = operation.accumulate,
          .mode = mode};
}

void reduce_scatter(const Operation& operation, const Group& group,
                    const std::vector<PeerBuffer>& peers) {
  const auto slot = static_cast<std::size_t>(group.my_slot());
  std::vector<PeerBuffer> mine = peers;
  for (PeerBuffer& peer : mine) {
    if (peer.data != nullptr) {
      peer.data += slot * peer.slot_stride;
    } else {
      peer.address += slot * peer.slot_stride;
    }
  }
  const ReduceLoop loop = loop_of(operation, store_mode_for(operation.part_bytes));
  const auto reduce = [&](std::size_t begin, const void* const* parts, std::size_t num_bytes) {
    reduce_memory(operation.output_data + begin, parts, peers.size(),
                  static_cast<std::int64_t>(num_bytes / operation.element_bytes), loop);
  };
  if (any_remote(mine)) {
    reduce_blocks(mine, 0, operation.part_bytes,
                  [&](char*, const std::vector<const void*>& parts, std::size_t begin,
                      std::size_t count) { reduce(begin, parts.data(), count); });
    return;
  }
  std::vector<const void*> parts;
  parts.reserve(mine.size());
  for (const PeerBuffer& peer : mine) {
    parts.push_back(peer.data);
  }
  reduce(0, parts.data(), operation.part_bytes);
}

void all_reduce_inline(const Operation& operation, const std::vector<PeerBuffer>& peers) {
  constexpr std::size_t kFewPeers = 16;
  std::array<const void*, kFewPeers> few;
  std::vector<const void*> many;
  const void** parts = few.data();
  if (peers.size() > kFewPeers) {
    many.resize(peers.size());
    parts = many.data();
  }
  for (std::size_t member = 0; member < peers.size(); ++member) {
    parts[member] = peers[member].data;
  }
  reduce_memory(operation.output_data, parts, peers.size(),
                static_cast<std::int64_t>(operation.part_bytes / operation.element_bytes),
                loop_of(operation, StoreMode::kCached));
}

void all_reduce(const Operation& operation, const Group& group,
                const std::vector<PeerBuffer>& peers) {
  // Shares are whole cache lines, so that no two ranks write to one line.
  const auto size = static_cast<std::size_t>(group.size());
  const std::size_t lines = (operation.part_bytes + kLineBytes - 1) / kLineBytes;
  const std::size_t share = (lines + size - 1) / size * kLineBytes;
  const std::size_t first =
      std::min(static_cast<std::size_t>(group.rank) * share, operation.part_bytes);
  const std::size_t count = std::min(share, operation.part_bytes - first);
  const ReduceLoop loop = loop_of(operation, StoreMode::kCached);
  reduce_blocks(peers, first, count,
                [&](char* sums, const std::vector<const void*>& parts, std::size_t begin,
                    std::size_t num_bytes) {
                  reduce_memory(sums, parts.data(), parts.size(),
                                static_cast<std::int64_t>(num_bytes / operation.element_bytes),
                                loop);
                  for (const PeerBuffer& peer : peers) {
                    if (peer.data != nullptr) {
                      copy_memory(peer.data + first + begin, sums, num_bytes, StoreMode::kCached);
                    } else {
                      write_process_memory(peer.pid, peer.address + first + begin, sums, num_bytes);
                    }
                  }
                });
}

}  // namespace

std::size_t Operation::shown_bytes(const Group& group) const {
  switch (record.kind) {
    case Kind::kReduceScatter:
      return part_bytes * static_cast<std::size_t>(group.size());
    case Kind::kBroadcast:
      return is_root(group.rank) ? part_bytes : 0;
    default:
      return part_bytes;
  }
}

std::size_t Operation::span_bytes(const Group& group) const {
  return record.kind == Kind::kReduceScatter && part_bytes > 0
             ? part_stride * static_cast<std::size_t>(group.size() - 1) + part_bytes
             : shown_bytes(group);
}

void show_inline(const Operation& operation, const Group& group, char* to) {
  const std::size_t num_bytes = operation.shown_bytes(group);
  if (num_bytes == 0) {
    return;
  }
  if (operation.record.kind != Kind::kReduceScatter) {
    std::memcpy(to, operation.shown_data(), num_bytes);
    return;
  }
  for (std::size_t slot = 0; slot < static_cast<std::size_t>(group.size()); ++slot) {
    std::memcpy(to + slot * operation.part_bytes,
                operation.input_data + slot * operation.part_stride, operation.part_bytes);
  }
}

void move_data(const Operation& operation, const Group& group,
               const std::vector<PeerBuffer>& peers) {
  if (operation.part_bytes == 0) {
    return;
  }
  switch (operation.record.kind) {
    case Kind::kAllGather:
      return all_gather(operation, group, peers);
    case Kind::kReduceScatter:
      return reduce_scatter(operation, group, peers);
    case Kind::kAllReduce:
      if (operation.is_inline) {
        return all_reduce_inline(operation, peers);
      }
      return all_reduce(operation, group, peers);
    case Kind::kBroadcast:
      if (!operation.is_root(group.rank)) {
        fetch(operation.output_data, peers[static_cast<std::size_t>(operation.record.root)],
              operation.part_bytes, store_mode_for(operation.part_bytes));
      }
      return;
    case Kind::kBarrier:
      return;
  }
}

}  // namespace hopshard::detail::shm
