#include "transfer.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "../../reduce_parts.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::detail::mpi {
namespace {

// MPI counts are int, so 2^31 bytes and more go in several messages.
constexpr std::int64_t kMaxMessageBytes = std::int64_t{1} << 30;
// Large enough for full bandwidth, small enough for several to be under way and for the sums to
// find their parts in a cache. A multiple of every element size.
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;
constexpr std::int64_t kWindow = 2;  // Pieces in flight per peer that are received into scratch ...
constexpr std::int64_t kForwardWindow = 8;  // ... and that go straight into the buffer.

int as_count(std::int64_t bytes) {
  HOPSHARD_CHECK(bytes >= 0 && bytes <= std::numeric_limits<int>::max(), Error, "a message of ",
                 bytes, " bytes does not fit MPI's counts");
  return static_cast<int>(bytes);
}

std::int64_t num_pieces(std::int64_t bytes, std::int64_t piece_bytes) {
  return (bytes + piece_bytes - 1) / piece_bytes;
}

ByteRange piece_of(const ByteRange& range, std::int64_t index, std::int64_t piece_bytes) {
  const std::int64_t begin = index * piece_bytes;
  return {range.begin + begin, std::min(piece_bytes, range.bytes - begin)};
}

/// All messages at once, between any members.
class Exchange final : public Transfer {
 public:
  using Transfer::Transfer;

  void send(int member, const char* data, const ByteRange& range) {
    for (std::int64_t i = 0; i < num_pieces(range.bytes, kMaxMessageBytes); ++i) {
      const ByteRange piece = piece_of(range, i, kMaxMessageBytes);
      requests_.send(member, data + piece.begin, piece.bytes, 0);
    }
  }

  void receive(int member, char* data, const ByteRange& range) {
    for (std::int64_t i = 0; i < num_pieces(range.bytes, kMaxMessageBytes); ++i) {
      const ByteRange piece = piece_of(range, i, kMaxMessageBytes);
      requests_.receive(member, data + piece.begin, piece.bytes, 0);
    }
  }

  bool advance() override { return !requests_.poll().empty(); }
  [[nodiscard]] bool is_done() const override { return requests_.empty(); }
};

/// Sends pieces to one member and receives pieces from another; of those that it sends, the first
/// `num_own` are its own and the others are what it received, in order.
class Forward final : public Transfer {
 public:
  Forward(const Peers& peers, char* data, int from, std::vector<ByteRange> received, int to,
          std::vector<ByteRange> sent, std::int64_t num_own)
      : Transfer(peers),
        data_(data),
        from_(from),
        received_(std::move(received)),
        to_(to),
        sent_(std::move(sent)),
        num_own_(num_own),
        has_arrived_(received_.size(), false) {}

  bool advance() override {
    bool moved = false;
    for (const auto& [is_receive, number] : requests_.poll()) {
      moved = true;
      if (is_receive) {
        has_arrived_[static_cast<std::size_t>(number)] = true;
      }
    }
    while (num_arrived_ < size_of(received_) &&
           has_arrived_[static_cast<std::size_t>(num_arrived_)]) {
      ++num_arrived_;
    }
    for (; next_receive_ < size_of(received_) && next_receive_ < num_arrived_ + kForwardWindow;
         ++next_receive_) {
      const ByteRange& piece = received_[static_cast<std::size_t>(next_receive_)];
      requests_.receive(from_, data_ + piece.begin, piece.bytes, next_receive_);
      moved = true;
    }
    for (; next_send_ < size_of(sent_) && next_send_ < num_own_ + num_arrived_ &&
           requests_.num_sends() < kForwardWindow;
         ++next_send_) {
      const ByteRange& piece = sent_[static_cast<std::size_t>(next_send_)];
      requests_.send(to_, data_ + piece.begin, piece.bytes, next_send_);
      moved = true;
    }
    return moved;
  }

  [[nodiscard]] bool is_done() const override {
    return num_arrived_ == size_of(received_) && next_send_ == size_of(sent_) && requests_.empty();
  }

 private:
  static std::int64_t size_of(const std::vector<ByteRange>& pieces) {
    return static_cast<std::int64_t>(pieces.size());
  }

  char* data_;
  int from_;
  std::vector<ByteRange> received_;
  int to_;
  std::vector<ByteRange> sent_;
  std::int64_t num_own_;
  std::vector<bool> has_arrived_;
  std::int64_t num_arrived_ = 0;  ///< Without a gap from the first on.
  std::int64_t next_receive_ = 0;
  std::int64_t next_send_ = 0;
};

class ReduceScatter final : public Transfer {
 public:
  ReduceScatter(const Peers& peers, const char* data, std::vector<ByteRange> ranges, char* out,
                const Reduction& reduction)
      : Transfer(peers),
        data_(data),
        ranges_(std::move(ranges)),
        out_(out),
        reduction_(reduction),
        element_bytes_(static_cast<std::int64_t>(c10::elementSize(reduction.dtype))),
        num_mine_(num_pieces(mine().bytes, kPieceBytes)) {
    for (const ByteRange& range : ranges_) {
      num_sent_ = std::max(num_sent_, num_pieces(range.bytes, kPieceBytes));
    }
    const std::int64_t piece_bytes = std::min(kPieceBytes, mine().bytes);
    // Not zero-filled: every byte is received before it is read.
    scratch_.reset(new char[static_cast<std::size_t>(kWindow * num_peers() * piece_bytes)]);
    scratch_piece_bytes_ = piece_bytes;
  }

  bool advance() override {
    bool moved = false;
    for (const auto& [is_receive, number] : requests_.poll()) {
      moved = true;
      if (is_receive) {
        ++num_arrived_[number % kWindow];
      }
    }
    for (; next_send_ < num_sent_ && requests_.num_sends() <= (kWindow - 1) * num_peers();
         ++next_send_) {
      for (int distance = 1; distance < peers_.size(); ++distance) {
        const int to = (peers_.rank + distance) % peers_.size();
        const ByteRange& range = ranges_[static_cast<std::size_t>(to)];
        if (next_send_ < num_pieces(range.bytes, kPieceBytes)) {
          const ByteRange piece = piece_of(range, next_send_, kPieceBytes);
          requests_.send(to, data_ + piece.begin, piece.bytes, next_send_);
        }
      }
      moved = true;
    }
    while (next_receive_ < num_mine_ && next_receive_ < num_reduced_ + kWindow) {
      receive_next();
      moved = true;
    }
    while (num_reduced_ < num_mine_ && num_arrived_[num_reduced_ % kWindow] == num_peers()) {
      reduce_next();
      if (next_receive_ < num_mine_) {
        receive_next();
      }
      moved = true;
    }
    return moved;
  }

  [[nodiscard]] bool is_done() const override {
    return num_reduced_ == num_mine_ && next_send_ == num_sent_ && requests_.empty();
  }

 private:
  [[nodiscard]] const ByteRange& mine() const {
    return ranges_[static_cast<std::size_t>(peers_.rank)];
  }
  [[nodiscard]] std::int64_t num_peers() const { return peers_.size() - 1; }

  [[nodiscard]] char* scratch_of(std::int64_t piece, int member) const {
    const std::int64_t place = member < peers_.rank ? member : member - 1;
    return scratch_.get() + (piece % kWindow * num_peers() + place) * scratch_piece_bytes_;
  }

  void receive_next() {
    const std::int64_t bytes = piece_of(mine(), next_receive_, kPieceBytes).bytes;
    for (int distance = 1; distance < peers_.size(); ++distance) {
      const int from = (peers_.rank + peers_.size() - distance) % peers_.size();
      requests_.receive(from, scratch_of(next_receive_, from), bytes, next_receive_);
    }
    ++next_receive_;
  }

  void reduce_next() {
    const ByteRange piece = piece_of(mine(), num_reduced_, kPieceBytes);
    std::vector<const void*> parts;
    for (int member = 0; member < peers_.size(); ++member) {
      parts.push_back(member == peers_.rank ? data_ + piece.begin
                                            : scratch_of(num_reduced_, member));
    }
    reduce_parts(out_ + (piece.begin - mine().begin), parts, piece.bytes / element_bytes_,
                 reduction_.dtype, reduction_.op, reduction_.accumulate);
    num_arrived_[num_reduced_ % kWindow] = 0;
    ++num_reduced_;
  }

  const char* data_;
  std::vector<ByteRange> ranges_;
  char* out_;
  Reduction reduction_;
  std::int64_t element_bytes_;
  std::int64_t num_mine_;
  std::int64_t num_sent_ = 0;
  std::unique_ptr<char[]> scratch_;
  std::int64_t scratch_piece_bytes_ = 0;
  std::int64_t num_arrived_[kWindow] = {};  ///< By piece in flight: the peers that sent theirs.
  std::int64_t next_receive_ = 0;
  std::int64_t next_send_ = 0;
  std::int64_t num_reduced_ = 0;
};

class AllReduce final : public Transfer {
 public:
  AllReduce(const Peers& peers, char* data, std::vector<ByteRange> ranges,
            const Reduction& reduction, bool spans_hosts)
      : Transfer(peers), data_(data), ranges_(std::move(ranges)), spans_hosts_(spans_hosts) {
    char* out = data_ + ranges_[static_cast<std::size_t>(peers.rank)].begin;
    stage_ = make_reduce_scatter(peers, data_, ranges_, out, reduction);
  }

  bool advance() override {
    bool moved = stage_->advance();
    if (!is_gathering_ && stage_->is_done()) {
      // Not before all sends are through: the gather writes where they read.
      stage_ = make_gather(peers_, data_, std::move(ranges_), spans_hosts_);
      is_gathering_ = true;
      moved = true;
    }
    return moved;
  }

  [[nodiscard]] bool is_done() const override { return is_gathering_ && stage_->is_done(); }
  [[nodiscard]] Requests& requests() override { return stage_->requests(); }

 private:
  char* data_;
  std::vector<ByteRange> ranges_;
  bool spans_hosts_;
  TransferPtr stage_;
  bool is_gathering_ = false;
};

void append_pieces(std::vector<ByteRange>& pieces, const ByteRange& range) {
  for (std::int64_t i = 0; i < num_pieces(range.bytes, kPieceBytes); ++i) {
    pieces.push_back(piece_of(range, i, kPieceBytes));
  }
}

}  // namespace

void Requests::send(int member, const char* data, std::int64_t bytes, std::int64_t number) {
  const auto index = static_cast<std::size_t>(member);
  MPI_Request request = MPI_REQUEST_NULL;
  HOPSHARD_MPI(MPI_Isend, data, as_count(bytes), MPI_BYTE, peers_.mpi_ranks[index],
               peers_.tags[index], peers_.comm, &request);
  requests_.push_back(request);
  entries_.push_back({member, /*is_receive=*/false, number});
  ++num_sends_;
}

void Requests::receive(int member, char* data, std::int64_t bytes, std::int64_t number) {
  MPI_Request request = MPI_REQUEST_NULL;
  HOPSHARD_MPI(MPI_Irecv, data, as_count(bytes), MPI_BYTE,
               peers_.mpi_ranks[static_cast<std::size_t>(member)],
               peers_.tags[static_cast<std::size_t>(peers_.rank)], peers_.comm, &request);
  requests_.push_back(request);
  entries_.push_back({member, /*is_receive=*/true, number});
}

const std::vector<Requests::Completed>& Requests::poll() {
  completed_.clear();
  if (requests_.empty()) {
    return completed_;
  }
  indices_.resize(requests_.size());
  int count = 0;
  HOPSHARD_MPI(MPI_Testsome, static_cast<int>(requests_.size()), requests_.data(), &count,
               indices_.data(), MPI_STATUSES_IGNORE);
  if (count <= 0) {
    return completed_;
  }
  for (int i = 0; i < count; ++i) {
    const Entry& entry = entries_[static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)])];
    completed_.push_back({entry.is_receive, entry.number});
    num_sends_ -= entry.is_receive ? 0 : 1;
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] != MPI_REQUEST_NULL) {
      requests_[kept] = requests_[i];
      entries_[kept] = entries_[i];
      ++kept;
    }
  }
  requests_.resize(kept);
  entries_.resize(kept);
  return completed_;
}

bool Requests::has_receives() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.is_receive; });
}

std::vector<int> Requests::members() const {
  std::vector<int> members;
  for (const Entry& entry : entries_) {
    members.push_back(entry.member);
  }
  std::sort(members.begin(), members.end());
  members.erase(std::unique(members.begin(), members.end()), members.end());
  return members;
}

void Requests::cancel_receives() {
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (entries_[i].is_receive) {
      HOPSHARD_MPI(MPI_Cancel, &requests_[i]);
    }
  }
}

TransferPtr make_gather(const Peers& peers, char* data, std::vector<ByteRange> ranges,
                        bool spans_hosts) {
  const int size = peers.size();
  const auto range_of = [&](int member) -> const ByteRange& {
    return ranges[static_cast<std::size_t>((member + size) % size)];
  };
  if (!spans_hosts) {
    auto exchange = std::make_unique<Exchange>(peers);
    for (int distance = 1; distance < size; ++distance) {
      const int from = (peers.rank + size - distance) % size;
      exchange->receive(from, data, range_of(from));
    }
    for (int distance = 1; distance < size; ++distance) {
      exchange->send((peers.rank + distance) % size, data, range_of(peers.rank));
    }
    return exchange;
  }
  std::vector<ByteRange> received;
  std::vector<ByteRange> sent;
  append_pieces(sent, range_of(peers.rank));
  const auto num_own = static_cast<std::int64_t>(sent.size());
  for (int step = 1; step < size; ++step) {
    append_pieces(received, range_of(peers.rank - step));
    if (step + 1 < size) {
      append_pieces(sent, range_of(peers.rank - step));
    }
  }
  return std::make_unique<Forward>(peers, data, (peers.rank + size - 1) % size, std::move(received),
                                   (peers.rank + 1) % size, std::move(sent), num_own);
}

TransferPtr make_reduce_scatter(const Peers& peers, const char* data, std::vector<ByteRange> ranges,
                                char* out, const Reduction& reduction) {
  return std::make_unique<ReduceScatter>(peers, data, std::move(ranges), out, reduction);
}

TransferPtr make_all_reduce(const Peers& peers, char* data, std::vector<ByteRange> ranges,
                            const Reduction& reduction, bool spans_hosts) {
  return std::make_unique<AllReduce>(peers, data, std::move(ranges), reduction, spans_hosts);
}

TransferPtr make_broadcast(const Peers& peers, char* data, std::int64_t bytes, int root,
                           bool spans_hosts) {
  const int size = peers.size();
  const ByteRange whole{0, bytes};
  if (!spans_hosts) {
    auto exchange = std::make_unique<Exchange>(peers);
    if (peers.rank != root) {
      exchange->receive(root, data, whole);
      return exchange;
    }
    for (int distance = 1; distance < size; ++distance) {
      exchange->send((root + distance) % size, data, whole);
    }
    return exchange;
  }
  const int distance = (peers.rank + size - root) % size;
  std::vector<ByteRange> pieces;
  append_pieces(pieces, whole);
  const auto received = distance > 0 ? pieces : std::vector<ByteRange>{};
  const auto sent = distance + 1 < size ? pieces : std::vector<ByteRange>{};
  const auto num_own = static_cast<std::int64_t>(pieces.size() - received.size());
  return std::make_unique<Forward>(peers, data, (peers.rank + size - 1) % size, received,
                                   (peers.rank + 1) % size, sent, num_own);
}

}  // namespace hopshard::detail::mpi
