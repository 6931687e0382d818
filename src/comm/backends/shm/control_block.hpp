// What the ranks of one group share: a file in memory with one area for each rank, written by that
// rank only, and the group's failure. Everything here is plain data and lock-free atomics, so a
// rank that is killed at any instruction leaves nothing locked. The rules are in group.hpp.
//
//   | Header | RankState of rank 0, 1, ... | Posts of rank 0: kRingSize of them | of rank 1 | ...
//
// Fresh files are zero, and zero means "nothing yet" for every member.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../../failure.hpp"
#include "hopshard/topology/link_cost.hpp"

namespace hopshard::detail::shm {

inline constexpr std::size_t kLineBytes = 64;
inline constexpr std::size_t kPageBytes = 4096;
/// Operations that a rank can have posted before all others have moved their data.
inline constexpr std::uint64_t kRingSize = 16;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

using Kind = CollectiveOp;  // Of one byte: see CallRecord.

/// Where peers find a rank's buffer.
struct Location {
  enum class Place : std::uint32_t {
    kNone,     ///< There is nothing to read: no elements, or not the root.
    kInline,   ///< Behind the post.
    kArena,    ///< In memory from allocate().
    kPrivate,  ///< Anywhere in the rank's address space.
  };
  Place place = Place::kNone;
  std::int32_t file = -1;         ///< kArena: descriptor in the owner's process ...
  std::uint64_t arena_id = 0;     ///< ... its inode ...
  std::uint64_t arena_bytes = 0;  ///< ... and its size.
  std::uint64_t offset = 0;       ///< kArena: of the buffer in it.
  std::uint64_t address = 0;      ///< In the owner's address space, unless it is inline.
};

/// What all ranks of an operation must issue alike.
struct CallRecord {
  static constexpr std::size_t kTagBytes = 88;
  Kind kind = Kind::kBarrier;
  std::int8_t dtype = 0;
  std::uint8_t reduce_op = 0;
  std::uint8_t padding = 0;
  std::int32_t root = -1;
  std::int64_t numel = 0;
  std::uint64_t tag_hash = 0;
  std::uint32_t tag_bytes = 0;  ///< Of the part that is here.
  std::uint32_t chunk = 0;      ///< Of an operation that is moved in several.
  std::array<char, kTagBytes> tag{};
};

static_assert(std::has_unique_object_representations_v<CallRecord>, "compared byte by byte");

/// One operation of one rank; `ready` is written last.
struct alignas(kLineBytes) Post {
  std::atomic<std::uint64_t> ready;  ///< 1 + the sequence number of the operation that is here.
  CallRecord record;
  Location location;
};

/// The processors that a rank may run on, as bits.
using CpuMask = std::array<std::uint64_t, 16>;

struct alignas(2 * kLineBytes) RankState {
  std::atomic<std::uint64_t> moved;  ///< Operations whose data this rank has moved.
  std::atomic<std::uint64_t> busy;   ///< 1 while it reads or writes buffers of others.
  std::atomic<std::uint64_t> left;   ///< 1 + the number of operations it issued before it left.
  std::atomic<std::uint64_t> stage;  ///< Of connecting: see connect.cpp.
  std::atomic<std::uint64_t> can_read_others;  ///< 1 no, 2 yes.
  std::uint64_t probe_address;                 ///< Of a word in its process that holds kProbe.
  CpuMask cpus;
};

inline constexpr std::uint64_t kProbe = 0x686F707368617264;

/// Why the group cannot be used any more. The first reason stays.
struct Failure {
  using Kind = FailureKind;
  static constexpr std::size_t kTextBytes = 2032;
  std::atomic<std::uint32_t> state;  ///< 0: none, 1: being written, 2: written.
  Kind kind;
  std::uint64_t sequence;  ///< Of the operation that it came up in.
  std::array<char, kTextBytes> text;
};

struct Header {
  std::uint64_t magic;
  std::uint64_t inline_bytes;  ///< Behind each post.
  alignas(2 * kLineBytes)
      std::atomic<std::uint64_t> fail_from;  ///< 1 + the first operation that fails.
  Failure failure;
  alignas(2 * kLineBytes) std::atomic<std::uint32_t> event;  ///< Counts changes; a futex.
  std::atomic<std::uint32_t> num_sleepers;
};

/// Finds the parts of a control block in its memory.
class ControlBlock {
 public:
  static constexpr std::uint64_t kMagic = 0x31304D4853504F48;  // "HOPSHM01"

  ControlBlock() = default;
  ControlBlock(void* memory, std::size_t num_ranks, std::size_t inline_bytes)
      : memory_(static_cast<char*>(memory)), num_ranks_(num_ranks), inline_bytes_(inline_bytes) {}

  [[nodiscard]] static std::size_t num_bytes(std::size_t num_ranks, std::size_t inline_bytes) {
    return posts_begin(num_ranks) + num_ranks * kRingSize * post_bytes(inline_bytes);
  }

  [[nodiscard]] Header& header() const { return *static_cast<Header*>(at(0)); }
  [[nodiscard]] RankState& rank(std::size_t member) const {
    return *static_cast<RankState*>(at(kHeaderBytes + member * sizeof(RankState)));
  }
  [[nodiscard]] Post& post(std::size_t member, std::uint64_t sequence) const {
    return *static_cast<Post*>(at(post_begin(member, sequence)));
  }
  [[nodiscard]] char* inline_data(std::size_t member, std::uint64_t sequence) const {
    return memory_ + post_begin(member, sequence) + sizeof(Post);
  }
  [[nodiscard]] std::size_t inline_bytes() const { return inline_bytes_; }

 private:
  static constexpr std::size_t kHeaderBytes = kPageBytes;
  static_assert(sizeof(Header) <= kHeaderBytes);

  [[nodiscard]] static std::size_t post_bytes(std::size_t inline_bytes) {
    return sizeof(Post) + (inline_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  }
  [[nodiscard]] static std::size_t posts_begin(std::size_t num_ranks) {
    return kHeaderBytes +
           (num_ranks * sizeof(RankState) + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  [[nodiscard]] std::size_t post_begin(std::size_t member, std::uint64_t sequence) const {
    return posts_begin(num_ranks_) +
           (member * kRingSize + sequence % kRingSize) * post_bytes(inline_bytes_);
  }
  [[nodiscard]] void* at(std::size_t offset) const { return memory_ + offset; }

  char* memory_ = nullptr;
  std::size_t num_ranks_ = 0;
  std::size_t inline_bytes_ = 0;
};

}  // namespace hopshard::detail::shm
