#include "hopshard/runtime/order_check.hpp"

#include <ATen/ops/full.h>

#include <array>
#include <map>
#include <sstream>

#include "hopshard/core/error.hpp"

namespace hopshard {

namespace {

constexpr std::size_t kMaxRemembered = 1 << 16;
constexpr std::array kKinds = {"gather of '", "reduction of '",
                               "gather from secondary shards of '"};
constexpr auto kNumKinds = static_cast<std::int64_t>(kKinds.size());

// Ranks may differ in whether a gather is ahead of its use, not in its place in the order.
std::int64_t code_of(Action action) {
  const int what = action.kind == ActionKind::kReduce ? 1 : action.from_secondary ? 2 : 0;
  return static_cast<std::int64_t>(action.unit) * kNumKinds + what;
}

std::string describe(std::int64_t code, const std::vector<std::string>& unit_names) {
  if (code < 0) {
    return "nothing more";
  }
  return detail::concatenate(kKinds.at(static_cast<std::size_t>(code % kNumKinds)),
                             unit_names.at(static_cast<std::size_t>(code / kNumKinds)), "'");
}

}  // namespace

void OrderCheck::record(Action action) {
  hash_.add(static_cast<std::uint64_t>(code_of(action)));
  if (issued_.size() < kMaxRemembered) {
    issued_.push_back(action);
  }
}

void OrderCheck::clear() { *this = {}; }

void OrderCheck::explain(Communicator& world, const std::vector<std::string>& unit_names) const {
  const auto options = at::TensorOptions().dtype(at::kLong);
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(issued_.size()), options);
  world.all_reduce(length, ReduceOp::kMax, {.timeout = {}, .tag = "order/length"})->wait();
  const std::int64_t n = *length.const_data_ptr<std::int64_t>();

  const at::Tensor mine = at::full({n}, -1, options);
  for (std::size_t i = 0; i < issued_.size(); ++i) {
    mine.mutable_data_ptr<std::int64_t>()[i] = code_of(issued_[i]);
  }
  const at::Tensor all = at::full({n * world.size()}, -1, options);
  world.all_gather(all, mine, {.timeout = {}, .tag = "order/issued"})->wait();

  const auto* const codes = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < n; ++i) {
    std::map<std::int64_t, std::vector<int>> ranks_by_code;
    for (int rank = 0; rank < world.size(); ++rank) {
      ranks_by_code[codes[rank * n + i]].push_back(rank);
    }
    if (ranks_by_code.size() > 1) {
      std::ostringstream text;
      text << "ranks issued different collectives; number " << i << " of this step was";
      for (const auto& [code, ranks] : ranks_by_code) {
        text << " | " << describe(code, unit_names) << " on rank";
        for (const int rank : ranks) {
          text << ' ' << rank;
        }
      }
      text << ". All ranks must run the same units in the same order; a rank may only skip units. "
              "No weight was changed by this step";
      throw ScheduleError(text.str());
    }
  }
  throw ScheduleError("ranks issued different collectives after the first " + std::to_string(n) +
                      " of this step");
}

}  // namespace hopshard
