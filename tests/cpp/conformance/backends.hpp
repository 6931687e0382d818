// The backends that the conformance suite runs on, and its data: integer values whose exact result
// is a formula, so that every comparison is bit for bit.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "hopshard/comm/registry.hpp"
#include "hopshard/comm/store.hpp"
#include "hopshard/layout/slice_order.hpp"
#include "support/thread_world.hpp"

namespace hopshard::testing {

struct Backend {
  std::string name;
  /// Called once by each member of a group.
  CommunicatorPtr (*make)(ThreadWorld& world, const Group& group);
  /// `local` underneath: its exact texts are expected, and a group survives a disagreement.
  bool is_reference = false;
  /// Made of other communicators, whose own operations its errors may be about.
  bool is_composite = false;
  /// Another way through the code of a backend that is listed too; spared the largest sizes.
  bool is_variant = false;
  /// Ranks beyond this are left out: e.g. a composite of pairs, or a slow transport.
  int max_ranks = 8;
  /// False for those that need all ranks of a node layout, or an even number of ranks.
  bool takes_any_group = true;
};

inline std::ostream& operator<<(std::ostream& out, const Backend& backend) {
  return out << backend.name;
}

// Each in <name>_backends.cpp; empty where this build does not have the backend.
std::vector<Backend> local_backends();
std::vector<Backend> shm_backends();
std::vector<Backend> mpi_backends();
std::vector<Backend> nccl_backends();
std::vector<Backend> ofi_backends();
std::vector<Backend> hierarchical_backends();

std::vector<Backend> conforming_backends();

/// Connects `group` through the world's store by a backend of the registry.
inline CommunicatorPtr connect_in(ThreadWorld& world, std::string_view backend,
                                  const Group& group) {
  std::string prefix = group.name;
  for (const int rank : group.ranks) {
    prefix += detail::concatenate("/", rank);
  }
  return connect_backend(backend, {.store = make_prefix_store(world.store(), prefix),
                                   .group = group,
                                   .timeout = std::chrono::seconds(30)});
}

inline const std::vector<at::ScalarType>& numeric_dtypes() {
  static const std::vector<at::ScalarType> list = {
      at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  return list;
}

inline std::vector<at::ScalarType> all_dtypes() {
  std::vector<at::ScalarType> list = numeric_dtypes();
  list.push_back(at::kBool);
  return list;
}

/// Element i of rank `rank`: 0..10, so that sums over 7 ranks are exact in int8 and bf16.
inline std::int64_t value_of(int rank, std::int64_t i) { return (i * 3 + rank * 5) % 11; }

inline std::int64_t in_dtype(std::int64_t value, at::ScalarType dtype) {
  return dtype == at::kBool ? static_cast<std::int64_t>(value != 0) : value;
}

template <typename Formula>
at::Tensor make_tensor(std::int64_t numel, at::ScalarType dtype, Formula formula) {
  const at::Tensor values = at::empty({numel}, at::kLong);
  auto* data = values.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < numel; ++i) {
    data[i] = formula(i);
  }
  return values.to(dtype);
}

template <typename Formula>
void expect_equal(const at::Tensor& tensor, Formula formula) {
  const at::Tensor values = tensor.to(at::kLong).contiguous();
  const auto* data = values.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    if (data[i] != formula(i)) {
      ADD_FAILURE() << "element " << i << " is " << data[i] << ", expected " << formula(i);
      return;
    }
  }
}

/// Slots to try: none, reversed, rotated, and the slice order of nodes with two ranks.
inline std::vector<std::vector<int>> slot_choices(int size) {
  std::vector<std::vector<int>> choices = {{}};
  std::vector<int> reversed;
  std::vector<int> rotated;
  for (int member = 0; member < size; ++member) {
    reversed.push_back(size - 1 - member);
    rotated.push_back((member + 1) % size);
  }
  if (size > 1) {
    choices.push_back(reversed);
    choices.push_back(rotated);
  }
  if (size >= 4 && size % 2 == 0) {
    choices.push_back(SliceOrder(size / 2, 2).slots());
  }
  return choices;
}

/// Runs `call` and expects an ErrorType whose text holds all of `words`.
template <typename ErrorType, typename Call>
void expect_error(Call call, const std::vector<std::string>& words) {
  try {
    call();
  } catch (const ErrorType& error) {
    const std::string text = error.what();
    for (const std::string& word : words) {
      EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error than expected: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error; expected one with " << words.front();
}

inline at::Tensor floats(std::int64_t numel) {
  return make_tensor(numel, at::kFloat, [](auto) { return 1; });
}

}  // namespace hopshard::testing
