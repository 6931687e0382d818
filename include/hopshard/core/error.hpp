// Typed errors and the check macros. Every error says what happened, to whom, and what to do.
// Python sees the same names (python/src/bind_core.cpp). Next: log.hpp.
#pragma once

#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>

namespace hopshard {

/// Base of all errors that hopshard throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The configuration or the model cannot be used as given; raised before training starts.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A call was made with arguments that break its contract; raised before any byte is sent.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A collective failed: a peer died, disagreed or the transport broke.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A wait ran past its time limit. The peers named in the text did not arrive.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// Ranks issued different collectives, or an event came in a state that does not allow it.
class ScheduleError : public Error {
 public:
  using Error::Error;
};

/// A sharded parameter or gradient was used in a way that needs the whole tensor.
class ShardedError : public Error {
 public:
  using Error::Error;
};

namespace detail {

template <typename... Parts>
std::string concatenate(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace detail

/// Throws `ErrorType` with the concatenated parts unless `condition` holds.
#define HOPSHARD_CHECK(condition, ErrorType, ...)                                \
  do {                                                                           \
    if (!(condition)) [[unlikely]] {                                             \
      throw ::hopshard::ErrorType(::hopshard::detail::concatenate(__VA_ARGS__)); \
    }                                                                            \
  } while (false)

}  // namespace hopshard
