#include "hopshard/comm/group.hpp"

#include <gtest/gtest.h>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

TEST(Group, KnowsItsSlots) {
  const Group plain{"plain", {4, 5, 6}, 1, {}};
  plain.validate();
  EXPECT_EQ(plain.size(), 3);
  EXPECT_EQ(plain.global_rank(), 5);
  EXPECT_EQ(plain.my_slot(), 1);
  EXPECT_TRUE(plain.has_identity_slots());

  const Group permuted{"permuted", {0, 1, 2, 3}, 1, {0, 2, 1, 3}};
  permuted.validate();
  EXPECT_EQ(permuted.my_slot(), 2);
  EXPECT_FALSE(permuted.has_identity_slots());
  EXPECT_TRUE((Group{"identity", {0, 1}, 0, {0, 1}}).has_identity_slots());
}

TEST(Group, RefusesWhatIsNoGroup) {
  const auto refused = [](const Group& group, const std::string& word) {
    try {
      group.validate();
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("'g'"), std::string::npos) << error.what();
      return;
    }
    ADD_FAILURE() << "not refused: " << word;
  };
  refused({"g", {}, 0, {}}, "no ranks");
  refused({"g", {0, 3, 3}, 0, {}}, "rank 3 twice");
  refused({"g", {-1, 3}, 0, {}}, "-1");
  refused({"g", {0, 1}, 2, {}}, "0..1");
  refused({"g", {0, 1}, -1, {}}, "0..1");
  refused({"g", {0, 1}, 0, {0}}, "1 slots");
  refused({"g", {0, 1}, 0, {1, 1}}, "slot 1");
  refused({"g", {0, 1}, 0, {0, 2}}, "slot 2");
}

}  // namespace
}  // namespace hopshard
