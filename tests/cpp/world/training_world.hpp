// A small model in plain ATen operators, trained by rank threads and by one process. All values are
// small integers, so that every sum is exact in fp32 and every comparison is bit for bit.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hopshard/comm/local.hpp"
#include "hopshard/comm/process_groups.hpp"
#include "hopshard/runtime/shard_engine.hpp"
#include "support/thread_world.hpp"

namespace hopshard::testing {

/// -1, 0 and 1 in an order that depends on `seed`.
inline at::Tensor small_integers(at::IntArrayRef sizes, std::int64_t seed) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) {
    numel *= size;
  }
  const at::Tensor index = at::arange(numel, at::kLong).add(seed * 7919);
  return index.mul(index)
      .add(index, 3)
      .remainder(101)
      .remainder(3)
      .sub(1)
      .to(at::kFloat)
      .reshape(sizes);
}

using Decorator = std::function<CommunicatorPtr(CommunicatorPtr)>;

inline ProcessGroups make_groups(LocalHub& hub, const GroupLayout& layout, int rank,
                                 const Decorator& decorate = {}, int secondary_degree = 0) {
  const auto factory = [&](const Group& group) {
    CommunicatorPtr communicator = hub.communicator(group);
    return decorate ? decorate(std::move(communicator)) : communicator;
  };
  return make_process_groups(layout, rank, factory, secondary_degree);
}

/// root: a weight that is used first and last; units: weight and bias, unit 2 with a frozen scale.
///
///   out = (… relu(relu((x E) W1 + b1) W2 * s + b2) …) E
struct Model {
  static constexpr int kWidth = 12;
  static constexpr int kNumUnits = 4;  // The root included.
  static constexpr int kBatch = 3;

  explicit Model(std::int64_t seed) {
    units.push_back({"", {"embedding"}, {parameter({kWidth, kWidth}, seed)}});
    for (int unit = 1; unit < kNumUnits; ++unit) {
      const std::string name = "h." + std::to_string(unit - 1);
      UnitSpec spec{name, {name + ".weight", name + ".bias"}, {}};
      spec.parameters.push_back(parameter({kWidth, kWidth}, seed + 10 * unit));
      spec.parameters.push_back(parameter({kWidth}, seed + 10 * unit + 1));
      if (unit == 2) {
        spec.parameter_names.push_back(name + ".scale");
        spec.parameters.push_back(small_integers({kWidth}, seed + 5));
      }
      units.push_back(spec);
    }
  }

  [[nodiscard]] at::Tensor root(const at::Tensor& x) const {
    return x.matmul(units[0].parameters[0]);
  }
  [[nodiscard]] at::Tensor unit(int unit, const at::Tensor& x) const {
    const UnitSpec& spec = units[static_cast<std::size_t>(unit)];
    at::Tensor y = x.matmul(spec.parameters[0]);
    if (unit == 2) {
      y = y.mul(spec.parameters[2]);
    }
    return y.add(spec.parameters[1]).relu();
  }

  /// Of one process, without an engine.
  [[nodiscard]] at::Tensor forward(at::Tensor x, const std::vector<int>& order) const {
    x = root(x);
    for (const int index : order) {
      x = unit(index, x);
    }
    return root(x);
  }

  /// Of a rank: reports what module hooks would.
  [[nodiscard]] at::Tensor forward(ShardEngine& engine, at::Tensor x,
                                   const std::vector<int>& order) const {
    engine.before_root_forward();
    x = root(x);
    for (const int index : order) {
      engine.before_forward(index);
      x = unit(index, x);
      engine.after_forward(index, {x});
    }
    x = root(x);
    engine.after_root_forward({x});
    return x;
  }

  /// All parameters in the order of ShardStore::parameters(): trainable ones of a unit first.
  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const UnitSpec& spec : units) {
      all.insert(all.end(), spec.parameters.begin(), spec.parameters.end());
    }
    return all;
  }

  std::vector<UnitSpec> units;

 private:
  static at::Tensor parameter(at::IntArrayRef sizes, std::int64_t seed) {
    return small_integers(sizes, seed).set_requires_grad(true);
  }
};

inline at::Tensor input_of(int rank, int step, int pass) {
  return small_integers({Model::kBatch, Model::kWidth}, 1000 + rank * 97 + step * 13 + pass * 5);
}

inline at::Tensor loss_of(const at::Tensor& output, int rank, int step, int pass) {
  return output.mul(small_integers(output.sizes(), 2000 + rank * 31 + step * 17 + pass * 3)).sum();
}

/// An element-wise step that keeps weights among -1, 0 and 1: exact for ever.
inline void update(const at::Tensor& weight, const at::Tensor& mean, int world_size) {
  const at::NoGradGuard no_grad;
  at::Tensor target = weight;
  target.sub_(mean.mul(world_size)).remainder_(3).sub_(1);
}

/// Which units a rank runs.
using OrderOf = std::function<std::vector<int>(int rank, int step, int pass)>;

inline std::vector<int> all_units(int /*rank*/, int /*step*/, int /*pass*/) { return {1, 2, 3}; }

/// Rank 0 runs all units, the others leave out some of their own choice.
inline std::vector<int> units_of_choice(int rank, int step, int pass) {
  std::vector<int> order;
  for (int unit = 1; unit < Model::kNumUnits; ++unit) {
    if (rank == 0 || (rank * 5 + step * 3 + pass * 7 + unit * 11) % 3 != 0) {
      order.push_back(unit);
    }
  }
  return order;
}

/// What one process computes that sees the data of all ranks.
struct Reference {
  struct Step {
    std::vector<at::Tensor> gradients;  ///< Means over the world; undefined if frozen.
    std::vector<at::Tensor> weights;    ///< After the step.
  };
  std::vector<Step> steps;

  Reference(int world_size, int num_steps, int num_passes, const OrderOf& order_of) {
    const Model model(/*seed=*/0);
    const std::vector<at::Tensor> parameters = model.parameters();
    for (int step = 0; step < num_steps; ++step) {
      for (int pass = 0; pass < num_passes; ++pass) {
        for (int rank = 0; rank < world_size; ++rank) {
          at::Tensor loss =
              loss_of(model.forward(input_of(rank, step, pass), order_of(rank, step, pass)), rank,
                      step, pass);
          loss.backward();
        }
      }
      Step result;
      for (const at::Tensor& parameter : parameters) {
        at::Tensor mean;
        if (parameter.requires_grad()) {
          // Beyond 2^24 fp32 would round, and the test would test nothing.
          EXPECT_LT(parameter.grad().abs().sum().item<float>(), float{1 << 24});
          EXPECT_GT(parameter.grad().abs().sum().item<float>(), 0.0f);
          mean = parameter.grad().div(world_size);
          update(parameter.detach(), mean, world_size);
          parameter.mutable_grad().reset();
        }
        result.gradients.push_back(mean);
        result.weights.push_back(parameter.detach().clone());
      }
      steps.push_back(std::move(result));
    }
  }
};

/// This rank's piece of each gradient equals the reference's, bit for bit.
inline void expect_gradients(ShardEngine& engine, const Reference::Step& expected) {
  const std::vector<at::Tensor>& arenas = engine.gradient_arenas();
  const ShardStore& store = engine.store();
  for (std::size_t i = 0; i < store.parameters().size(); ++i) {
    const ParameterPlace& place = store.parameters()[i];
    if (!place.is_trainable) {
      continue;
    }
    const int index = static_cast<int>(i);
    const int arena = store.buffers()[static_cast<std::size_t>(place.buffer)].arena;
    const at::Tensor mine = store.piece_of(arenas[static_cast<std::size_t>(arena)], index);
    EXPECT_TRUE(engine.has_gradient(index)) << place.name;
    EXPECT_TRUE(at::equal(mine, store.piece_from_full(index, expected.gradients[i])))
        << "gradient of " << place.name;
  }
}

/// Every gathered parameter equals the reference's, bit for bit. Collective.
inline void expect_weights(ShardEngine& engine, const Reference::Step& expected) {
  for (int unit = 0; unit < engine.store().num_units(); ++unit) {
    engine.pin(unit);
    for (std::size_t i = 0; i < expected.weights.size(); ++i) {
      const ParameterPlace& place = engine.store().parameters()[i];
      if (place.unit == unit) {
        EXPECT_TRUE(at::equal(place.parameter, expected.weights[i])) << place.name;
      }
    }
    engine.unpin(unit, /*write_back=*/false);
  }
}

inline void expect_all_sharded(const ShardEngine& engine) {
  for (const ShardedBuffer& buffer : engine.store().buffers()) {
    EXPECT_FALSE(buffer.flat->is_attached())
        << "unit '" << engine.store().unit_name(buffer.unit) << "' is still gathered";
  }
}

inline void step_shards(ShardEngine& engine) {
  const std::vector<at::Tensor>& gradients = engine.gradient_arenas();
  for (std::size_t arena = 0; arena < gradients.size(); ++arena) {
    update(engine.store().arenas()[arena], gradients[arena], engine.groups().world->size());
  }
  engine.end_step(/*stepped=*/true);
  engine.zero_gradients();
}

}  // namespace hopshard::testing
