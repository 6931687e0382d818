// One operation of a group, from its issue to its end, and the message that announces it.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../../call_record.hpp"
#include "../../completion.hpp"
#include "../../describe.hpp"
#include "../../failure.hpp"
#include "transfer.hpp"

namespace hopshard::detail::mpi {

enum class MpiKind { kConnect, kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };

std::string_view to_string(MpiKind kind);

/// What a rank issues.
struct MpiCall {
  MpiKind kind = MpiKind::kBarrier;
  std::string tag;
  std::string remark;  ///< More that must agree; ends the text.
  ReduceOp reduce_op = ReduceOp::kSum;
  bool accumulate = false;  ///< A rank's own affair.
  int root = -1;
  std::int64_t numel = 0;  ///< Of the part: n of the contract.
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::Tensor output{};  ///< Or the one tensor of an in-place operation.
  at::Tensor input{};

  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::int64_t bytes() const;  ///< Of numel elements.
};

/// Gathering until all ranks have announced it, then agreed: from here on all ranks carry it out.
/// Moving while its bytes are under way; settling if it failed then, until MPI lets go of the
/// output. Operations that fit into the announcements never move.
enum class OperationState { kGathering, kAgreed, kMoving, kSettling, kEnded };

struct Operation {
  MpiCall call;
  std::string call_text;  ///< For errors: see describe_call().
  std::shared_ptr<Completion> completion = std::make_shared<Completion>();

  // Of the progress thread.
  OperationState state = OperationState::kGathering;
  std::int64_t sequence = -1;
  Peers peers;
  TransferPtr transfer;
  std::optional<Failure> failure;
  std::chrono::steady_clock::time_point settle_until;

  void finish();
  /// @param keep_buffers  MPI may still use them.
  void fail(const Failure& why, bool keep_buffers = false);
};
using OperationPtr = std::shared_ptr<Operation>;

/// Payloads up to this size travel with the announcement: one message per pair of ranks instead of
/// two in a row.
inline constexpr std::int64_t kInlineBytes = 4096;

enum class MessageKind : std::uint32_t {
  kCall,    ///< Announces operation `sequence`.
  kFailed,  ///< The sender gave up all from operation `sequence` on; the payload says why.
  kLeft,    ///< The sender destroyed its communicator before it issued operation `sequence`.
};

struct MessageHeader {
  MessageKind kind = MessageKind::kCall;
  std::int32_t sender = 0;  ///< Its rank in the group.
  std::uint64_t group_key = 0;
  std::int64_t sequence = 0;
  std::int32_t tag = 0;  ///< kCall: of data for the sender.
  std::int32_t payload_bytes = 0;
  CallRecord record{};  ///< kCall
};
static_assert(std::is_trivially_copyable_v<MessageHeader>);

inline constexpr std::size_t kMaxMessageSize = sizeof(MessageHeader) + kInlineBytes;

struct Message {
  MessageHeader header;
  std::vector<char> payload;
};

}  // namespace hopshard::detail::mpi
