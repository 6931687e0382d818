#include "failure.hpp"

#include "hopshard/core/error.hpp"

namespace hopshard::detail {

std::exception_ptr make_error(FailureKind kind, const std::string& text) {
  switch (kind) {
    case FailureKind::kTimeout:
      return std::make_exception_ptr(TimeoutError(text));
    case FailureKind::kSchedule:
      return std::make_exception_ptr(ScheduleError(text));
    case FailureKind::kComm:
      break;
  }
  return std::make_exception_ptr(CommError(text));
}

void throw_failure(const Failure& failure, const std::string& call_text) {
  std::rethrow_exception(make_error(failure.kind, call_text + ": " + failure.cause));
}

}  // namespace hopshard::detail
