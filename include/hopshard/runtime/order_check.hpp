// Did all ranks issue the same collectives? Units of equal size could be mixed up without any
// error from the transport, so each rank hashes what it issued and the ranks compare before an
// optimizer state is written. Next: shard_engine.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/core/hash.hpp"
#include "hopshard/runtime/schedule.hpp"

namespace hopshard {

/// The collectives of one rank since the last agreement.
class OrderCheck {
 public:
  void record(Action action);
  [[nodiscard]] std::int64_t hash() const noexcept { return hash_.signed_value(); }
  void clear();

  /// Collective over `world`, after hashes differed: finds the first difference.
  /// @throws ScheduleError  always; names what which ranks issued.
  [[noreturn]] void explain(Communicator& world, const std::vector<std::string>& unit_names) const;

 private:
  std::vector<Action> issued_;  // Bounded: only the first ones are needed to find a difference.
  Fnv1a hash_;
};

}  // namespace hopshard
