#include "hopshard/runtime/order_check.hpp"

#include <gtest/gtest.h>

#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;
using testing::world_of;

const std::vector<std::string> kNames = {"", "h.0", "h.1"};

OrderCheck check_of(const Actions& actions) {
  OrderCheck check;
  for (const Action& action : actions) {
    check.record(action);
  }
  return check;
}

TEST(OrderCheck, HashesTellOrdersKindsAndLengthsApart) {
  const Action gather_1{ActionKind::kGather, 1};
  const Action gather_2{ActionKind::kGather, 2};
  const Action reduce_1{ActionKind::kReduce, 1};
  const std::vector<Actions> orders = {{},
                                       {gather_1},
                                       {gather_2},
                                       {reduce_1},
                                       {gather_1, gather_2},
                                       {gather_2, gather_1},
                                       {gather_1, gather_1}};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    for (std::size_t j = 0; j < orders.size(); ++j) {
      EXPECT_EQ(check_of(orders[i]).hash() == check_of(orders[j]).hash(), i == j) << i << ' ' << j;
    }
    EXPECT_GE(check_of(orders[i]).hash(), 0);
    EXPECT_LT(check_of(orders[i]).hash(), std::int64_t{1} << 62);
  }
  OrderCheck cleared = check_of({gather_1});
  cleared.clear();
  EXPECT_EQ(cleared.hash(), OrderCheck().hash());
}

std::string explanation(const std::vector<Actions>& by_rank) {
  const int size = static_cast<int>(by_rank.size());
  std::vector<std::string> texts(by_rank.size());
  run_ranks(size, [&](int rank, LocalHub& hub) {
    const CommunicatorPtr world = hub.communicator(world_of(size, rank));
    const auto index = static_cast<std::size_t>(rank);
    try {
      check_of(by_rank[index]).explain(*world, kNames);
    } catch (const ScheduleError& error) {
      texts[index] = error.what();
    }
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(text, texts[0]);
  }
  return texts[0];
}

TEST(OrderCheck, ExplainsTheFirstDifference) {
  const std::string text = explanation({{{ActionKind::kGather, 1}, {ActionKind::kGather, 2}},
                                        {{ActionKind::kGather, 1}, {ActionKind::kReduce, 1}},
                                        {{ActionKind::kGather, 1}, {ActionKind::kGather, 2}}});
  EXPECT_NE(text.find("number 1 of this step"), std::string::npos) << text;
  EXPECT_NE(text.find("gather of 'h.1' on rank 0 2"), std::string::npos) << text;
  EXPECT_NE(text.find("reduction of 'h.0' on rank 1"), std::string::npos) << text;
}

TEST(OrderCheck, ARankThatIssuedLessIsNamed) {
  const std::string text = explanation({{{ActionKind::kGather, 1}}, {}});
  EXPECT_NE(text.find("nothing more on rank 1"), std::string::npos) << text;
}

// Only the first 65,536 are kept; the hash covers all.
TEST(OrderCheck, SaysSoIfTheDifferenceIsBeyondItsMemory) {
  Actions first(70'000, {ActionKind::kGather, 1});
  Actions second = first;
  second.back() = {ActionKind::kGather, 2};
  EXPECT_NE(check_of(first).hash(), check_of(second).hash());
  EXPECT_NE(explanation({first, second}).find("after the first 65536"), std::string::npos);
}

}  // namespace
}  // namespace hopshard
