// Shards, masters and whole parameters, over rank threads.
#include "hopshard/runtime/shard_store.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <map>

#include "hopshard/comm/process_groups.hpp"
#include "hopshard/core/error.hpp"
#include "support/thread_world.hpp"

namespace hopshard {
namespace {

using testing::run_ranks;

at::Tensor numbers(at::IntArrayRef sizes, double first) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) {
    numel *= size;
  }
  return at::arange(numel, at::kFloat).add(first).reshape(sizes);
}

/// Root, one unit of three dtypes with a frozen weight and odd layouts, one empty unit.
std::vector<UnitSpec> make_units(double first) {
  const auto grad = [](const at::Tensor& value) {
    return at::Tensor(value).set_requires_grad(true);
  };
  return {{"", {"embedding"}, {grad(numbers({7, 11}, first))}},
          {"h",
           {"weight", "half", "frozen", "double", "channels", "none"},
           {grad(numbers({9, 5}, first + 100).t()), grad(numbers({33}, first).to(at::kBFloat16)),
            numbers({6}, first + 300), grad(numbers({5}, first).to(at::kDouble)),
            grad(numbers({2, 3, 2, 2}, first).contiguous(at::MemoryFormat::ChannelsLast)),
            grad(at::empty({0, 4}))}},
          {"empty", {}, {}}};
}

std::vector<at::Tensor> values_of(const std::vector<UnitSpec>& units) {
  std::vector<at::Tensor> values;
  for (const UnitSpec& unit : units) {
    for (const at::Tensor& parameter : unit.parameters) {
      values.push_back(parameter.detach().clone());
    }
  }
  return values;
}

void gather(ShardStore& store, int unit) {
  store.begin_gather(unit);
  store.finish_gather(unit);
}

struct Shards {
  Shards(LocalHub& hub, const GroupLayout& layout, int rank, const std::vector<UnitSpec>& units)
      : groups(make_process_groups(layout, rank,
                                   [&](const Group& group) { return hub.communicator(group); })),
        store(units, groups.world, groups.sharding, pool) {}

  [[nodiscard]] int index_of(const std::string& name) const {
    for (std::size_t i = 0; i < store.parameters().size(); ++i) {
      if (store.parameters()[i].name == name) {
        return static_cast<int>(i);
      }
    }
    throw std::out_of_range(name);
  }

  ProcessGroups groups;
  BufferPool pool;
  ShardStore store;
};

class Store : public ::testing::TestWithParam<int> {  // The degree, of 4 ranks on 2 nodes.
 protected:
  static void run(const std::function<void(int rank, Shards& shards, std::vector<UnitSpec>& units,
                                           std::map<std::string, at::Tensor>& values)>& body) {
    run_ranks(4, [&](int rank, LocalHub& hub) {
      std::vector<UnitSpec> units = make_units(rank * 1000.0);
      std::map<std::string, at::Tensor> values;  // Rank 0's.
      const std::vector<at::Tensor> of_rank_0 = values_of(make_units(0));
      std::size_t next = 0;
      for (const UnitSpec& unit : units) {
        for (const std::string& name : unit.parameter_names) {
          values[name] = of_rank_0[next++];
        }
      }
      Shards shards(hub, GroupLayout(4, 2, GetParam()), rank, units);
      body(rank, shards, units, values);
      EXPECT_EQ(shards.pool.taken_bytes(), 0);
    });
  }
};

TEST_P(Store, GathersRankZerosValues) {
  run([](int, Shards& shards, std::vector<UnitSpec>& units, auto& values) {
    for (int round = 0; round < 2; ++round) {
      for (int unit = 0; unit < 3; ++unit) {
        gather(shards.store, unit);
        for (std::size_t i = 0; i < units[static_cast<std::size_t>(unit)].parameters.size(); ++i) {
          const UnitSpec& spec = units[static_cast<std::size_t>(unit)];
          EXPECT_TRUE(at::equal(spec.parameters[i], values[spec.parameter_names[i]]))
              << spec.parameter_names[i];
        }
        shards.store.release(unit);
        shards.store.release(unit);  // Nothing happens.
      }
    }
    EXPECT_TRUE(shards.store.is_trainable(1));
    EXPECT_FALSE(shards.store.is_trainable(2));
    EXPECT_EQ(shards.store.arenas().size(), 2u);  // fp32 and fp64.
  });
}

TEST_P(Store, PiecesOfAllRanksMakeUpEachParameter) {
  const GroupLayout layout(4, 2, GetParam());
  std::map<std::string, std::vector<int>> covered;
  std::mutex mutex;
  run([&](int rank, Shards& shards, std::vector<UnitSpec>&, auto& values) {
    if (layout.sharding_group(rank).front() != 0) {
      return;
    }
    const std::lock_guard lock(mutex);
    for (const ParameterPlace& place : shards.store.parameters()) {
      std::vector<int>& times = covered[place.name];
      times.resize(static_cast<std::size_t>(values[place.name].numel()));
      for (std::int64_t i = 0; i < place.piece_numel; ++i) {
        ++times.at(static_cast<std::size_t>(place.piece_in_parameter + i));
      }
    }
  });
  EXPECT_EQ(covered.size(), 7u);
  for (const auto& [name, times] : covered) {
    EXPECT_EQ(std::count(times.begin(), times.end(), 1), std::ssize(times)) << name;
  }
}

TEST_P(Store, WriteBackKeepsChangesOfWholeParameters) {
  run([](int, Shards& shards, std::vector<UnitSpec>& units, auto& values) {
    const at::NoGradGuard no_grad;
    gather(shards.store, 1);
    for (std::size_t i = 0; i < 5; ++i) {
      at::Tensor parameter = units[1].parameters[i];
      parameter.mul_(2);
    }
    units[1].parameters[0].set_data(units[1].parameters[0].add(1));  // Rebound, as users do.
    shards.store.write_back(1);
    shards.store.release(1);
    shards.store.refresh_shards();  // Masters follow, or this undoes it.
    gather(shards.store, 1);
    for (std::size_t i = 0; i < 5; ++i) {
      const at::Tensor expected = values[units[1].parameter_names[i]].mul(2).add(i == 0 ? 1 : 0);
      EXPECT_TRUE(at::equal(units[1].parameters[i], expected)) << units[1].parameter_names[i];
    }
    shards.store.release(1);
    EXPECT_THROW(shards.store.write_back(1), ScheduleError);
  });
}

TEST_P(Store, WritesAndGathersSingleParameters) {
  run([](int, Shards& shards, std::vector<UnitSpec>& units, auto& values) {
    const int weight = shards.index_of("weight");
    const at::Tensor full = numbers({5, 9}, 5000);
    shards.store.write_parameter(weight, full);
    gather(shards.store, 1);
    EXPECT_TRUE(at::equal(units[1].parameters[0], full));
    EXPECT_TRUE(at::equal(units[1].parameters[4], values["channels"]));
    shards.store.release(1);
    for (const char* name : {"weight", "channels", "double", "half", "embedding"}) {
      const int index = shards.index_of(name);
      const ParameterPlace& place = shards.store.parameters()[static_cast<std::size_t>(index)];
      const int arena = shards.store.buffers()[static_cast<std::size_t>(place.buffer)].arena;
      const at::Tensor gathered = shards.store.gather_full(
          shards.store.arenas()[static_cast<std::size_t>(arena)], index, "test");
      const at::Tensor& expected = std::string(name) == "weight" ? full : values[name];
      EXPECT_TRUE(at::equal(gathered, expected.to(gathered.scalar_type()))) << name;
    }
    const int frozen = shards.index_of("frozen");
    EXPECT_THROW(static_cast<void>(shards.store.piece_of(shards.store.arenas()[0], frozen)),
                 InvalidArgument);
    EXPECT_THROW(static_cast<void>(shards.store.gather_full(shards.store.arenas()[0], frozen, "t")),
                 InvalidArgument);
  });
}

// 16-bit weights are trained through an fp32 master; fp32 ones are their own.
TEST_P(Store, ShardsFollowTheirMasters) {
  run([](int, Shards& shards, std::vector<UnitSpec>& units, auto& values) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& arena : shards.store.arenas()) {
      at::Tensor master = arena;
      master.add_(1);
    }
    for (const ShardedBuffer& buffer : shards.store.buffers()) {
      if (buffer.is_trainable) {
        EXPECT_EQ(buffer.shard.is_same(buffer.master), buffer.flat->dtype() != at::kBFloat16);
      }
    }
    shards.store.refresh_shards();
    gather(shards.store, 1);
    for (std::size_t i = 0; i < 5; ++i) {
      const at::Tensor expected = values[units[1].parameter_names[i]].add(i == 2 ? 0 : 1);
      EXPECT_TRUE(at::equal(units[1].parameters[i], expected)) << units[1].parameter_names[i];
    }
    shards.store.release(1);
  });
}

INSTANTIATE_TEST_SUITE_P(Degrees, Store, ::testing::Values(1, 2, 4));

TEST(ShardStore, NamesParametersThatItCannotHold) {
  LocalHub hub(1);
  const GroupLayout layout(1, 1, 1);
  const auto text_of = [&](const std::vector<UnitSpec>& units) -> std::string {
    try {
      const Shards shards(hub, layout, 0, units);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  const at::Tensor shared = numbers({3}, 0).set_requires_grad(true);
  EXPECT_NE(
      text_of({{"", {"a"}, {shared}}, {"h", {"b"}, {shared}}}).find("'b' belongs to two units"),
      std::string::npos);
  EXPECT_NE(text_of({{"", {"c"}, {numbers({2}, 0).to_sparse()}}}).find("'c' is on cpu"),
            std::string::npos);
}

}  // namespace
}  // namespace hopshard
