// What the ranks of a group tell each other beside NCCL, through the store: that one is there, has
// failed or has left, and, once something went wrong, what each of them issued. NCCL itself never
// says who is missing. Nothing here is on the path of a healthy operation. Next: nccl_group.hpp.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../../failure.hpp"
#include "hopshard/comm/group.hpp"
#include "hopshard/comm/store.hpp"

namespace hopshard::detail {

/// Why a group cannot be used any more.
struct NcclFailure {
  FailureKind kind = FailureKind::kComm;
  std::int64_t sequence = -1;  ///< Of the operation that timed out or differed; else -1.
  std::string cause;           ///< Names global ranks.
};

/// What one rank has done so far.
struct Progress {
  std::int64_t num_issued = 0;
  std::map<std::int64_t, std::string> calls;  ///< The latest ones, by sequence.
};

/// The end of one rank's patience.
struct GivenUp {
  std::int64_t sequence = 0;
  int member = 0;  ///< Who waited, as a rank of the group.
  std::chrono::milliseconds limit{0};
};

/// Threads: all members may be called from any thread. A store that fails counts as one that has no
/// news: it often ends first at the end of a program.
class Peers {
 public:
  Peers(StorePtr store, Group group);

  void say_here() noexcept;
  [[nodiscard]] std::vector<int> global_ranks_not_here() noexcept;

  /// False as long as nobody failed or left; one look-up.
  [[nodiscard]] bool have_news() noexcept;

  /// The first of a group counts.
  void report(const NcclFailure& failure) noexcept;
  void report(const GivenUp& given_up) noexcept;
  [[nodiscard]] std::optional<NcclFailure> failure() noexcept;
  [[nodiscard]] std::optional<GivenUp> given_up() noexcept;

  /// For a peer that diagnoses.
  void publish(const Progress& progress) noexcept;
  void leave(const Progress& progress) noexcept;
  /// The first member that left after fewer than `num_needed` operations, as a global rank.
  [[nodiscard]] std::optional<int> left_before(std::int64_t num_needed) noexcept;

  /// Publishes this rank's progress, waits at most `grace` for the others', and says what is wrong
  /// with the operation: it differs, or who is missing. All ranks come to the same words, but for
  /// peers that answer only some of them in time.
  [[nodiscard]] NcclFailure diagnose(const GivenUp& given_up, const Progress& progress,
                                     std::chrono::milliseconds grace) noexcept;

  void publish_call(std::int64_t sequence, const std::string& call) noexcept;
  /// Nothing until all have published theirs; then an empty text if they agree.
  [[nodiscard]] std::optional<std::string> compare_calls(std::int64_t sequence) noexcept;

 private:
  void set(const std::string& key, const std::string& value) noexcept;
  [[nodiscard]] std::optional<std::string> find(const std::string& key) noexcept;
  [[nodiscard]] std::optional<Progress> progress_of(int member) noexcept;

  StorePtr store_;
  const Group group_;
};

}  // namespace hopshard::detail
