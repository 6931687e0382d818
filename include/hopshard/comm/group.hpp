// A Group says which ranks take part in a collective, who I am among them, and where each
// rank's chunk lies in a gathered buffer. Plain data, no transport. Next: communicator.hpp.
#pragma once

#include <string>
#include <vector>

namespace hopshard {

/// Ranks that communicate, in node-contiguous order.
///
/// `slots` decouples who talks to whom from where data lands: rank `i` of the group owns chunk
/// `slots[i]` of a gathered buffer. A sharding group over several nodes has slots in slice order
/// (D2) while its ranks stay node-contiguous, so a ring crosses each node boundary only once.
struct Group {
  std::string name;        ///< Shown in errors and traces, e.g. "sharding[0-3]".
  std::vector<int> ranks;  ///< Global ranks of the members.
  int rank = 0;            ///< My index in `ranks`.
  std::vector<int> slots;  ///< Empty: identity. Otherwise a permutation of 0..size-1.

  [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks.size()); }
  [[nodiscard]] int global_rank() const { return ranks[static_cast<std::size_t>(rank)]; }
  /// The chunk of a gathered buffer that belongs to group rank `member`.
  [[nodiscard]] int slot_of(int member) const {
    return slots.empty() ? member : slots[static_cast<std::size_t>(member)];
  }
  [[nodiscard]] int my_slot() const { return slot_of(rank); }
  [[nodiscard]] bool has_identity_slots() const;

  /// @throws InvalidArgument  empty, duplicate ranks, `rank` out of range, or slots no permutation.
  void validate() const;
};

}  // namespace hopshard
