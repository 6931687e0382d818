// The one place that words which call an error is about: backend, operation, tag, group, rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hopshard/comm/communicator.hpp"

namespace hopshard::detail {

/// "local all_gather 'unshard/h.3' in group 'sharding[0-3]' on rank 1 of 4 (global rank 5)".
std::string describe_call(std::string_view backend, std::string_view op, std::string_view tag,
                          const Group& group);

/// "'unshard/h.3'", or "(no tag)".
std::string describe_tag(std::string_view tag);

/// What all ranks of a group must issue alike, for people: "all_reduce 'norm' of 30 Float (sum)",
/// "broadcast (no tag) of 4 Float from root 1", "barrier 'end'". Also what call records compare.
struct OperationText {
  std::string_view op;
  std::string_view tag;
  std::int64_t numel = 0;                            ///< n of the contract.
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< Undefined: no tensor.
  std::optional<ReduceOp> reduce_op{};
  int root = -1;  ///< Below 0: none.
};
std::string to_string(const OperationText& operation);

/// "global rank 0", "global ranks 0, 2 and 5", for sentences.
std::string name_global_ranks(const std::vector<int>& ranks);

/// "global rank 2 did not arrive within the 100 ms that rank 0 waited; look at what it does ...".
std::string did_not_arrive(const std::vector<int>& ranks, std::chrono::milliseconds limit,
                           int waiting_global_rank);

std::string_view to_string(ReduceOp op);

}  // namespace hopshard::detail
