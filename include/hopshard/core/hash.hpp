// A hash that is the same in every process and build, unlike std::hash: ranks compare it. Not for
// security. Next: env.hpp.
#pragma once

#include <cstdint>

namespace hopshard {

/// FNV-1a over whole 64-bit values, in the order in which they are added.
class Fnv1a {
 public:
  void add(std::uint64_t value) noexcept { hash_ = (hash_ ^ value) * 1099511628211ULL; }
  [[nodiscard]] std::uint64_t value() const noexcept { return hash_; }
  /// Fits into 62 bits, so that it and its negative survive a max over int64.
  [[nodiscard]] std::int64_t signed_value() const noexcept {
    return static_cast<std::int64_t>(hash_ >> 2);
  }

 private:
  std::uint64_t hash_ = 14695981039346656037ULL;
};

}  // namespace hopshard
