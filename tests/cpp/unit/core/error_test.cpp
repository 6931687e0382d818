#include "hopshard/core/error.hpp"

#include <gtest/gtest.h>

#include <type_traits>

namespace hopshard {
namespace {

TEST(Check, HoldsSilently) { EXPECT_NO_THROW(HOPSHARD_CHECK(1 + 1 == 2, ConfigError, "no")); }

TEST(Check, ThrowsTheNamedTypeWithItsParts) {
  try {
    HOPSHARD_CHECK(false, CommError, "rank ", 3, " of '", std::string("sharding"), "'");
    FAIL() << "did not throw";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "rank 3 of 'sharding'");
  }
}

TEST(Check, EvaluatesThePartsOnlyOnFailure) {
  int evaluated = 0;
  HOPSHARD_CHECK(true, Error, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

TEST(Errors, FormTheHierarchyThatPythonMirrors) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  static_assert(std::is_base_of_v<CommError, TimeoutError>);
  static_assert(std::is_base_of_v<Error, ShardedError>);
  static_assert(!std::is_base_of_v<CommError, ScheduleError>);
  EXPECT_THROW(throw TimeoutError("late"), CommError);
}

}  // namespace
}  // namespace hopshard
