// What one rank is about to do, in a few bytes that ranks compare before data moves. Transports
// pair collectives by their place in the order: those of equal size would mix two units without an
// error, those of different sizes end the process in some of them (Gloo).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "hopshard/comm/group.hpp"

namespace hopshard::detail {

/// A hash of the whole description and as much of its text as fits, zero-padded.
inline constexpr std::size_t kCallRecordBytes = 160;
using CallRecord = std::array<std::uint8_t, kCallRecordBytes>;

[[nodiscard]] CallRecord make_call_record(std::string_view description);

/// Nothing if all `records` (group rank after group rank) are equal; else who issued what.
[[nodiscard]] std::optional<std::string> explain_difference(std::span<const std::uint8_t> records,
                                                            const Group& group);

}  // namespace hopshard::detail
