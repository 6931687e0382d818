// Memory that comes and goes under one storage: views, placeholders and the pool.
#include "hopshard/runtime/flat_buffer.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "hopshard/core/error.hpp"
#include "hopshard/runtime/placeholder.hpp"

namespace hopshard {
namespace {

/// What `call` throws; empty if nothing.
template <typename ErrorType, typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

at::Tensor numbers(at::IntArrayRef sizes, double first = 1) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) {
    numel *= size;
  }
  return at::arange(numel, at::kFloat).add(first).reshape(sizes);
}

/// A flat buffer with memory from a pool.
class Buffer {
 public:
  explicit Buffer(std::vector<at::Tensor> parameters, int num_slices = 2)
      : parameters_(std::move(parameters)),
        flat(parameters_, names_for(parameters_.size()), num_slices) {}
  ~Buffer() { drop(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void attach() {
    block_ = pool.take(flat.nbytes());
    std::memset(block_.data, 0x11, static_cast<std::size_t>(flat.nbytes()));
    flat.attach(block_.data);
  }
  void drop() {
    if (flat.is_attached()) {
      flat.detach();
    }
    pool.give_back(std::exchange(block_, {}));
  }
  void fill(const std::vector<at::Tensor>& values) {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < values.size(); ++i) {
      at::Tensor view = flat.view(static_cast<int>(i));
      view.copy_(values[i]);
    }
  }

 private:
  static std::vector<std::string> names_for(std::size_t count) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i) {
      names.push_back("layer." + std::to_string(i));
    }
    return names;
  }
  std::vector<at::Tensor> parameters_;
  PoolBlock block_;

 public:
  BufferPool pool;
  FlatBuffer flat;
};

TEST(FlatBuffer, KeepsShapesAndStrideOrders) {
  const std::vector<at::Tensor> parameters = {
      numbers({3, 4}),
      numbers({4, 3}).t(),                                               // Transposed.
      numbers({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),  // NHWC.
      numbers({}),                                                       // A scalar.
      at::empty({0, 3}),
      numbers({3, 8}).slice(1, 0, 8, 2),  // Gaps: becomes contiguous.
      numbers({7})};
  std::vector<at::Tensor> values;
  std::vector<std::vector<std::int64_t>> strides;
  for (const at::Tensor& parameter : parameters) {
    values.push_back(parameter.clone(at::MemoryFormat::Contiguous));
    strides.push_back(is_dense(parameter) ? parameter.strides().vec()
                                          : std::vector<std::int64_t>{4, 1});
  }
  Buffer buffer(parameters);
  for (const bool attached : {false, true, false, true}) {
    if (attached) {
      buffer.attach();
      buffer.fill(values);
    } else {
      buffer.drop();
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(parameters[i].sizes(), values[i].sizes()) << i;
      EXPECT_EQ(parameters[i].strides().vec(), strides[i]) << i;
      if (attached) {
        EXPECT_TRUE(at::equal(parameters[i], values[i])) << i;
        const at::Tensor in_order = buffer.flat.in_memory_order(values[i], static_cast<int>(i));
        const at::Tensor stored = buffer.flat.whole().narrow(
            0, buffer.flat.layout().offset_of(static_cast<int>(i)), values[i].numel());
        EXPECT_TRUE(at::equal(in_order, stored)) << i;
        EXPECT_TRUE(at::equal(buffer.flat.view_of(buffer.flat.whole().clone(), static_cast<int>(i)),
                              values[i]))
            << i;
      }
    }
  }
}

TEST(FlatBuffer, SlicesOfAllRanksCoverIt) {
  Buffer buffer({numbers({100}), numbers({3})}, 4);
  const FlatLayout& layout = buffer.flat.layout();
  EXPECT_EQ(buffer.flat.whole().numel(), layout.numel());
  EXPECT_EQ(buffer.flat.nbytes(), layout.numel() * 4);
  EXPECT_EQ(layout.numel() % 4, 0);
}

// What autograd saved in forward must be valid again in backward, wherever the memory lies then.
TEST(FlatBuffer, SavedViewsSurviveNewMemory) {
  const std::vector<at::Tensor> values = {numbers({8, 5}).sin(), numbers({8}).cos(),
                                          numbers({3, 8}, 7).sin()};
  const at::Tensor input = numbers({6, 5}).cos();
  const auto loss_of = [&](const std::vector<at::Tensor>& p) {
    const at::Tensor hidden = at::gelu(at::linear(input, p[0], p[1]));
    return at::linear(hidden, p[2]).square().sum();
  };
  std::vector<at::Tensor> expected;
  std::vector<at::Tensor> sharded;
  for (const at::Tensor& value : values) {
    expected.push_back(value.clone().set_requires_grad(true));
    sharded.push_back(value.clone().set_requires_grad(true));
  }
  at::Tensor expected_loss = loss_of(expected);
  expected_loss.backward();

  Buffer buffer(sharded);
  buffer.attach();
  buffer.fill(values);
  at::Tensor loss = loss_of(sharded);
  const void* const first_memory = buffer.flat.whole().const_data_ptr();
  buffer.drop();
  const PoolBlock other = buffer.pool.take(buffer.flat.nbytes());  // Not the same memory again.
  std::memset(other.data, 0x7F, static_cast<std::size_t>(other.nbytes));
  buffer.attach();
  buffer.fill(values);
  ASSERT_NE(buffer.flat.whole().const_data_ptr(), first_memory);
  EXPECT_TRUE(at::equal(loss, expected_loss));
  loss.backward();
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(at::equal(sharded[i].grad(), expected[i].grad())) << i;
  }
  buffer.pool.give_back(other);
}

TEST(FlatBuffer, ABackwardWithoutMemoryYieldsNaNs) {
  const std::vector<at::Tensor> parameters = {numbers({4, 4}).set_requires_grad(true)};
  Buffer buffer(parameters);
  buffer.attach();
  buffer.fill({numbers({4, 4})});
  const at::Tensor input = numbers({2, 4}).set_requires_grad(true);
  at::Tensor loss = at::linear(input, parameters[0]).sum();
  buffer.drop();
  loss.backward();
  EXPECT_TRUE(input.grad().isnan().all().item<bool>());
}

class DetachedMemory : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(DetachedMemory, ReadsAsNaN) {
  Buffer buffer({at::empty({1 << 10}, GetParam()), at::empty({3}, GetParam())});
  ASSERT_NE(buffer.flat.whole().const_data_ptr(), nullptr);
  EXPECT_TRUE(buffer.flat.whole().isnan().all().item<bool>());
  buffer.attach();
  buffer.drop();
  EXPECT_TRUE(buffer.flat.whole().isnan().all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Floats, DetachedMemory,
                         ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16));

TEST(DetachedMemoryOf, GrowsAndKeepsWhatItGaveBefore) {
  const auto* const small = static_cast<const float*>(detached_memory(16));
  const std::int64_t large_bytes = std::int64_t{3} << 30;  // Mapped, never filled.
  const auto* const large = static_cast<const float*>(detached_memory(large_bytes));
  EXPECT_TRUE(std::isnan(small[0]));
  EXPECT_TRUE(std::isnan(large[0]));
  EXPECT_TRUE(std::isnan(large[large_bytes / 4 - 1]));
  EXPECT_NE(detached_memory(0), nullptr);
}

TEST(Placeholder, ReadsAndWritesNameTheParameter) {
  const std::vector<at::Tensor> parameters = {numbers({3, 4}), numbers({2})};
  Buffer buffer(parameters);
  const at::Tensor& weight = parameters[0];
  EXPECT_EQ(weight.numel(), 12);
  EXPECT_TRUE(weight.is_contiguous());
  EXPECT_EQ(weight.scalar_type(), at::kFloat);
  const std::vector<std::string> texts = {
      error_of<std::exception>([&] { static_cast<void>(weight.add(1)); }),
      error_of<std::exception>([&] { static_cast<void>(weight.sum().item<float>()); }),
      error_of<std::exception>([&] { weight.fill_(1); }),
      error_of<std::exception>([&] { weight.t().contiguous(); }),
      error_of<std::exception>([&] { static_cast<void>(weight.const_data_ptr()); }),
      error_of<std::exception>([&] {
        weight.copy_(numbers({3, 4}));
      })};
  for (const std::string& text : texts) {
    EXPECT_TRUE(holds(text, "parameter 'layer.0' is sharded")) << text;
    EXPECT_TRUE(holds(text, "hopshard.unshard(module)")) << text;
  }
  EXPECT_TRUE(holds(error_of<std::exception>([&] { parameters[1].neg_(); }), "'layer.1'"));
}

TEST(FlatBuffer, NamesParametersThatWereReboundWhileSharded) {
  const std::vector<at::Tensor> parameters = {numbers({4}), numbers({4})};
  Buffer buffer(parameters);
  const at::Tensor original = parameters[1].variable_data();
  parameters[1].set_data(numbers({4}));
  EXPECT_TRUE(
      holds(error_of<ShardedError>([&] { buffer.attach(); }), "'layer.1' was given new data"));
  parameters[1].set_data(numbers({5}));
  EXPECT_TRUE(holds(error_of<ConfigError>([&] { buffer.flat.check_untouched(); }), "'layer.1'"));
  parameters[1].set_data(numbers({4}).to(at::kDouble));
  EXPECT_TRUE(holds(error_of<ConfigError>([&] { buffer.flat.check_untouched(); }), "Double"));
  parameters[1].set_data(original);
  buffer.flat.check_untouched();
}

TEST(FlatBuffer, TakesBackWhatWasReboundWhileAttached) {
  const std::vector<at::Tensor> parameters = {numbers({2, 3}), numbers({4})};
  Buffer buffer(parameters);
  buffer.attach();
  buffer.fill({numbers({2, 3}), numbers({4})});
  parameters[0].set_data(numbers({2, 3}, 50));
  EXPECT_FALSE(buffer.flat.aliases(parameters[0]));
  buffer.flat.take_back_rebound();
  EXPECT_TRUE(buffer.flat.aliases(parameters[0]));
  EXPECT_TRUE(at::equal(buffer.flat.view(0), numbers({2, 3}, 50)));
  EXPECT_TRUE(at::equal(parameters[1], numbers({4})));
}

TEST(FlatBuffer, KnowsWhatAliasesIt) {
  const std::vector<at::Tensor> parameters = {numbers({2, 3})};
  Buffer buffer(parameters);
  buffer.attach();
  EXPECT_TRUE(buffer.flat.aliases(parameters[0].t()[1]));
  EXPECT_FALSE(buffer.flat.aliases(parameters[0].clone()));
  EXPECT_FALSE(buffer.flat.aliases(at::Tensor(numbers({2}))));
}

TEST(FlatBuffer, RefusesATensorOfAnotherShape) {
  Buffer buffer({numbers({2, 3})});
  EXPECT_TRUE(holds(error_of<InvalidArgument>([&] {
                      static_cast<void>(buffer.flat.in_memory_order(numbers({3, 2}), 0));
                    }),
                    "'layer.0'"));
}

TEST(FlatBuffer, ViewsThatOutliveItReadNaN) {
  at::Tensor left;
  {
    Buffer buffer({numbers({4})});
    buffer.attach();
    left = buffer.flat.whole();
    buffer.drop();
  }
  EXPECT_TRUE(left.isnan().all().item<bool>());
}

TEST(BufferPool, UsesBlocksAgainAndCounts) {
  BufferPool pool;
  const PoolBlock first = pool.take(1000);
  EXPECT_EQ(first.nbytes, 1024);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.data) % 128, 0u);
  const PoolBlock second = pool.take(1024);
  EXPECT_NE(first.data, second.data);
  EXPECT_EQ(pool.taken_bytes(), 2048);
  pool.give_back(first);
  EXPECT_EQ(pool.idle_bytes(), 1024);
  EXPECT_EQ(pool.take(900).data, first.data);
  EXPECT_EQ(pool.num_allocations(), 2);
  EXPECT_EQ(pool.peak_bytes(), 2048);
  pool.give_back(first);
  pool.give_back(second);
  pool.give_back({});
  EXPECT_EQ(pool.taken_bytes(), 0);
  pool.trim();
  EXPECT_EQ(pool.idle_bytes(), 0);
  EXPECT_EQ(pool.peak_bytes(), 2048);
}

TEST(BufferPool, EmptyBlocksAreMemoryTooAndNegativeOnesAreRefused) {
  BufferPool pool;
  const PoolBlock block = pool.take(0);
  EXPECT_NE(block.data, nullptr);
  EXPECT_EQ(block.nbytes, 128);
  pool.give_back(block);
  EXPECT_THROW(static_cast<void>(pool.take(-1)), InvalidArgument);
#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // Their malloc ends the process.
  EXPECT_TRUE(holds(error_of<Error>([&] { static_cast<void>(pool.take(std::int64_t{1} << 60)); }),
                    "out of memory"));
#endif
}

}  // namespace
}  // namespace hopshard
