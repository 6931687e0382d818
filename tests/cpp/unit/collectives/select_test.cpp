// Which calls go which way, that both ways may be under way at once, and that ranks which went
// different ways find out.
#include "hopshard/collectives/select.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>

#include "hopshard/core/error.hpp"
#include "support/two_level.hpp"

namespace hopshard {
namespace {

using std::chrono::milliseconds;
using testing::make_two_level;
using testing::run_ranks;
using testing::sliced_world;
using testing::ThreadWorld;
using testing::world_of;

/// Two levels save latency, but where both links are equally fast they move a whole buffer in all
/// and a flat ring 3/4 of it (2 x 2): from 0.8 MB on, flat is faster.
const NodeLinkCosts kSmallIsHierarchical = {.intra_node = {.alpha_us = 1, .gb_per_s = 0.1},
                                            .inter_node = {.alpha_us = 1000, .gb_per_s = 0.1}};

SelectOptions options_of(Selection selection, std::shared_ptr<Meter> meter = nullptr,
                         StorePtr store = nullptr) {
  return {.shape = {.num_nodes = 2, .ranks_per_node = 2},
          .costs = kSmallIsHierarchical,
          .selection = selection,
          .store = std::move(store),
          .meter = std::move(meter)};
}

CommunicatorPtr make_selecting(ThreadWorld& world, const Group& group, SelectOptions options) {
  return make_selecting_communicator(
      world.communicator(group),
      make_two_level(world, group, 2, 2, {.timeout = milliseconds(60'000), .store = options.store}),
      options);
}

std::int64_t num_calls(const Meter& meter, const std::string& op, const std::string& algorithm) {
  return meter.value("algorithm/" + op + "/" + algorithm);
}

TEST(Selecting, PicksByTheModelOrAsItIsTold) {
  const Group sliced = sliced_world(2, 2, 0);
  const Group in_rank_order = world_of(4, 0);
  constexpr std::int64_t kSmall = 1000;
  constexpr std::int64_t kLarge = 64 << 20;
  for (const CollectiveOp op :
       {CollectiveOp::kAllGather, CollectiveOp::kReduceScatter, CollectiveOp::kAllReduce}) {
    const auto pick = [&](Selection selection, std::int64_t bytes, const Group& group,
                          bool has_hierarchical = true) {
      return select_algorithm(op, bytes, group, has_hierarchical, options_of(selection));
    };
    EXPECT_EQ(pick(Selection::kByCost, kSmall, sliced), Algorithm::kHierarchical);
    EXPECT_EQ(pick(Selection::kByCost, kLarge, sliced), Algorithm::kFlat);
    EXPECT_EQ(pick(Selection::kFlat, kSmall, sliced), Algorithm::kFlat);
    EXPECT_EQ(pick(Selection::kHierarchical, kLarge, sliced), Algorithm::kHierarchical);
    EXPECT_EQ(pick(Selection::kHierarchical, kLarge, sliced, false), Algorithm::kFlat);
    // Only a reduction does not mind the order of the slots.
    const bool needs_order = op != CollectiveOp::kAllReduce;
    EXPECT_EQ(pick(Selection::kHierarchical, kSmall, in_rank_order),
              needs_order ? Algorithm::kFlat : Algorithm::kHierarchical);
  }
}

TEST(Selecting, PassesCallsOnAndCountsThem) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const auto meter = std::make_shared<Meter>();
    const CommunicatorPtr selecting =
        make_selecting(world, sliced_world(2, 2, rank), options_of(Selection::kByCost, meter));
    EXPECT_EQ(selecting->backend(), "selecting(local, hierarchical(local+local))");
    // Small and large at once: the two ways may overtake each other.
    constexpr std::int64_t kLargeNumel = 1 << 20;
    const at::Tensor large = at::full({kLargeNumel}, 1.0, at::kFloat);
    const at::Tensor small = at::full({3}, 1.0, at::kFloat);
    std::vector<WorkPtr> works;
    works.push_back(selecting->all_reduce(large));
    works.push_back(selecting->all_reduce(small));
    std::swap(works[0], works[1]);
    for (const WorkPtr& work : works) {
      work->wait();
    }
    EXPECT_TRUE(at::equal(large, at::full({kLargeNumel}, 4.0, at::kFloat)));
    EXPECT_TRUE(at::equal(small, at::full({3}, 4.0, at::kFloat)));

    const at::Tensor whole = at::zeros({8});
    const int slot = selecting->group().my_slot();
    selecting->all_gather(whole, at::full({2}, static_cast<double>(slot), at::kFloat))->wait();
    EXPECT_TRUE(at::equal(whole, at::arange(8, at::kFloat).div(2, "floor")));
    selecting->barrier();
    EXPECT_EQ(num_calls(*meter, "all_reduce", "flat"), 1);
    EXPECT_EQ(num_calls(*meter, "all_reduce", "hierarchical"), 1);
    EXPECT_EQ(num_calls(*meter, "all_gather", "hierarchical"), 1);
    EXPECT_EQ(num_calls(*meter, "barrier", "hierarchical"), 1);
  });
}

TEST(Selecting, RanksThatWentDifferentWaysAreTold) {
  std::array<std::string, 4> texts;
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr selecting = make_selecting(
        world, world_of(4, rank), options_of(Selection::kByCost, nullptr, world.store()));
    const auto start = std::chrono::steady_clock::now();
    // Small ones take two levels, large ones are flat: nobody meets rank 2.
    const std::int64_t numel = rank == 2 ? (1 << 22) : 10;
    try {
      selecting->all_reduce(at::zeros({numel}), ReduceOp::kSum, {.timeout = {}, .tag = "norm"})
          ->wait();
      ADD_FAILURE() << "no error";
    } catch (const ScheduleError& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
    EXPECT_THROW(selecting->barrier(), CommError);
  });
  for (const std::string& text : texts) {
    for (const std::string word :
         {"all_reduce 'norm' in group 'world' on rank", "all_reduce 'norm' of 10 Float (sum)",
          "global rank 2: all_reduce 'norm' of 4194304 Float (sum)", "same order"}) {
      EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
    }
  }
}

TEST(Selecting, AFailureOfOneWayEndsBoth) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr selecting = make_selecting(
        world, world_of(4, rank), options_of(Selection::kByCost, nullptr, world.store()));
    if (rank == 3) {
      static_cast<void>(world.store()->get("ended", milliseconds(20'000)));
      return;
    }
    const at::Tensor large = at::zeros({1 << 22});
    const at::Tensor small = at::zeros({10});
    const WorkPtr flat = selecting->all_reduce(large);
    const milliseconds limit = rank == 0 ? milliseconds(50) : milliseconds(0);
    const WorkPtr hierarchical =
        selecting->all_reduce(small, ReduceOp::kSum, {.timeout = limit, .tag = "small"});
    if (rank == 0) {
      EXPECT_THROW(hierarchical->wait(), TimeoutError);
    }
    EXPECT_THROW(hierarchical->wait(), CommError);
    EXPECT_THROW(flat->wait(), CommError);
    try {
      selecting->barrier();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("unusable since"), std::string::npos);
    }
    if (rank == 0) {
      world.store()->set("ended", "");
    }
  });
}

TEST(Selecting, PartsKeepTwoLevelsWhereTheyApply) {
  run_ranks(8, [](int rank, ThreadWorld& world) {
    const auto meter = std::make_shared<Meter>();
    SelectOptions options = options_of(Selection::kHierarchical, meter);
    options.shape.num_nodes = 4;
    const Group group = sliced_world(4, 2, rank);
    const CommunicatorPtr selecting = make_selecting_communicator(
        world.communicator(group), make_two_level(world, group, 4, 2), options);
    const int half = rank / 4;
    const auto split = [&](const std::string& name, const std::vector<int>& ranks,
                           std::vector<int> slots) -> std::int64_t {
      const auto me = std::find(ranks.begin(), ranks.end(), rank);
      if (me == ranks.end()) {
        return -1;
      }
      const CommunicatorPtr part =
          selecting->split({name, ranks, static_cast<int>(me - ranks.begin()), std::move(slots)});
      EXPECT_EQ(part->backend(), selecting->backend());
      const std::int64_t before = num_calls(*meter, "all_gather", "hierarchical");
      const auto size = static_cast<std::int64_t>(ranks.size());
      const at::Tensor whole = at::zeros({size});
      const int slot = part->group().my_slot();
      part->all_gather(whole, at::full({1}, static_cast<double>(slot), at::kFloat))->wait();
      EXPECT_TRUE(at::equal(whole, at::arange(size, at::kFloat))) << name;
      return num_calls(*meter, "all_gather", "hierarchical") - before;
    };
    const int first = half * 4;
    // Two whole nodes, in slice order, and in others; a node; a rail; neither.
    EXPECT_EQ(split("sliced", {first, first + 1, first + 2, first + 3}, {0, 2, 1, 3}), 1);
    EXPECT_EQ(split("ranked", {first, first + 1, first + 2, first + 3}, {}), 0);
    EXPECT_EQ(split("turned", {first, first + 1, first + 2, first + 3}, {3, 2, 1, 0}), 0);
    EXPECT_EQ(split("node", {rank / 2 * 2, rank / 2 * 2 + 1}, {}), 0);
    EXPECT_EQ(split("rail", {rank % 2, rank % 2 + 2, rank % 2 + 4, rank % 2 + 6}, {}), 0);
    EXPECT_LE(split("odd", {0, 3, 5}, {2, 0, 1}), 0);
  });
}

TEST(Selecting, WithoutAHierarchicalOneAllIsFlat) {
  run_ranks(3, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr selecting =
        make_selecting_communicator(world.communicator(world_of(3, rank)), nullptr, {});
    EXPECT_EQ(selecting->backend(), "selecting(local)");
    const at::Tensor sum = at::full({3}, 1.0, at::kFloat);
    selecting->all_reduce(sum)->wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 3.0, at::kFloat)));
  });
}

TEST(Selecting, RefusesWhatDoesNotFit) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr flat = world.communicator(world_of(4, rank));
    const CommunicatorPtr two_level = make_two_level(world, sliced_world(2, 2, rank), 2, 2);
    const auto make = [](const CommunicatorPtr& one, const CommunicatorPtr& other,
                         const SelectOptions& options) {
      static_cast<void>(make_selecting_communicator(one, other, options));
    };
    const SelectOptions good = options_of(Selection::kByCost);
    EXPECT_THROW(make(nullptr, two_level, good), InvalidArgument);
    EXPECT_THROW(make(flat, two_level, good), InvalidArgument);  // Other slots.
    const CommunicatorPtr sliced = world.communicator(sliced_world(2, 2, rank));
    EXPECT_NO_THROW(make(sliced, two_level, good));
    SelectOptions bad = good;
    bad.shape.num_nodes = 3;
    EXPECT_THROW(make(sliced, two_level, bad), InvalidArgument);
    bad = good;
    bad.costs.inter_node.gb_per_s = 0;
    EXPECT_THROW(make(sliced, two_level, bad), InvalidArgument);
  });
}

}  // namespace
}  // namespace hopshard
