// How ranks of a composite hear of a failure that none of their own waits is about. A rank that
// waits for a late one does not see that a third gave up: it shares no inner group with it. So who
// fails leaves word in a store, and who waits for long looks there. Ranks that issued different
// operations may wait in different inner groups, where nobody can compare them; here they do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "comm/failure.hpp"
#include "hopshard/comm/group.hpp"
#include "hopshard/comm/store.hpp"

namespace hopshard::detail {

/// The kind by the type of `error`; `before` + its text.
[[nodiscard]] Failure failure_of(const std::exception& error, const std::string& before);
/// For calls that come after the failure.
[[noreturn]] void throw_unusable(const Failure& failure, const std::string& call_text);

/// Costs nothing but a lock per operation while these end soon; then a few reads a second.
///
/// Threads: all members may be called from any thread.
class PeerWatch {
 public:
  /// @param kind        of communicator: several may use one store for one group.
  /// @param store       null: watches nothing.
  /// @param on_failure  called at most once, on the watch's own thread.
  PeerWatch(const Group& group, std::string_view kind, const StorePtr& store,
            std::function<void(const Failure&)> on_failure);
  ~PeerWatch();
  /// Ends the watching; waits for a callback that runs. Not for the callback itself to call.
  void stop();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// @param number       of the operation, counted alike on all ranks.
  /// @param description  what all ranks must issue alike.
  void begin(std::int64_t number, std::string description);
  void end(std::int64_t number);

  /// Tells the others, unless one of them told us or was faster.
  void tell(const Failure& failure);

  /// What another rank told, if any. Who is woken by an abort asks, because an abort carries a text
  /// but not which kind of error it is.
  [[nodiscard]] std::optional<Failure> heard() const;

 private:
  struct InFlight {
    std::string description;
    std::chrono::steady_clock::time_point begin;
  };

  void run();
  [[nodiscard]] std::optional<Failure> read_failure() const;
  std::optional<Failure> look(std::int64_t number, const std::string& description);
  std::optional<Failure> compare_with_next(std::int64_t number, const std::string& description);
  std::optional<std::string> description_of(int global_rank, std::int64_t number);

  const Group group_;
  const StorePtr store_;
  const std::function<void(const Failure&)> on_failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, InFlight> in_flight_;
  std::int64_t published_ = -1;  ///< Used by the thread only.
  bool idle_ = false;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace hopshard::detail
