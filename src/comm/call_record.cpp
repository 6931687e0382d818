#include "call_record.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "hopshard/core/error.hpp"
#include "hopshard/core/hash.hpp"

namespace hopshard::detail {

namespace {

constexpr std::size_t kHashBytes = sizeof(std::uint64_t);

std::uint64_t hash_of(std::string_view text) {
  Fnv1a hash;
  for (const char letter : text) {
    hash.add(static_cast<unsigned char>(letter));
  }
  return hash.value();
}

std::string text_in(std::span<const std::uint8_t> record) {
  const auto text = record.subspan(kHashBytes);
  return {text.begin(), std::find(text.begin(), text.end(), std::uint8_t{0})};
}

}  // namespace

CallRecord make_call_record(std::string_view description) {
  CallRecord record{};
  const std::uint64_t hash = hash_of(description);
  std::memcpy(record.data(), &hash, kHashBytes);
  const std::string_view shown = description.substr(0, kCallRecordBytes - kHashBytes - 1);
  std::copy(shown.begin(), shown.end(), record.begin() + kHashBytes);
  return record;
}

std::optional<std::string> explain_difference(std::span<const std::uint8_t> records,
                                              const Group& group) {
  const auto record_of = [&](int member) {
    return records.subspan(static_cast<std::size_t>(member) * kCallRecordBytes, kCallRecordBytes);
  };
  std::map<std::string, std::vector<int>> ranks_by_call;
  bool all_equal = true;
  for (int member = 0; member < group.size(); ++member) {
    const auto record = record_of(member);
    all_equal = all_equal && std::ranges::equal(record, record_of(0));
    ranks_by_call[text_in(record)].push_back(group.ranks[static_cast<std::size_t>(member)]);
  }
  if (all_equal) {
    return std::nullopt;
  }
  std::string text;
  for (const auto& [call, ranks] : ranks_by_call) {
    text += text.empty() ? "" : "; ";
    text += ranks.size() == 1 ? "rank" : "ranks";
    for (const int rank : ranks) {
      text += concatenate(' ', rank);
    }
    text += ": " + call;
  }
  return text;
}

}  // namespace hopshard::detail
