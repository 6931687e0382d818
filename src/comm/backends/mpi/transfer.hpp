// Moves the bytes of one operation whose ranks have agreed on it. A Transfer never waits: the
// progress thread lets all of them advance in turn. Where the bytes lie is a range per member, so
// that gathers, scatters and the two halves of an all_reduce share the same code.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "mpi_check.hpp"

namespace hopshard::detail::mpi {

/// The members of a group as MPI sees them. Each receiver picks the tag of what is sent to it, so
/// that no two operations of a process share one, whatever their groups.
struct Peers {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  std::vector<int> mpi_ranks;  ///< By member: its rank in `comm`.
  std::vector<int> tags;       ///< By member: the tag of messages to it.

  [[nodiscard]] int size() const { return static_cast<int>(mpi_ranks.size()); }
};

/// A member's part of a buffer.
struct ByteRange {
  std::int64_t begin = 0;
  std::int64_t bytes = 0;
};

/// MPI requests in flight, with a number of the caller's for each.
class Requests {
 public:
  explicit Requests(const Peers& peers) : peers_(peers) {}

  void send(int member, const char* data, std::int64_t bytes, std::int64_t number);
  void receive(int member, char* data, std::int64_t bytes, std::int64_t number);

  struct Completed {
    bool is_receive;
    std::int64_t number;
  };
  /// Those that completed since the last call.
  const std::vector<Completed>& poll();

  [[nodiscard]] bool empty() const { return requests_.empty(); }
  [[nodiscard]] bool has_receives() const;
  [[nodiscard]] int num_sends() const { return num_sends_; }
  /// The members that a request still waits for, in order.
  [[nodiscard]] std::vector<int> members() const;
  /// Asks MPI to give up all receives; those whose data is on its way complete all the same.
  void cancel_receives();

 private:
  struct Entry {
    int member;
    bool is_receive;
    std::int64_t number;
  };

  const Peers& peers_;
  std::vector<MPI_Request> requests_;
  std::vector<Entry> entries_;
  std::vector<int> indices_;
  std::vector<Completed> completed_;
  int num_sends_ = 0;
};

class Transfer {
 public:
  explicit Transfer(const Peers& peers) : peers_(peers), requests_(peers) {}
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Goes as far as it can without waiting; true if anything moved. @throws CommError
  virtual bool advance() = 0;
  [[nodiscard]] virtual bool is_done() const = 0;

  /// What is in flight, to give it up or to say whose data is missing.
  [[nodiscard]] virtual Requests& requests() { return requests_; }

 protected:
  const Peers& peers_;
  Requests requests_;
};
using TransferPtr = std::unique_ptr<Transfer>;

/// How to reduce.
struct Reduction {
  at::ScalarType dtype = at::kFloat;
  ReduceOp op = ReduceOp::kSum;
  bool accumulate = false;
};

/// Every member's range of `data` to every other member. On one host all exchange directly, which
/// is one copy each; over several, chunks go round a ring in the order of the members, so that each
/// crosses a link between nodes once.
[[nodiscard]] TransferPtr make_gather(const Peers& peers, char* data, std::vector<ByteRange> ranges,
                                      bool spans_hosts);

/// Reduces all members' data; member i gets range i of the result, at `out`. The pieces of the
/// peers come directly and are reduced in the order of the members, which is the arithmetic of
/// `local`. Scratch memory: 2 MiB per peer.
[[nodiscard]] TransferPtr make_reduce_scatter(const Peers& peers, const char* data,
                                              std::vector<ByteRange> ranges, char* out,
                                              const Reduction& reduction);

/// reduce_scatter in place, then gather.
[[nodiscard]] TransferPtr make_all_reduce(const Peers& peers, char* data,
                                          std::vector<ByteRange> ranges, const Reduction& reduction,
                                          bool spans_hosts);

/// On one host from the root to all; over several, along a chain in the order of the members.
[[nodiscard]] TransferPtr make_broadcast(const Peers& peers, char* data, std::int64_t bytes,
                                         int root, bool spans_hosts);

}  // namespace hopshard::detail::mpi
