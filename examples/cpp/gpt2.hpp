// GPT-2 in ATen operators: the twin of examples/gpt2/model.py, operator by operator, so that equal
// seeds give equal losses. Tensors and functions only; whoever has parameters as at::Tensor, from
// torch::nn or not, can hand them to ShardEngine like this. Next: train_gpt2.cpp.
//
// Shapes in the comments: B batch, T tokens, C hidden, H heads, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "hopshard/runtime/shard_engine.hpp"

namespace example {

/// Shape of one GPT-2; the defaults are the Python example's "tiny".
struct GPT2Config {
  std::int64_t num_layers = 4;
  std::int64_t num_heads = 4;
  std::int64_t hidden = 128;
  std::int64_t context = 64;
  std::int64_t vocabulary_size = 256;
};

// torch's layers draw initial values of their own when they are built, and GPT-2 overwrites them.
// They are drawn here too: the random numbers that follow must be those that Python gets.

struct Embedding {
  at::Tensor weight;

  Embedding(std::int64_t num_rows, std::int64_t width) : weight(at::empty({num_rows, width})) {
    weight.normal_();
  }
  [[nodiscard]] at::Tensor operator()(const at::Tensor& indices) const {
    return at::embedding(weight, indices);
  }
};

struct Linear {
  at::Tensor weight;
  at::Tensor bias;

  Linear(std::int64_t num_in, std::int64_t num_out)
      : weight(at::empty({num_out, num_in})), bias(at::empty({num_out})) {
    weight.uniform_(-1, 1);
    bias.uniform_(-1, 1);
  }
  void reset(double std) {
    weight.normal_(0.0, std);
    bias.zero_();
  }
  [[nodiscard]] at::Tensor operator()(const at::Tensor& x) const {
    return at::linear(x, weight, bias);
  }
};

struct LayerNorm {
  at::Tensor weight;
  at::Tensor bias;

  explicit LayerNorm(std::int64_t width) : weight(at::ones({width})), bias(at::zeros({width})) {}
  [[nodiscard]] at::Tensor operator()(const at::Tensor& x) const {
    return at::layer_norm(x, weight.sizes(), weight, bias);
  }
};

/// One unit: its parameters travel together.
struct Block {
  std::int64_t num_heads;
  LayerNorm norm_1;
  Linear qkv;
  Linear out;
  LayerNorm norm_2;
  Linear up;
  Linear down;

  explicit Block(const GPT2Config& config)
      : num_heads(config.num_heads),
        norm_1(config.hidden),
        qkv(config.hidden, 3 * config.hidden),
        out(config.hidden, config.hidden),
        norm_2(config.hidden),
        up(config.hidden, 4 * config.hidden),
        down(4 * config.hidden, config.hidden) {}

  void reset(double residual_std) {
    qkv.reset(0.02);
    out.reset(residual_std);
    up.reset(0.02);
    down.reset(residual_std);
  }

  [[nodiscard]] at::Tensor operator()(const at::Tensor& x) const {
    const at::Tensor y = x.add(attention(norm_1(x)));  // [B, T, C]
    return y.add(down(at::gelu(up(norm_2(y)), "tanh")));
  }

  [[nodiscard]] at::Tensor attention(const at::Tensor& x) const {
    // [B, T, 3C] as three of [B, T, H, C / H].
    const std::vector<at::Tensor> parts = qkv(x).unflatten(-1, {3, num_heads, -1}).unbind(2);
    const at::Tensor y = at::scaled_dot_product_attention(  // [B, H, T, C / H]
        parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2),
        /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return out(y.transpose(1, 2).flatten(2));  // [B, T, C]
  }
};

class GPT2 {
 public:
  explicit GPT2(const GPT2Config& config)
      : token_embedding_(config.vocabulary_size, config.hidden),
        position_embedding_(config.context, config.hidden),
        blocks_(make_blocks(config)),
        norm_(config.hidden) {
    // Python's output layer is built before it is tied to the embedding. So it draws once here, and
    // once more below, where it overwrites the embedding.
    at::empty({config.vocabulary_size, config.hidden}).uniform_(-1, 1);
    token_embedding_.weight.normal_(0.0, 0.02);
    position_embedding_.weight.normal_(0.0, 0.02);
    // Two additions per layer; so the stream's variance does not grow with the depth.
    const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config.num_layers));
    for (Block& block : blocks_) {
      block.reset(residual_std);
    }
    token_embedding_.weight.normal_(0.0, 0.02);
    for (const hopshard::UnitSpec& unit : units()) {
      for (const at::Tensor& parameter : unit.parameters) {
        parameter.set_requires_grad(true);
      }
    }
  }

  /// For ShardEngine: the root holds what no block holds; unit i + 1 is block i.
  [[nodiscard]] std::vector<hopshard::UnitSpec> units() const {
    std::vector<hopshard::UnitSpec> units{
        {.name = "root", .parameter_names = {}, .parameters = {}}};
    const auto add = [&](const std::string& name, const at::Tensor& parameter) {
      units.back().parameter_names.push_back(name);
      units.back().parameters.push_back(parameter);
    };
    const auto add_both = [&](const std::string& name, const auto& layer) {
      add(name + ".weight", layer.weight);
      add(name + ".bias", layer.bias);
    };
    add("token_embedding.weight", token_embedding_.weight);
    add("position_embedding.weight", position_embedding_.weight);
    add_both("norm", norm_);
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = blocks_[i];
      const std::string name = "h." + std::to_string(i);
      units.push_back({.name = name, .parameter_names = {}, .parameters = {}});
      add_both(name + ".norm_1", block.norm_1);
      add_both(name + ".attention.qkv", block.qkv);
      add_both(name + ".attention.out", block.out);
      add_both(name + ".norm_2", block.norm_2);
      add_both(name + ".mlp.up", block.up);
      add_both(name + ".mlp.down", block.down);
    }
    return units;
  }

  /// The mean cross-entropy in nats. Collective: reports to `engine` what runs, which gathers it.
  /// @param tokens   int64 [B, T].
  /// @param targets  int64 [B, T]: the token that follows each one.
  [[nodiscard]] at::Tensor loss(hopshard::ShardEngine& engine, const at::Tensor& tokens,
                                const at::Tensor& targets) const {
    engine.before_root_forward();
    at::Tensor x = token_embedding_(tokens).add(position_embedding_(at::arange(tokens.size(1))));
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const int unit = static_cast<int>(i) + 1;
      engine.before_forward(unit);
      x = blocks_[i](x);  // [B, T, C]
      engine.after_forward(unit, {x});
    }
    const at::Tensor logits = at::linear(norm_(x), token_embedding_.weight);  // [B, T, V]
    const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
    engine.after_root_forward({loss});
    return loss;
  }

 private:
  [[nodiscard]] static std::vector<Block> make_blocks(const GPT2Config& config) {
    std::vector<Block> blocks;
    for (std::int64_t i = 0; i < config.num_layers; ++i) {
      blocks.emplace_back(config);
    }
    return blocks;
  }

  Embedding token_embedding_;  // Its weight is the output layer's, too.
  Embedding position_embedding_;
  std::vector<Block> blocks_;
  LayerNorm norm_;
};

}  // namespace example
