// The messages that ranks send each other beside the data. All ranks run the same build on the same
// kind of machine, which connecting checks, so structures travel as they lie in memory. Next:
// engine.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plans.hpp"

namespace hopshard::detail::ofi {

enum class MessageKind : std::uint8_t {
  kCall,     ///< "I have issued this operation", to the next rank, if nothing else says it.
  kReady,    ///< "You may write a stream of this operation to ...": ReadyBody.
  kEager,    ///< A whole stream.
  kAsk,      ///< "Have you issued this operation?"
  kTell,     ///< "I have (not) issued this operation": its text.
  kFail,     ///< "The group has failed": FailureKind, cause and text for later calls.
  kStopped,  ///< "I write nothing any more for this group", after a failure.
  kLeave,    ///< "I destroyed my communicator before this operation."
  kPing,     ///< Nothing; a connection that is broken says so when it is used.
  kBye,      ///< "I close my endpoint; send me nothing after your answer."
  kByeAnswer,
};

inline constexpr std::uint8_t kIssued = 1;    ///< kTell: the sender has issued the operation.
inline constexpr std::uint8_t kDisagree = 2;  ///< kTell: everybody should tell everybody.

struct MessageHeader {
  std::uint64_t group = 0;
  std::uint64_t sequence = 0;
  std::uint64_t hash = 0;    ///< Of the operation as its sender issued it.
  std::uint32_t source = 0;  ///< The sender's place among the ranks that connected.
  std::uint32_t payload_bytes = 0;
  std::uint16_t channel = 0;  ///< Which stream between these two ranks.
  MessageKind kind = MessageKind::kPing;
  std::uint8_t flags = 0;
};

inline constexpr std::size_t kMaxRails = 32;
inline constexpr std::size_t kMessageBytes = sizeof(MessageHeader) + kEagerBytes;

/// Followed by a RemoteMemory for each rail.
struct ReadyBody {
  std::uint32_t first_id =
      0;  ///< Chunk i of the stream is written with the immediate first_id + i.
  std::uint32_t num_rails = 0;
};

using Payload = std::span<const std::byte>;

/// A message that came before its operation, or its group, was there.
struct EarlyMessage {
  MessageHeader header;
  std::vector<std::byte> payload;
};

inline Payload as_payload(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline std::string text_of(Payload payload) {
  return {reinterpret_cast<const char*>(payload.data()), payload.size()};
}

}  // namespace hopshard::detail::ofi
