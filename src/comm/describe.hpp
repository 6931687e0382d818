// The one place that words which call an error is about: backend, operation, tag, group, rank.
#pragma once

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

/// "0", "0, 2 and 5", for sentences.
std::string join_ranks(const std::vector<int>& ranks);

std::string_view to_string(ReduceOp op);

}  // namespace hopshard::detail
