#include "hopshard/comm/group.hpp"

#include <algorithm>

#include "hopshard/core/error.hpp"

namespace hopshard {

bool Group::has_identity_slots() const {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] != static_cast<int>(i)) {
      return false;
    }
  }
  return true;
}

void Group::validate() const {
  HOPSHARD_CHECK(!ranks.empty(), InvalidArgument, "group '", name, "' has no ranks");
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  HOPSHARD_CHECK(sorted.front() >= 0, InvalidArgument, "group '", name,
                 "' holds the negative rank ", sorted.front());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  HOPSHARD_CHECK(twice == sorted.end(), InvalidArgument, "group '", name, "' holds rank ", *twice,
                 " twice");
  HOPSHARD_CHECK(rank >= 0 && rank < size(), InvalidArgument, "group '", name, "': rank ", rank,
                 " is my index among its ", size(), " members, so it must be in 0..", size() - 1);
  if (slots.empty()) {
    return;
  }
  HOPSHARD_CHECK(slots.size() == ranks.size(), InvalidArgument, "group '", name, "' has ",
                 ranks.size(), " ranks but ", slots.size(),
                 " slots: give one slot per rank, or none for the order of the ranks");
  std::vector<bool> taken(slots.size(), false);
  for (const int slot : slots) {
    const bool free = slot >= 0 && slot < size() && !taken[static_cast<std::size_t>(slot)];
    HOPSHARD_CHECK(free, InvalidArgument, "group '", name, "': slot ", slot,
                   " is out of range or taken twice; slots must be a permutation of 0..",
                   size() - 1);
    taken[static_cast<std::size_t>(slot)] = true;
  }
}

}  // namespace hopshard
