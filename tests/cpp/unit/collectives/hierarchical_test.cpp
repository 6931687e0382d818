// What two levels add to the conformance suite, which runs over them too: other layouts, the order
// of the stages, the bytes that leave a node, and failures that reach ranks over a third. Long,
// because the failures need worlds of their own.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>

#include "hopshard/collectives/hierarchical_communicator.hpp"
#include "hopshard/comm/decorators.hpp"
#include "hopshard/comm/recording.hpp"
#include "hopshard/core/error.hpp"
#include "support/two_level.hpp"

namespace hopshard {
namespace {

using std::chrono::milliseconds;
using testing::make_two_level;
using testing::parts_of;
using testing::run_ranks;
using testing::sliced_world;
using testing::ThreadWorld;
using testing::world_of;

struct Layout {
  int num_nodes;
  int ranks_per_node;
  [[nodiscard]] int size() const { return num_nodes * ranks_per_node; }
};

constexpr std::array kLayouts = {Layout{2, 2}, Layout{4, 2}, Layout{2, 4},
                                 Layout{3, 3}, Layout{1, 4}, Layout{4, 1}};

at::Tensor numbers(std::int64_t numel, int salt) {
  return at::arange(numel, at::kFloat).mul(7).add(static_cast<double>(salt)).remainder(101);
}

template <typename ErrorType, typename Call>
std::string text_of_error(Call call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error than expected: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
  }
}

TEST(Hierarchical, GivesWhatTheFlatOneGives) {
  for (const Layout layout : kLayouts) {
    run_ranks(layout.size(), [&](int rank, ThreadWorld& world) {
      SCOPED_TRACE(::testing::Message() << layout.num_nodes << 'x' << layout.ranks_per_node);
      const Group group = sliced_world(layout.num_nodes, layout.ranks_per_node, rank);
      const CommunicatorPtr two_level =
          make_two_level(world, group, layout.num_nodes, layout.ranks_per_node);
      const CommunicatorPtr flat = world.communicator(group);
      for (const std::int64_t numel : {0, 1, 5, 1000, 4001}) {
        const at::Tensor part = numbers(numel, rank);
        const at::Tensor gathered = at::zeros({numel * layout.size()});
        const at::Tensor expected = at::zeros({numel * layout.size()});
        two_level->all_gather(gathered, part)->wait();
        flat->all_gather(expected, part)->wait();
        EXPECT_TRUE(at::equal(gathered, expected)) << "all_gather " << numel;

        const at::Tensor whole = numbers(numel * layout.size(), rank);
        for (const bool accumulate : {false, true}) {
          const at::Tensor mine = numbers(numel, 3);
          const at::Tensor reference = mine.clone();
          const CommOptions options{.timeout = {}, .tag = "", .accumulate = accumulate};
          flat->reduce_scatter(reference, whole.clone(), ReduceOp::kSum, options)->wait();
          two_level->reduce_scatter(mine, whole.clone(), ReduceOp::kSum, options)->wait();
          EXPECT_TRUE(at::equal(mine, reference)) << "reduce_scatter " << numel;
        }

        const at::Tensor sum = whole.clone();
        const at::Tensor reference = whole.clone();
        two_level->all_reduce(sum)->wait();
        flat->all_reduce(reference)->wait();
        EXPECT_TRUE(at::equal(sum, reference)) << "all_reduce " << numel;
      }
      for (int root = 0; root < layout.size(); ++root) {
        const at::Tensor tensor = numbers(50, rank);
        two_level->broadcast(tensor, root)->wait();
        EXPECT_TRUE(at::equal(tensor, numbers(50, root))) << "broadcast from " << root;
      }
      two_level->barrier();
    });
  }
}

TEST(Hierarchical, AllRanksGetBitEqualSums) {
  // Values whose sum depends on the order, in sizes that k divides and that it does not.
  for (const Layout layout : {Layout{2, 3}, Layout{3, 2}}) {
    for (const std::int64_t numel : {1, 7, 1500, 4000, 4001}) {
      std::vector<at::Tensor> sums(static_cast<std::size_t>(layout.size()));
      run_ranks(layout.size(), [&](int rank, ThreadWorld& world) {
        const CommunicatorPtr two_level = make_two_level(world, world_of(layout.size(), rank),
                                                         layout.num_nodes, layout.ranks_per_node);
        const at::Tensor sum = numbers(numel, rank).mul(1.0 / 3).exp();
        two_level->all_reduce(sum)->wait();
        sums[static_cast<std::size_t>(rank)] = sum;
      });
      for (const at::Tensor& sum : sums) {
        EXPECT_TRUE(at::equal(sum, sums.front())) << numel;
      }
    }
  }
}

TEST(Hierarchical, NamesBothCommunicators) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level = make_two_level(world, sliced_world(2, 2, rank), 2, 2);
    EXPECT_EQ(two_level->backend(), "hierarchical(local+local)");
  });
}

TEST(Hierarchical, RefusesWhatIsNoTwoLevelGroup) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const Group group = sliced_world(2, 2, rank);
    const NodeParts parts = parts_of(group, 2, 2);
    const CommunicatorPtr intra_node = world.communicator(parts.intra_node);
    const CommunicatorPtr inter_node = world.communicator(parts.inter_node);
    const auto make = [&](const Group& of, const CommunicatorPtr& intra,
                          const CommunicatorPtr& inter, HierarchicalOptions options = {}) {
      return text_of_error<InvalidArgument>([&, options] {
        static_cast<void>(make_hierarchical_communicator(of, intra, inter, options));
      });
    };
    expect_words(make(group, nullptr, inter_node), {"'world'", "one is null"});
    expect_words(make(group, inter_node, intra_node),
                 {"the intra-node communicator of group 'world'", "node after node"});
    expect_words(make(group, intra_node, intra_node), {"the inter-node communicator"});
    expect_words(make(world_of(4, rank, {3, 2, 1, 0}), intra_node, inter_node),
                 {"slice order", "use a flat communicator"});
    expect_words(make(group, intra_node, inter_node, {.timeout = milliseconds(0), .store = {}}),
                 {"must be positive"});
    Group with_slots = parts.intra_node;
    with_slots.slots = {1, 0};
    expect_words(make(group, world.communicator(with_slots), inter_node), {"slots of its own"});
    const CommunicatorPtr alone = world.communicator({"alone", {rank}, 0, {}});
    expect_words(make(group, alone, inter_node), {"4 ranks, but 1 on each of 2 nodes"});
  });
}

TEST(Hierarchical, WithoutSliceOrderItReducesButDoesNotGather) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level = make_two_level(world, world_of(4, rank), 2, 2);
    const at::Tensor whole = at::zeros({8});
    expect_words(
        text_of_error<InvalidArgument>([&] {
          two_level->all_gather(whole, at::zeros({2}), {.timeout = {}, .tag = "x"})->wait();
        }),
        {"hierarchical(local+local) all_gather 'x' in group 'world'", "slot l * 2 + j"});
    EXPECT_THROW(two_level->reduce_scatter(at::zeros({2}), whole)->wait(), InvalidArgument);
    // Nothing was sent, so the group is as before.
    const at::Tensor sum = at::full({3}, static_cast<double>(rank), at::kFloat);
    two_level->all_reduce(sum)->wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 6.0, at::kFloat)));
  });
}

TEST(Hierarchical, AsManyBytesLeaveANodeAsTheFormulaSays) {
  for (const Layout layout : {Layout{2, 2}, Layout{4, 2}, Layout{2, 4}, Layout{4, 4}}) {
    const int p = layout.size();
    const int k = layout.ranks_per_node;
    constexpr std::int64_t kNumel = 60;
    const std::int64_t whole_bytes = kNumel * 4 * p;
    for (const bool scatter : {false, true}) {
      std::vector<std::shared_ptr<Meter>> meters(static_cast<std::size_t>(p));
      std::vector<std::shared_ptr<Meter>> flat_meters(static_cast<std::size_t>(p));
      for (std::size_t rank = 0; rank < meters.size(); ++rank) {
        meters[rank] = std::make_shared<Meter>();
        flat_meters[rank] = std::make_shared<Meter>();
      }
      run_ranks(p, [&](int rank, ThreadWorld& world) {
        const Group group = sliced_world(layout.num_nodes, k, rank);
        const auto me = static_cast<std::size_t>(rank);
        const CommunicatorPtr two_level = make_two_level(
            world, group, layout.num_nodes, k, {}, [&](const CommunicatorPtr& inner, bool) {
              return make_recording_communicator(inner, inner->group(), meters[me], k);
            });
        const CommunicatorPtr flat =
            make_recording_communicator(world.communicator(group), group, flat_meters[me], k);
        for (const CommunicatorPtr& communicator : {two_level, flat}) {
          const at::Tensor whole = at::zeros({kNumel * p});
          const at::Tensor part = at::zeros({kNumel});
          if (scatter) {
            communicator->reduce_scatter(part, whole)->wait();
          } else {
            communicator->all_gather(whole, part)->wait();
          }
        }
      });
      for (int node = 0; node < layout.num_nodes; ++node) {
        std::int64_t two_level_bytes = 0;
        std::int64_t flat_bytes = 0;
        for (int rank = node * k; rank < (node + 1) * k; ++rank) {
          const auto of = static_cast<std::size_t>(rank);
          two_level_bytes += meters[of]->value("comm/sent_inter_node_bytes");
          flat_bytes += flat_meters[of]->value("comm/sent_inter_node_bytes");
        }
        EXPECT_EQ(two_level_bytes, (p - k) * (whole_bytes / p));
        EXPECT_EQ(flat_bytes, (p - 1) * (whole_bytes / p));
      }
    }
  }
}

// --- Order of stages ---------------------------------------------------------------------------

/// Which inner operations have ended, by level and tag; lets a wait of one depend on another's.
class Events {
 public:
  void ended(const std::string& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    changed_.notify_all();
  }
  bool wait_for(const std::string& event) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] {
      return std::find(events_.begin(), events_.end(), event) != events_.end();
    });
  }
  std::vector<std::string> events() {
    const std::lock_guard lock(mutex_);
    return events_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> events_;
};

/// Reports the end of each operation to `events`, after `before_end` allowed it.
class ReportingCommunicator final : public Communicator {
 public:
  using BeforeEnd = std::function<void(const std::string& tag)>;

  ReportingCommunicator(CommunicatorPtr inner, std::string level, std::shared_ptr<Events> events,
                        BeforeEnd before_end)
      : Communicator(inner->group()),
        inner_(std::move(inner)),
        level_(std::move(level)),
        events_(std::move(events)),
        before_end_(std::move(before_end)) {}
  [[nodiscard]] std::string_view backend() const noexcept override { return inner_->backend(); }
  void abort(std::string_view reason) override { inner_->abort(reason); }

 private:
  class ReportingWork final : public Work {
   public:
    ReportingWork(WorkPtr inner, ReportingCommunicator& owner, std::string tag)
        : inner_(std::move(inner)), owner_(owner), tag_(std::move(tag)) {}
    void wait() override {
      inner_->wait();
      owner_.before_end_(tag_);
      owner_.events_->ended(owner_.level_ + " " + tag_);
    }
    bool test() override { return inner_->test(); }

   private:
    WorkPtr inner_;
    ReportingCommunicator& owner_;
    std::string tag_;
  };

  WorkPtr reporting(WorkPtr work, const CommOptions& options) {
    return std::make_unique<ReportingWork>(std::move(work), *this, options.tag);
  }
  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    return reporting(inner_->all_gather(std::move(output), std::move(input), options), options);
  }
  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    return reporting(inner_->reduce_scatter(std::move(output), std::move(input), op, options),
                     options);
  }
  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    return reporting(inner_->all_reduce(std::move(tensor), op, options), options);
  }
  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    return reporting(inner_->broadcast(std::move(tensor), root, options), options);
  }
  void do_barrier(const CommOptions& options) override { inner_->barrier(options); }
  CommunicatorPtr do_split(Group part) override { return inner_->split(std::move(part)); }

  CommunicatorPtr inner_;
  std::string level_;
  std::shared_ptr<Events> events_;
  BeforeEnd before_end_;
};

/// Issues `num_calls` gathers or scatters; the second stage of call i ends only after the first
/// stage of call i + 1 has: without overlap nothing would ever end.
void expect_overlap(bool scatter) {
  const std::string first = scatter ? "intra" : "inter";
  const std::string second = scatter ? "inter" : "intra";
  constexpr int kCalls = 6;
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const auto events = std::make_shared<Events>();
    const auto decorate = [&](const CommunicatorPtr& inner, bool is_inter_node) -> CommunicatorPtr {
      const std::string level = is_inter_node ? "inter" : "intra";
      return std::make_shared<ReportingCommunicator>(
          inner, level, events, [=](const std::string& tag) {
            const int next = std::stoi(tag) + 1;
            if (level == second && next < kCalls) {
              EXPECT_TRUE(events->wait_for(first + " " + std::to_string(next))) << tag;
            }
          });
    };
    const CommunicatorPtr two_level =
        make_two_level(world, sliced_world(2, 2, rank), 2, 2, {}, decorate);
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int call = 0; call < kCalls; ++call) {
      const CommOptions options{.timeout = {}, .tag = std::to_string(call)};
      tensors.push_back(at::zeros({40}));
      tensors.push_back(at::full({10}, static_cast<double>(rank + call), at::kFloat));
      const at::Tensor& whole = tensors[tensors.size() - 2];
      works.push_back(
          scatter ? two_level->reduce_scatter(tensors.back(), whole, ReduceOp::kSum, options)
                  : two_level->all_gather(whole, tensors.back(), options));
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    // Each lane in the order of issue; the first stage of a call before its second.
    std::map<std::string, std::size_t> place;
    const std::vector<std::string> ended = events->events();
    ASSERT_EQ(ended.size(), 2U * kCalls);
    for (std::size_t i = 0; i < ended.size(); ++i) {
      place[ended[i]] = i;
    }
    for (int call = 0; call < kCalls; ++call) {
      const std::string tag = std::to_string(call);
      EXPECT_LT(place.at(first + " " + tag), place.at(second + " " + tag));
      if (call + 1 < kCalls) {
        const std::string next = std::to_string(call + 1);
        EXPECT_LT(place.at(first + " " + tag), place.at(first + " " + next));
        EXPECT_LT(place.at(second + " " + tag), place.at(second + " " + next));
        EXPECT_LT(place.at(first + " " + next), place.at(second + " " + tag));
      }
    }
  });
}

TEST(Hierarchical, TheNextGatherCrossesNodesWhileThisOneSpreadsInside) { expect_overlap(false); }
TEST(Hierarchical, TheNextScatterSumsInsideWhileThisOneCrossesNodes) { expect_overlap(true); }

TEST(Hierarchical, MixedCallsInFlightKeepTheirOrderUnderDelays) {
  run_ranks(6, [](int rank, ThreadWorld& world) {
    const auto decorate = [](const CommunicatorPtr& inner, bool is_inter_node) {
      return make_delayed_communicator(
          inner, {.seed = is_inter_node ? 1U : 2U, .max_delay = std::chrono::microseconds(500)});
    };
    const CommunicatorPtr two_level =
        make_two_level(world, sliced_world(3, 2, rank), 3, 2, {}, decorate);
    const int slot = two_level->group().my_slot();
    std::vector<at::Tensor> wholes;
    std::vector<at::Tensor> parts;
    std::vector<at::Tensor> sums;
    std::vector<WorkPtr> works;
    for (int call = 0; call < 20; ++call) {
      wholes.push_back(at::zeros({60}));
      parts.push_back(at::full({10}, static_cast<double>(slot + call), at::kFloat));
      sums.push_back(numbers(1001, rank + call));
      works.push_back(two_level->all_gather(wholes.back(), parts.back()));
      works.push_back(two_level->all_reduce(sums.back(), ReduceOp::kMax));
      wholes.push_back(at::full({60}, static_cast<double>(call), at::kFloat));
      parts.push_back(at::zeros({10}));
      works.push_back(two_level->reduce_scatter(parts.back(), wholes.back()));
    }
    while (!works.empty()) {
      works.back()->wait();
      works.pop_back();
    }
    for (std::size_t call = 0; call < 20; ++call) {
      const at::Tensor expected =
          at::arange(60, at::kFloat).div(10, "floor").add(static_cast<double>(call));
      EXPECT_TRUE(at::equal(wholes[2 * call], expected));
      EXPECT_TRUE(at::equal(parts[2 * call + 1],
                            at::full({10}, 6.0 * static_cast<double>(call), at::kFloat)));
    }
  });
}

// --- Failures ----------------------------------------------------------------------------------

TEST(HierarchicalFailures, AFailedStageNamesTheCallAndItsCauseOnAllRanks) {
  for (const bool fail_inter_node : {false, true}) {
    run_ranks(4, [&](int rank, ThreadWorld& world) {
      const auto decorate = [&](const CommunicatorPtr& inner, bool is_inter_node) {
        const bool fails = rank == 2 && is_inter_node == fail_inter_node;
        return make_delayed_communicator(inner, {.fail_at_call = fails ? 1 : -1});
      };
      const CommunicatorPtr two_level =
          make_two_level(world, sliced_world(2, 2, rank), 2, 2, {.store = world.store()}, decorate);
      const at::Tensor whole = at::zeros({40});
      const at::Tensor part = at::zeros({10});
      two_level->all_gather(whole, part)->wait();
      const WorkPtr failing = two_level->all_gather(whole, part, {.timeout = {}, .tag = "h.3"});
      const std::string call = "all_gather 'h.3' in group 'world' on rank " + std::to_string(rank) +
                               " of 4 (global rank " + std::to_string(rank) + ")";
      if (rank == 2) {
        expect_words(text_of_error<CommError>([&] { failing->wait(); }),
                     {"hierarchical(local+local) " + call, "stage of all_gather 'h.3' failed",
                      "injected failure at call 1"});
      } else {
        try {  // The data of this call may have come before the failure.
          failing->wait();
        } catch (const CommError& error) {
          expect_words(error.what(), {call, "injected failure at call 1"});
        }
      }
      EXPECT_TRUE(failing->test());
      // The next call needs rank 2, so it cannot end well; from then on everybody knows.
      EXPECT_THROW(two_level->barrier(), CommError);
      expect_words(
          text_of_error<CommError>([&] { two_level->barrier({.timeout = {}, .tag = "b"}); }),
          {"barrier 'b'", "unusable since", "injected failure at call 1"});
      EXPECT_THROW(static_cast<void>(two_level->all_reduce(part)), CommError);
    });
  }
}

/// Rank 3 of 4 is late; rank 1 meets it between the nodes and shares no inner group with the rank
/// that ends the waiting.
template <typename End>
void expect_news_of_a_third(milliseconds limit_of_rank_0, End end,
                            const std::vector<std::string>& words) {
  const auto start = std::chrono::steady_clock::now();
  std::array<std::string, 4> texts;
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level = make_two_level(
        world, world_of(4, rank), 2, 2, {.timeout = milliseconds(50'000), .store = world.store()});
    if (rank == 3) {
      for (int round = 0; round < 2000; ++round) {
        std::this_thread::sleep_for(milliseconds(10));
        if (world.store()->has("rank 1 has ended")) {
          return;
        }
      }
      ADD_FAILURE() << "rank 1 heard nothing";
      return;
    }
    const at::Tensor tensor = at::zeros({4});
    const milliseconds limit = rank == 0 ? limit_of_rank_0 : milliseconds(0);
    const WorkPtr work =
        two_level->all_reduce(tensor, ReduceOp::kSum, {.timeout = limit, .tag = "late"});
    if (rank == 0) {
      end(*two_level);
    }
    texts[static_cast<std::size_t>(rank)] = text_of_error<CommError>([&] { work->wait(); });
    world.store()->set("rank " + std::to_string(rank) + " has ended", "");
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(25));
  for (const std::size_t rank : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
    expect_words(texts[rank], words);
    expect_words(texts[rank], {"all_reduce 'late' in group 'world' on rank"});
  }
}

TEST(HierarchicalFailures, ATimeLimitReachesThoseWhoWaitForSomebodyElse) {
  expect_news_of_a_third(milliseconds(100), [](Communicator&) {}, {"100 ms"});
}

TEST(HierarchicalFailures, AnAbortReachesThoseWhoWaitForSomebodyElse) {
  expect_news_of_a_third(milliseconds(0),
                         [](Communicator& communicator) {
                           std::this_thread::sleep_for(milliseconds(20));
                           communicator.abort("the user pressed Ctrl-C");
                         },
                         {"aborted by global rank 0", "the user pressed Ctrl-C"});
}

TEST(HierarchicalFailures, DifferentOperationsAreNamedOnEveryRank) {
  // Rank 3's broadcast meets nobody whose inner operation differs: its rail and its node wait
  // elsewhere. Only the watch sees it.
  std::array<std::string, 4> texts;
  run_ranks(4, [&](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level =
        make_two_level(world, sliced_world(2, 2, rank), 2, 2, {.store = world.store()});
    texts[static_cast<std::size_t>(rank)] = text_of_error<ScheduleError>([&] {
      if (rank == 1) {
        two_level->all_reduce(at::zeros({40}), ReduceOp::kSum, {.timeout = {}, .tag = "norm"})
            ->wait();
      } else {
        two_level->all_gather(at::zeros({40}), at::zeros({10}), {.timeout = {}, .tag = "h.3"})
            ->wait();
      }
    });
  });
  for (const std::string& text : texts) {
    expect_words(text, {"in group 'world'", "global rank 1", "all_reduce 'norm'",
                        "All ranks must issue the same operations in the same order"});
  }
}

TEST(HierarchicalFailures, ALimitCountsForOperationsThatHaveNotStarted) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level =
        make_two_level(world, world_of(4, rank), 2, 2, {.store = world.store()});
    if (rank == 3) {
      while (!world.store()->has("done")) {
        std::this_thread::sleep_for(milliseconds(5));
      }
      return;
    }
    const at::Tensor tensor = at::zeros({4});
    const WorkPtr first =
        two_level->all_reduce(tensor, ReduceOp::kSum, {.timeout = {}, .tag = "a"});
    const milliseconds limit = rank == 0 ? milliseconds(50) : milliseconds(0);
    const WorkPtr second =
        two_level->all_reduce(at::zeros({4}), ReduceOp::kSum, {.timeout = limit, .tag = "b"});
    if (rank == 0) {
      expect_words(text_of_error<TimeoutError>([&] { second->wait(); }),
                   {"all_reduce 'b' did not end within its time limit of 50 ms",
                    "waits for operations that were issued before it"});
      world.store()->set("done", "");
    }
    EXPECT_THROW(first->wait(), CommError);
    EXPECT_THROW(second->wait(), CommError);
  });
}

TEST(HierarchicalFailures, ARankThatLeavesIsNamed) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    CommunicatorPtr two_level =
        make_two_level(world, world_of(4, rank), 2, 2, {.store = world.store()});
    two_level->barrier();
    if (rank == 2) {
      two_level.reset();
      return;
    }
    expect_words(text_of_error<CommError>([&] { two_level->barrier(); }),
                 {"barrier", "global rank 2 left the group"});
  });
}

TEST(HierarchicalFailures, AnUnwindingRankWaitsForNobody) {
  for (const bool keeps_work : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(run_ranks(4,
                           [&](int rank, ThreadWorld& world) {
                             WorkPtr outlives;
                             const CommunicatorPtr two_level = make_two_level(
                                 world, world_of(4, rank), 2, 2, {.store = world.store()});
                             if (rank == 1) {
                               std::this_thread::sleep_for(milliseconds(100));
                               expect_words(text_of_error<CommError>([&] { two_level->barrier(); }),
                                            {"global rank 0"});
                               return;
                             }
                             if (rank != 0) {
                               EXPECT_THROW(two_level->barrier(), CommError);
                               return;
                             }
                             WorkPtr pending = two_level->all_reduce(at::zeros({4}));
                             if (!keeps_work) {
                               outlives = std::move(pending);
                             }
                             throw std::runtime_error("something else broke");
                           }),
                 std::runtime_error);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

TEST(HierarchicalFailures, ItsDestructorWaitsForOperationsInFlight) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    CommunicatorPtr two_level = make_two_level(world, sliced_world(2, 2, rank), 2, 2);
    const at::Tensor whole = at::zeros({40});
    const at::Tensor part = at::full({10}, static_cast<double>(two_level->group().my_slot()));
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(50));
    }
    const WorkPtr work = two_level->all_gather(whole, part.to(at::kFloat));
    two_level.reset();
    EXPECT_TRUE(work->test());
    work->wait();
    EXPECT_TRUE(at::equal(whole, at::arange(40, at::kFloat).div(10, "floor")));
  });
}

TEST(HierarchicalFailures, ADestructorWithAWorkThatCannotEndEndsAtItsLimit) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    CommunicatorPtr two_level = make_two_level(world, world_of(4, rank), 2, 2);
    if (rank == 3) {
      return;
    }
    const WorkPtr work = two_level->all_reduce(at::zeros({4}), ReduceOp::kSum,
                                               {.timeout = milliseconds(300), .tag = ""});
    two_level.reset();
    EXPECT_THROW(work->wait(), CommError);
  });
}

// --- Parts and memory --------------------------------------------------------------------------

TEST(HierarchicalParts, PartsWithTheSamePlacesOnSomeNodesAreSplit) {
  run_ranks(6, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level =
        make_two_level(world, sliced_world(3, 2, rank), 3, 2, {.store = world.store()});
    const int node = rank / 2;
    const int place = rank % 2;
    // In flight while the group is split: the order of the lanes holds for that, too.
    const at::Tensor before = at::full({5}, 1.0, at::kFloat);
    const WorkPtr in_flight = two_level->all_reduce(before);

    const CommunicatorPtr on_node =
        two_level->split({"node", {node * 2, node * 2 + 1}, place, {1, 0}});
    EXPECT_EQ(on_node->backend(), "local");
    const at::Tensor pair = at::zeros({2});
    on_node->all_gather(pair, at::full({1}, static_cast<double>(rank), at::kFloat))->wait();
    EXPECT_EQ(pair[0].item<float>(), static_cast<float>(node * 2 + 1));

    const CommunicatorPtr rail =
        two_level->split({"rail", {place, place + 2, place + 4}, node, {}});
    const at::Tensor sum = at::full({1}, static_cast<double>(rank), at::kFloat);
    rail->all_reduce(sum)->wait();
    EXPECT_EQ(sum.item<float>(), static_cast<float>(3 * place + 6));

    if (node != 1) {  // Nodes 0 and 2.
      const std::vector<int> ranks = {0, 1, 4, 5};
      const int me = (node == 0 ? 0 : 2) + place;
      const CommunicatorPtr outer = two_level->split({"outer", ranks, me, {0, 2, 1, 3}});
      EXPECT_EQ(outer->backend(), "hierarchical(local+local)");
      const at::Tensor whole = at::zeros({4});
      outer->all_gather(whole, at::full({1}, static_cast<double>(rank), at::kFloat))->wait();
      EXPECT_TRUE(at::equal(whole, at::tensor({0.0F, 4.0F, 1.0F, 5.0F})));
    }
    in_flight->wait();
    EXPECT_TRUE(at::equal(before, at::full({5}, 6.0, at::kFloat)));
    if (rank == 0 || rank == 3) {
      expect_words(text_of_error<InvalidArgument>([&] {
                     static_cast<void>(two_level->split({"odd", {0, 3}, rank / 3, {}}));
                   }),
                   {"split of group 'world'", "'odd'", "flat communicator"});
    }
    two_level->barrier();
  });
}

TEST(HierarchicalParts, MemoryIsThereWhileOperationsWait) {
  run_ranks(4, [](int rank, ThreadWorld& world) {
    const CommunicatorPtr two_level = make_two_level(world, world_of(4, rank), 2, 2);
    if (rank == 3) {
      static_cast<void>(world.store()->get("allocated", milliseconds(20'000)));
    }
    const at::Tensor tensor = at::full({4}, 1.0, at::kFloat);
    const WorkPtr work = two_level->all_reduce(tensor);
    if (rank == 0) {
      const at::Tensor memory = two_level->allocate(1000);
      two_level->register_memory(memory);
      world.store()->set("allocated", "");
    }
    work->wait();
    EXPECT_TRUE(at::equal(tensor, at::full({4}, 4.0, at::kFloat)));
  });
}

}  // namespace
}  // namespace hopshard
