// Why a group or an operation failed, and the error that says so: what backends and composites
// share, so that one kind of trouble has one type everywhere.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace hopshard::detail {

enum class FailureKind : std::uint8_t { kComm, kTimeout, kSchedule };

struct Failure {
  FailureKind kind = FailureKind::kComm;
  std::string cause;  ///< Reads well after a colon.
};

/// CommError, TimeoutError or ScheduleError.
[[nodiscard]] std::exception_ptr make_error(FailureKind kind, const std::string& text);
/// @throws that error, with "call_text: cause".
[[noreturn]] void throw_failure(const Failure& failure, const std::string& call_text);

}  // namespace hopshard::detail
