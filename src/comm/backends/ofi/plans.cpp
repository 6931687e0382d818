#include "plans.hpp"

#include <algorithm>
#include <map>

namespace hopshard::detail::ofi {
namespace {

constexpr std::size_t kMinChunkBytes = 64 * 1024;
constexpr std::size_t kMaxChunkBytes = 512 * 1024;
constexpr std::size_t kChunksPerSlice = 4;

constexpr std::size_t kDirectBytes = 32 * 1024;
constexpr int kDirectRanks = 64;

}  // namespace

bool is_direct(std::size_t slice_bytes, int size) {
  return slice_bytes <= kDirectBytes && size <= kDirectRanks;
}

std::vector<Slice> slot_slices(const Group& group, std::size_t numel) {
  std::vector<Slice> slices;
  for (int member = 0; member < group.size(); ++member) {
    slices.push_back({static_cast<std::size_t>(group.slot_of(member)) * numel, numel});
  }
  return slices;
}

std::vector<Slice> even_slices(int size, std::size_t numel) {
  const auto parts = static_cast<std::size_t>(size);
  std::vector<Slice> slices;
  std::size_t begin = 0;
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t count = numel / parts + (part < numel % parts ? 1 : 0);
    slices.push_back({begin, count});
    begin += count;
  }
  return slices;
}

std::vector<Slice> chunks_of(const Slice& slice, std::size_t chunk_numel) {
  std::vector<Slice> chunks;
  for (std::size_t done = 0; done < slice.count; done += chunk_numel) {
    chunks.push_back({slice.begin + done, std::min(chunk_numel, slice.count - done)});
  }
  return chunks;
}

std::size_t chunk_numel(std::size_t slice_numel, std::size_t element_bytes, std::size_t num_rails) {
  const std::size_t wanted = slice_numel * element_bytes / (kChunksPerSlice * num_rails);
  const std::size_t bytes = std::clamp(wanted, kMinChunkBytes, kMaxChunkBytes);
  // Whole cache lines, so that no two chunks share one.
  return bytes / 64 * 64 / element_bytes;
}

std::vector<int> peers_after(int member, int size) {
  std::vector<int> peers;
  for (int step = 1; step < size; ++step) {
    peers.push_back((member + step) % size);
  }
  return peers;
}

TreePlace binomial_tree(int member, int root, int size) {
  // With the root as 0, a member's parent is it without its lowest set bit.
  const int place = (member - root + size) % size;
  TreePlace result;
  int bit = 1;
  while (bit < size && (place & bit) == 0) {
    bit *= 2;
  }
  if (place != 0) {
    result.parent = (place - bit + root) % size;
  }
  for (bit /= 2; bit > 0; bit /= 2) {
    if (place + bit < size) {
      result.children.push_back((place + bit + root) % size);
    }
  }
  return result;
}

TreePlace chain(int member, int root, int size) {
  const int place = (member - root + size) % size;
  TreePlace result;
  if (place != 0) {
    result.parent = (member + size - 1) % size;
  }
  if (place != size - 1) {
    result.children.push_back((member + 1) % size);
  }
  return result;
}

ReduceAlgorithm choose_reduce_algorithm(const std::vector<std::string>& nodes,
                                        std::size_t wire_ratio) {
  std::map<std::string, std::size_t> ranks_on;
  for (const std::string& node : nodes) {
    ++ranks_on[node];
  }
  const std::size_t size = nodes.size();
  // In slices. Direct: each of the k ranks of a node sends one to each of the others outside. Ring:
  // each boundary between neighbours on different nodes carries size - 1 of them.
  std::size_t direct = 0;
  for (const auto& [node, ranks] : ranks_on) {
    direct = std::max(direct, ranks * (size - ranks));
  }
  std::map<std::string, std::size_t> boundaries_of;
  for (std::size_t member = 0; member < size; ++member) {
    if (nodes[member] != nodes[(member + 1) % size]) {
      ++boundaries_of[nodes[member]];
    }
  }
  std::size_t ring = 0;
  for (const auto& [node, boundaries] : boundaries_of) {
    ring = std::max(ring, boundaries * (size - 1) * wire_ratio);
  }
  // On one node nothing crosses: the direct way needs fewer steps and sums in the ranks' order.
  return direct <= ring || ranks_on.size() == 1 ? ReduceAlgorithm::kDirect : ReduceAlgorithm::kRing;
}

}  // namespace hopshard::detail::ofi
