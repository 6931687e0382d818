// One collective of one rank: the streams of chunks that it receives and sends. What is sent when,
// is up to the algorithms in operations.hpp. Runs on the progress thread only.
//
// [Note: streams] A stream is what one rank sends another in one operation and channel, in chunks
// whose sizes both know. Small ones are one eager message. For others the receiver says where its
// memory is (kReady), the sender writes each chunk to its final place as soon as it has it, and the
// immediate tells the receiver which chunk is complete. Chunks may arrive in any order.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../completion.hpp"
#include "engine.hpp"
#include "plans.hpp"

namespace hopshard::detail::ofi {

struct InStream {
  int member = 0;
  std::uint16_t channel = 0;
  std::byte* base = nullptr;
  std::vector<Slice> chunks;  ///< In bytes, from `base`.
  std::size_t num_left = 0;
  bool is_eager = false;
};

struct OutStream {
  int member = 0;
  std::uint16_t channel = 0;
  std::vector<Slice> chunks;  ///< In bytes, from the receiver's base.
  std::size_t num_left = 0;
  bool is_eager = false;
  bool is_ready = false;
  std::uint32_t first_id = 0;
  std::vector<RemoteMemory> remote;  ///< Of the receiver's base, by rail.
  /// Chunk, where it is, and its registration, until the receiver is ready.
  struct Waiting {
    std::size_t index;
    std::byte* data;
    Registrations registrations;
  };
  std::vector<Waiting> waiting;
};

/// What was called, for the peers and for errors.
struct CallInfo {
  std::string text;       ///< What all ranks must issue alike.
  std::string call_text;  ///< Begins this rank's errors.
  std::uint64_t hash = 0;
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  explicit Operation(CallInfo call) : call_(std::move(call)) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  [[nodiscard]] const CallInfo& call() const noexcept { return call_; }
  [[nodiscard]] const std::shared_ptr<Completion>& completion() const noexcept {
    return completion_;
  }

  // Called by the group.
  [[nodiscard]] GroupState& group() const { return *group_; }
  [[nodiscard]] std::uint64_t sequence() const noexcept { return sequence_; }
  void enter(std::shared_ptr<GroupState> group, Engine& engine, std::uint64_t sequence);
  void start();
  [[nodiscard]] bool has_started() const noexcept { return has_started_; }
  void on_ready(int member, const MessageHeader& header, Payload payload);
  void on_eager(int member, const MessageHeader& header, Payload payload);
  void arrived(InStream& stream, std::size_t index);
  void sent(OutStream& stream) { --stream.num_left; }
  [[nodiscard]] bool is_done() const;
  /// Ends it for its caller; nothing of it may be in flight.
  void finish();
  void fail(std::exception_ptr error) { completion_->fail(std::move(error)); }

 protected:
  /// Channels from here on are rounds of the agreement, below are the algorithms'.
  static constexpr std::uint16_t kAgreementChannel = 0x1000;

  virtual void do_start() = 0;
  virtual void do_arrival(InStream& stream, std::size_t index) = 0;

  [[nodiscard]] Engine& engine() const { return *engine_; }
  /// Chunks are in bytes from `base`, the part of [base, base + num_bytes) that is written to.
  InStream& receive(int member, std::uint16_t channel, std::byte* base, std::size_t num_bytes,
                    std::vector<Slice> chunks);
  OutStream& stream_to(int member, std::uint16_t channel, std::vector<Slice> chunks);
  /// Sends a chunk from `data`, which lies in [memory, memory + num_bytes) and stays unchanged.
  void push(OutStream& stream, std::size_t index, const std::byte* data);
  /// Memory that push() sends from, registered once for all its chunks if that is needed.
  void will_send_from(const std::byte* memory, std::size_t num_bytes);
  [[nodiscard]] Scratch scratch(std::size_t num_bytes);
  /// Ends, for each rank, only when all ranks have issued this operation: a dissemination barrier
  /// beside the data. For what does not need every rank's data anyway.
  void start_agreement();

 private:
  void agree();
  void send(int member, MessageKind kind, std::uint16_t channel, Payload payload);
  void write(OutStream& stream, const OutStream::Waiting& chunk);
  [[nodiscard]] MessageHeader header(std::uint16_t channel) const;

  const CallInfo call_;
  std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
  std::shared_ptr<GroupState> group_;
  Engine* engine_ = nullptr;
  std::uint64_t sequence_ = 0;
  bool has_started_ = false;
  bool told_next_ = false;
  std::deque<InStream> incoming_;  // Deques: others point to the streams.
  std::deque<OutStream> outgoing_;
  struct SendMemory {
    const std::byte* begin;
    std::size_t num_bytes;
    Registrations registrations;
  };
  std::vector<SendMemory> send_memory_;
  std::vector<Scratch> scratch_;
  std::size_t num_rounds_ = 0;  ///< Of the agreement.
  std::size_t round_ = 0;
  std::vector<bool> round_arrived_;
};

}  // namespace hopshard::detail::ofi
