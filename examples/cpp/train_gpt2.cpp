// Trains a GPT-2, sharded over the ranks that run this program, without Python.
//
//   python examples/gpt2/data.py runs/tokens                       # writes train.bin and val.bin
//   hopshard run -n 4 build/examples/cpp/train_gpt2 --degree 2
//   torchrun --no-python --nproc-per-node 4 build/examples/cpp/train_gpt2
//   build/examples/cpp/train_gpt2                                  # one rank, the same code
//
// Prints the losses of examples/gpt2/train.py with the same options and --max-seconds 0. What is
// hopshard's is in connect_groups, AdamW and train; the model's part is in gpt2.hpp.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_file.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <mutex>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "gpt2.hpp"
#include "hopshard/comm/process_groups.hpp"
#include "hopshard/comm/registry.hpp"
#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/optim/grad_norm.hpp"
#include "hopshard/optim/shard_update.hpp"
#include "hopshard/runtime/shard_engine.hpp"
#include "hopshard/topology/group_layout.hpp"
#include "launch.hpp"

namespace example {
namespace {

using hopshard::ConfigError;

// ---- Settings --------------------------------------------------------------------------

/// Everything that can be set; each field is an option of the command line.
struct Settings {
  std::string data = "runs/tokens";
  int degree = 0;
  int accumulation = 2;
  int batch_size = 8;
  int context = 64;
  int steps = 640;
  double learning_rate = 4e-3;
  int warm_up_steps = 40;
  double weight_decay = 0.1;
  double beta_2 = 0.98;
  double clip = 1.0;
  int seed = 1234;
  int log_every = 5;
  int eval_every = 80;
  int eval_batches = 2;
  int final_eval_batches = 12;
};

struct Option {
  std::string name;
  std::variant<int*, double*, std::string*> value;
  std::string text;
};

std::vector<Option> options_of(Settings& settings) {
  return {
      {"data", &settings.data, "folder with train.bin and val.bin"},
      {"degree", &settings.degree, "ranks that share one copy of the model; 0: 2 if even"},
      {"accumulation", &settings.accumulation, "micro-steps per step"},
      {"batch-size", &settings.batch_size, "sequences per rank and micro-step"},
      {"context", &settings.context, "tokens that the model sees"},
      {"steps", &settings.steps, "optimizer steps"},
      {"learning-rate", &settings.learning_rate, "highest; a cosine leads down from it"},
      {"warm-up-steps", &settings.warm_up_steps, "steps in which the learning rate rises"},
      {"weight-decay", &settings.weight_decay, "of matrices; vectors have none"},
      {"beta-2", &settings.beta_2, "of AdamW"},
      {"clip", &settings.clip, "largest norm of the gradient; 0: off"},
      {"seed", &settings.seed, "of initial values and batches"},
      {"log-every", &settings.log_every, "steps per printed line"},
      {"eval-every", &settings.eval_every, "steps between validations"},
      {"eval-batches", &settings.eval_batches, "validation batches per rank on the way"},
      {"final-eval-batches", &settings.final_eval_batches, "validation batches at the end"},
  };
}

template <typename Number>
Number parse_number(const std::string& name, const std::string& text) {
  std::size_t used = 0;
  double number = 0;
  try {
    number = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  HOPSHARD_CHECK(used > 0 && used == text.size() && number >= 0 && number < 1e9 &&
                     static_cast<double>(static_cast<Number>(number)) == number,
                 ConfigError, "--", name, " ", text, " is not a number of its kind");
  return static_cast<Number>(number);
}

/// @throws ConfigError  naming the option.
Settings parse_settings(std::span<char*> arguments) {
  Settings settings;
  const std::vector<Option> options = options_of(settings);
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string given = arguments[i];
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const Option& o) { return "--" + o.name == given; });
    if (option == options.end()) {
      std::string known = "unknown option " + given + "; there are";
      for (const Option& each : options) {
        known += "\n  --" + each.name + ": " + each.text;
      }
      throw ConfigError(known);
    }
    HOPSHARD_CHECK(i + 1 < arguments.size(), ConfigError, given, " needs a value");
    const std::string text = arguments[i + 1];
    if (auto* const whole = std::get_if<int*>(&option->value)) {
      **whole = parse_number<int>(option->name, text);
    } else if (auto* const real = std::get_if<double*>(&option->value)) {
      **real = parse_number<double>(option->name, text);
    } else {
      *std::get<std::string*>(option->value) = text;
    }
  }
  for (const int count : {settings.accumulation, settings.batch_size, settings.context,
                          settings.steps, settings.log_every, settings.eval_every,
                          settings.eval_batches, settings.final_eval_batches}) {
    HOPSHARD_CHECK(count >= 1, ConfigError,
                   "accumulation, batch-size, context, steps, log-every, eval-every and both "
                   "eval-batches are at least 1");
  }
  return settings;
}

// ---- Text ------------------------------------------------------------------------------

struct Batch {
  at::Tensor tokens;   ///< int64 [B, T]
  at::Tensor targets;  ///< int64 [B, T]: the token that follows each one.
};

/// Tokens are bytes; the file is mapped, not read. uint8 [num_bytes].
at::Tensor map_tokens(const std::filesystem::path& path) {
  HOPSHARD_CHECK(std::filesystem::is_regular_file(path), ConfigError, path.string(),
                 " is not there; 'python examples/gpt2/data.py FOLDER' writes it, --data FOLDER "
                 "says where");
  const auto num_bytes = static_cast<std::int64_t>(std::filesystem::file_size(path));
  return at::from_file(path.string(), /*shared=*/false, num_bytes, at::kByte);
}

/// @param starts  int64 [B].
Batch batch_at(const at::Tensor& data, const at::Tensor& starts, std::int64_t context) {
  const at::Tensor positions = starts.unsqueeze(1).add(at::arange(context + 1));  // [B, T + 1]
  const at::Tensor windows =
      data.index_select(0, positions.flatten()).view(positions.sizes()).to(at::kLong);
  return {windows.narrow(1, 0, context).contiguous(), windows.narrow(1, 1, context).contiguous()};
}

at::Generator make_generator(int seed) {
  return at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
}

/// Random windows of the text; each rank draws its own.
class Batches {
 public:
  Batches(at::Tensor data, const Settings& settings, int rank)
      : data_(std::move(data)),
        batch_size_(settings.batch_size),
        context_(settings.context),
        generator_(make_generator(settings.seed + rank)) {}

  Batch next() {
    const at::Tensor starts =
        at::randint(data_.numel() - context_, {batch_size_, 1}, generator_, at::kLong);
    return batch_at(data_, starts.squeeze(1), context_);
  }

 private:
  at::Tensor data_;
  std::int64_t batch_size_;
  std::int64_t context_;
  at::Generator generator_;
};

/// This rank's share of windows that lie evenly over the text. Each rank gets the same number of
/// batches, as each forward is a collective.
std::vector<Batch> validation_batches(const at::Tensor& data, const Settings& settings, int rank,
                                      int size) {
  const std::int64_t batch_size = std::int64_t{4} * settings.batch_size;
  const std::int64_t context = settings.context;
  const std::int64_t num_batches =
      std::max(std::int64_t{1}, std::min(std::int64_t{settings.final_eval_batches},
                                         data.numel() / context / (batch_size * size)));
  const at::Tensor starts =
      at::linspace(0, data.numel() - context - 1, num_batches * batch_size * size)
          .to(at::kLong)
          .view({size * batch_size, num_batches});
  std::vector<Batch> batches;
  for (std::int64_t i = 0; i < num_batches; ++i) {
    batches.push_back(
        batch_at(data, starts.select(1, i).slice(0, rank, std::nullopt, size), context));
  }
  return batches;
}

// ---- hopshard --------------------------------------------------------------------------

/// Collective: all ranks of the launch.
hopshard::ProcessGroups connect_groups(const Launch& launch, int degree) {
  const hopshard::GroupLayout layout(launch.size, launch.ranks_per_node, degree);
  const hopshard::Env& env = hopshard::env();
  hopshard::CommunicatorPtr world;
  return hopshard::make_process_groups(layout, launch.rank, [&](const hopshard::Group& group) {
    if (world) {
      return world->split(group);
    }
    world =
        hopshard::connect_backend(env.backend == "auto" ? "shm" : env.backend,
                                  {.store = launch.store, .group = group, .timeout = env.timeout});
    return world;
  });
}

std::span<float> floats_of(const at::Tensor& arena) {
  return {arena.mutable_data_ptr<float>(), static_cast<std::size_t>(arena.numel())};
}

/// AdamW on this rank's slices: moments lie like the masters, and one fused pass updates a run of
/// parameters with equal settings.
class AdamW {
 public:
  AdamW(hopshard::ShardEngine& engine, const Settings& settings)
      : engine_(engine),
        settings_{
            hopshard::AdamSettings{.beta2 = settings.beta_2, .weight_decay = settings.weight_decay},
            hopshard::AdamSettings{.beta2 = settings.beta_2, .weight_decay = 0.0}} {
    for (const at::Tensor& master : engine.store().arenas()) {
      exp_avg_.push_back(at::zeros_like(master));
      exp_avg_sq_.push_back(at::zeros_like(master));
    }
  }

  /// Clips, if `max_norm` is not 0, and updates. Collective: the world.
  void step(double learning_rate, double max_norm) {
    const at::NoGradGuard no_grad;
    engine_.finish_gradients();
    const double scale = max_norm > 0 ? std::min(1.0, max_norm / (gradient_norm() + 1e-6)) : 1.0;
    ++num_steps_;
    for (hopshard::AdamSettings& settings : settings_) {
      settings.lr = learning_rate;
    }
    for (std::size_t arena = 0; arena < exp_avg_.size(); ++arena) {
      const at::Tensor& master = engine_.store().arenas()[arena];
      const hopshard::ShardUpdate update(master.numel(), segments_of(static_cast<int>(arena)));
      update.adam(floats_of(master), floats_of(engine_.gradient_arenas()[arena]),
                  floats_of(exp_avg_[arena]), floats_of(exp_avg_sq_[arena]), settings_, scale);
    }
    engine_.end_step(/*stepped=*/true);
  }

 private:
  /// Of the world's mean gradient; the ranks of a sharding group hold all of it.
  double gradient_norm() {
    double sum = 0;
    for (const at::Tensor& gradient : engine_.gradient_arenas()) {
      sum += hopshard::sum_of_squares(floats_of(gradient));
    }
    at::Tensor total = at::tensor({sum}, at::TensorOptions().dtype(at::kDouble));
    engine_.groups()
        .sharding->all_reduce(total, hopshard::ReduceOp::kSum, {.timeout = {}, .tag = "norm/sum"})
        ->wait();
    return std::sqrt(total.item<double>());
  }

  /// This rank's pieces in an arena; it has none of some parameters. Every parameter of this model
  /// has a gradient in every step.
  [[nodiscard]] std::vector<hopshard::Segment> segments_of(int arena) const {
    std::vector<hopshard::Segment> segments;
    const hopshard::ShardStore& store = engine_.store();
    for (const hopshard::ParameterPlace& place : store.parameters()) {
      const hopshard::ShardedBuffer& buffer =
          store.buffers()[static_cast<std::size_t>(place.buffer)];
      if (buffer.arena == arena && place.piece_numel > 0) {
        const std::int64_t begin = buffer.arena_begin + place.piece_in_slice;
        segments.push_back({.begin = begin,
                            .end = begin + place.piece_numel,
                            .group = place.parameter.dim() >= 2 ? 0 : 1,
                            .step = num_steps_});
      }
    }
    return segments;
  }

  hopshard::ShardEngine& engine_;
  std::vector<hopshard::AdamSettings> settings_;  // Of matrices; of vectors.
  std::vector<at::Tensor> exp_avg_;               // By arena.
  std::vector<at::Tensor> exp_avg_sq_;
  std::int64_t num_steps_ = 0;
};

/// Collective: the world.
double mean_over_ranks(hopshard::ShardEngine& engine, double value) {
  at::Tensor sum = at::tensor({value}, at::TensorOptions().dtype(at::kDouble));
  engine.groups().world->all_reduce(sum)->wait();
  return sum.item<double>() / engine.groups().world->size();
}

// ---- The run ---------------------------------------------------------------------------

/// Mean loss over the batches of all ranks, in nats per byte. Collective: the world.
double validate(hopshard::ShardEngine& engine, const GPT2& model, std::span<const Batch> batches) {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const Batch& batch : batches) {
    sum += model.loss(engine, batch.tokens, batch.targets).item<double>();
  }
  return mean_over_ranks(engine, sum / static_cast<double>(batches.size()));
}

/// Of step `step`, counted from 0. train.py's scheduler looks at the share of the run that was over
/// when the step before began, and so does this.
double learning_rate(const Settings& settings, int step) {
  const double fraction = static_cast<double>(std::max(0, step - 1)) / settings.steps;
  const double warm_up = std::min(1.0, (step + 1.0) / std::max(1, settings.warm_up_steps));
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * fraction));
  return settings.learning_rate * (warm_up * (0.05 + 0.95 * cosine));
}

/// Random numbers without a generator of their own are drawn from torch's default one.
void seed_default_generator(int seed) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(static_cast<std::uint64_t>(seed));
}

void train(const Launch& launch, const Settings& settings) {
  const at::Tensor train_data = map_tokens(std::filesystem::path(settings.data) / "train.bin");
  const at::Tensor val_data = map_tokens(std::filesystem::path(settings.data) / "val.bin");
  HOPSHARD_CHECK(std::min(train_data.numel(), val_data.numel()) > settings.context, ConfigError,
                 settings.data, " holds too few bytes for context ", settings.context);

  const int degree = settings.degree > 0 ? settings.degree : (launch.size % 2 == 0 ? 2 : 1);
  seed_default_generator(settings.seed);
  const GPT2 model({.context = settings.context});
  hopshard::ShardEngine engine(model.units(), connect_groups(launch, degree),
                               {.backward_passes_per_step = settings.accumulation});
  AdamW optimizer(engine, settings);

  Batches batches(train_data, settings, launch.rank);
  const std::vector<Batch> val_batches =
      validation_batches(val_data, settings, launch.rank, launch.size);
  const std::span few_val_batches =
      std::span(val_batches)
          .first(std::min(val_batches.size(), static_cast<std::size_t>(settings.eval_batches)));
  const bool is_main = launch.rank == 0;
  const double first_val_loss = validate(engine, model, few_val_batches);
  if (is_main) {
    std::printf("step 0/%d · validation %.9f\n", settings.steps, first_val_loss);
  }

  double loss_sum = 0;  // Since the last line.
  int num_losses = 0;
  for (int step = 1; step <= settings.steps; ++step) {
    engine.zero_gradients();
    for (int pass = 0; pass < settings.accumulation; ++pass) {
      const Batch batch = batches.next();
      const at::Tensor loss = model.loss(engine, batch.tokens, batch.targets);
      // hopshard averages over the ranks; the mean over micro-steps is the program's.
      loss.div(settings.accumulation).backward();
      loss_sum += loss.item<double>();
      ++num_losses;
    }
    optimizer.step(learning_rate(settings, step - 1), settings.clip);

    const bool is_last = step == settings.steps;
    const bool is_eval = is_last || step % settings.eval_every == 0;
    if (!is_eval && step != 1 && step % settings.log_every != 0) {
      continue;
    }
    const double loss = mean_over_ranks(engine, loss_sum / num_losses);
    std::optional<double> val_loss;
    if (is_eval) {
      val_loss = validate(engine, model, is_last ? std::span(val_batches) : few_val_batches);
    }
    if (is_main) {
      std::printf("step %d/%d · loss %.9f", step, settings.steps, loss);
      if (val_loss) {
        std::printf(" · validation %.9f", *val_loss);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    loss_sum = 0;
    num_losses = 0;
  }
  engine.groups().world->barrier();  // Rank 0 may serve the store: it ends last.
}

}  // namespace

int run(std::span<char*> arguments) {
  restore_signals();
  try {
    const Settings settings = parse_settings(arguments);
    const Launch launch = join_launch();
    if (!hopshard::launcher_variable("OMP_NUM_THREADS")) {
      const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
      at::set_num_threads(std::max(1, num_cores / launch.ranks_per_node));
    }
    train(launch, settings);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt2: %s\n", error.what());
    return 1;
  }
}

}  // namespace example

int main(int argc, char** argv) {
  return example::run(std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
}
