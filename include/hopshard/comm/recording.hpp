// The `recording` backend counts what a rank sends, on top of another communicator or of none.
// Without an inner one it stands for one rank of a world in which every rank holds the same data,
// so that a world of thousands can be tried in one process. Next: registry.hpp.
//
// [Note: bytes sent] A flat call is counted as a ring in the order of the group's ranks. A member
// sends only to the next one, so all its bytes go over one link: `inter_node` if the next member is
// on another node (node = global rank / ranks_per_node), else `intra_node`. With s = group size and
// b = bytes of the whole buffer (all_gather: the output, reduce_scatter: the input):
//   all_gather, reduce_scatter   (s - 1) * b / s
//   all_reduce                   2 * (s - 1) * b / s, rounded down
//   broadcast                    b, and 0 for the member in front of the root
//   barrier                      0
// A two-level call (Communicator::algorithm) is two of these: of b over the k members on the node,
// and of b / k over the N nodes; a broadcast crosses nodes on the root's rail only. How the inner
// backend really moves a ring's bytes does not matter.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/metrics/meter.hpp"

namespace hopshard {

/// One collective as this rank issued it.
struct RecordedCall {
  std::string op;     ///< "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier".
  std::string tag;    ///< As given, e.g. "unshard/h.3".
  std::string group;  ///< The group's whole name, e.g. "sharding[0-3]".
  std::int64_t numel = 0;  ///< Elements of the whole buffer.
  at::ScalarType dtype = at::ScalarType::Undefined;
};

/// The order in which one rank issued collectives, over all communicators that share the log.
///
/// Threads: all members may be called from any thread.
class CallLog {
 public:
  void append(RecordedCall call);
  [[nodiscard]] std::vector<RecordedCall> calls() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<RecordedCall> calls_;
};

/// Counts into `meter`, per call, under "comm/<group>/<op>/<kind>/": `calls`, `bytes` (of the whole
/// buffer), `sent_intra_node_bytes`, `sent_inter_node_bytes`; in all, "comm/sent_intra_node_bytes"
/// and "comm/sent_inter_node_bytes". <group> is the group's name before '[', <kind> the tag's text
/// before '/' ("untagged" if empty). Groups of one rank reach no backend and count nothing.
///
/// @param inner  moves the data; null: every rank is taken to hold this rank's data.
/// @param group  must equal the inner one's.
/// @param log    optional; gets every call in order.
/// @throws InvalidArgument
[[nodiscard]] CommunicatorPtr make_recording_communicator(CommunicatorPtr inner, Group group,
                                                          std::shared_ptr<Meter> meter,
                                                          int ranks_per_node,
                                                          std::shared_ptr<CallLog> log = nullptr);

/// Which calls to add up; an empty text means all.
struct CommFilter {
  std::string group;  ///< e.g. "sharding"
  std::string op;     ///< e.g. "all_gather"
  std::string kind;   ///< e.g. "unshard"
};

/// Sum of one quantity (`calls`, `bytes`, `sent_intra_node_bytes`, …) over the calls that match.
[[nodiscard]] std::int64_t comm_total(const Meter& meter, std::string_view quantity,
                                      const CommFilter& filter = {});

}  // namespace hopshard
