#include "comm/call_record.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hopshard::detail {
namespace {

std::optional<std::string> difference_of(const std::vector<std::string>& calls) {
  Group group{.name = "g", .ranks = {}, .rank = 0, .slots = {}};
  std::vector<std::uint8_t> records;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    group.ranks.push_back(static_cast<int>(10 + i));
    const CallRecord record = make_call_record(calls[i]);
    records.insert(records.end(), record.begin(), record.end());
  }
  return explain_difference(records, group);
}

TEST(CallRecord, EqualCallsHaveNoDifference) {
  EXPECT_EQ(difference_of({"all_gather 'unshard/h.3' of 64 Float"}), std::nullopt);
  EXPECT_EQ(difference_of({"barrier", "barrier", "barrier"}), std::nullopt);
}

TEST(CallRecord, NamesWhoIssuedWhatByGlobalRank) {
  EXPECT_EQ(difference_of({"a", "b", "a"}), "ranks 10 12: a; rank 11: b");
}

// What does not fit into the record still counts: units' names may be long.
TEST(CallRecord, LongCallsDifferInTheirTails) {
  const std::string head(2 * kCallRecordBytes, 'x');
  EXPECT_EQ(difference_of({head + "1", head + "1"}), std::nullopt);
  EXPECT_TRUE(difference_of({head + "1", head + "2"}).has_value());
}

TEST(CallRecord, APrefixIsAnotherCall) {
  EXPECT_TRUE(difference_of({"all_gather", "all_gather of 1"}).has_value());
}

}  // namespace
}  // namespace hopshard::detail
