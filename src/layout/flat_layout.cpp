// Offsets in one pass; the tail is padded so that all slices are equal and aligned.
#include "hopshard/layout/flat_layout.hpp"

#include <bit>
#include <limits>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

FlatLayout::FlatLayout(const std::vector<std::int64_t>& numels, std::int64_t itemsize_bytes,
                       int num_slices)
    : numels_(numels), num_slices_(num_slices) {
  HOPSHARD_CHECK(itemsize_bytes >= 1 && itemsize_bytes <= kFlatAlignmentBytes &&
                     std::has_single_bit(static_cast<std::uint64_t>(itemsize_bytes)),
                 InvalidArgument, "item size must be a power of two of at most ",
                 kFlatAlignmentBytes, " bytes, got ", itemsize_bytes);
  HOPSHARD_CHECK(num_slices >= 1, InvalidArgument, "a flat buffer has at least one slice, got ",
                 num_slices);
  HOPSHARD_CHECK(numels.size() <= static_cast<std::size_t>(std::numeric_limits<int>::max()),
                 InvalidArgument, "a flat buffer of ", numels.size(), " parameters is too large");

  // Below this bound, bytes of the whole buffer with all its padding still fit an int64.
  const std::int64_t alignment = kFlatAlignmentBytes / itemsize_bytes;
  const std::int64_t max_numel = std::numeric_limits<std::int64_t>::max() / itemsize_bytes -
                                 (std::int64_t{num_slices} + 1) * alignment;
  std::int64_t end = 0;
  offsets_.reserve(numels.size());
  for (std::size_t i = 0; i < numels.size(); ++i) {
    HOPSHARD_CHECK(numels[i] >= 0, InvalidArgument, "parameter ", i, " has ", numels[i],
                   " elements");
    const std::int64_t offset = round_up(end, alignment);
    HOPSHARD_CHECK(numels[i] <= max_numel - offset, InvalidArgument, "parameter ", i, " of ",
                   numels[i], " elements overflows the flat buffer");
    offsets_.push_back(offset);
    end = offset + numels[i];
    parameter_numel_ += numels[i];
  }
  const std::int64_t even_share = end / num_slices + (end % num_slices != 0 ? 1 : 0);
  slice_numel_ = round_up(even_share, alignment);
}

}  // namespace hopshard
