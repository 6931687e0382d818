// Who sends which elements in which pieces, and by which algorithm. Pure arithmetic that all ranks
// do alike, so that nothing of it has to be agreed on by messages. Next: operations.cpp.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "hopshard/comm/group.hpp"

namespace hopshard::detail::ofi {

/// Streams up to this size travel inside a control message: no registration, no round trip.
inline constexpr std::size_t kEagerBytes = 4096;

/// An all-reduce of up to this size is gathered and summed by everybody: one latency, not two.
inline constexpr std::size_t kGatheredSumBytes = 16 * 1024;
/// ... in groups of up to this many ranks, because everybody sends to everybody.
inline constexpr int kGatheredSumRanks = 64;

/// Whether slices of this size go from everybody to everybody, which takes one step, instead of
/// round a ring, which takes a step for each rank but crosses each node boundary once.
[[nodiscard]] bool is_direct(std::size_t slice_bytes, int size);

/// A run of elements.
struct Slice {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// Member `i` owns the `numel` elements at its slot.
[[nodiscard]] std::vector<Slice> slot_slices(const Group& group, std::size_t numel);

/// `numel` elements divided among `size` members as evenly as possible, in order.
[[nodiscard]] std::vector<Slice> even_slices(int size, std::size_t numel);

/// A slice in pieces that are forwarded, or reduced, while the next one travels.
[[nodiscard]] std::vector<Slice> chunks_of(const Slice& slice, std::size_t chunk_numel);

/// Elements in a chunk if a slice has `slice_numel` of `element_bytes` each: small enough that a
/// ring of several steps is full soon and that every rail has its part, large enough that a chunk
/// costs little.
[[nodiscard]] std::size_t chunk_numel(std::size_t slice_numel, std::size_t element_bytes,
                                      std::size_t num_rails);

/// The members, beginning after `member`, in the order in which it sends to them, so that at any
/// time everybody receives from somebody else.
[[nodiscard]] std::vector<int> peers_after(int member, int size);

/// Receives from `parent` (-1: it is the root) and sends on to `children`.
struct TreePlace {
  int parent = -1;
  std::vector<int> children;
};
/// Logarithmic depth, for small messages.
[[nodiscard]] TreePlace binomial_tree(int member, int root, int size);
/// One child each: every node boundary is crossed once. For large messages, in chunks.
[[nodiscard]] TreePlace chain(int member, int root, int size);

enum class ReduceAlgorithm {
  kDirect,  ///< Everybody sends each owner its slice, which sums in the order of the ranks.
  kRing,    ///< Partial sums travel from rank to rank; bf16 and fp16 as fp32.
};

/// The one that sends fewer bytes over the busiest node's link. `nodes` are the members' nodes;
/// `wire_ratio` is the size of a partial sum's element by that of the tensor's, 1 or 2.
[[nodiscard]] ReduceAlgorithm choose_reduce_algorithm(const std::vector<std::string>& nodes,
                                                      std::size_t wire_ratio);

}  // namespace hopshard::detail::ofi
