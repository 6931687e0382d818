// Cuts every parameter at the slice boundaries once and files each piece under both keys. Range
// queries clip the pieces that overlap, found by bisection.
#include "hopshard/layout/piece_table.hpp"

#include <algorithm>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

using Begin = std::int64_t Piece::*;

/// The parts of `pieces` (ascending in `key`) that lie in [begin, end) of `key`.
std::vector<Piece> clip(const std::vector<Piece>& pieces, Begin key, std::int64_t begin,
                        std::int64_t end) {
  std::vector<Piece> parts;
  auto piece = std::partition_point(pieces.begin(), pieces.end(), [&](const Piece& candidate) {
    return candidate.*key + candidate.numel <= begin;
  });
  for (; piece != pieces.end() && (*piece).*key < end; ++piece) {
    const std::int64_t cut_front = std::max<std::int64_t>(begin - (*piece).*key, 0);
    const std::int64_t cut_back = std::max<std::int64_t>((*piece).*key + piece->numel - end, 0);
    Piece part = *piece;
    part.parameter_begin += cut_front;
    part.slice_begin += cut_front;
    part.numel -= cut_front + cut_back;
    if (part.numel > 0) parts.push_back(part);  // An empty range may fall inside a piece.
  }
  return parts;
}

}  // namespace

PieceTable::PieceTable(const FlatLayout& layout)
    : by_slice_(static_cast<std::size_t>(layout.num_slices())),
      by_parameter_(static_cast<std::size_t>(layout.num_parameters())) {
  const std::int64_t slice_numel = layout.slice_numel();
  for (int parameter = 0; parameter < layout.num_parameters(); ++parameter) {
    const std::int64_t offset = layout.offset_of(parameter);
    const std::int64_t numel = layout.numel_of(parameter);
    for (std::int64_t begin = 0; begin < numel;) {
      const std::int64_t slice = (offset + begin) / slice_numel;
      const std::int64_t slice_begin = (offset + begin) % slice_numel;
      const std::int64_t length = std::min(numel - begin, slice_numel - slice_begin);
      const Piece piece{.parameter = parameter,
                        .slice = static_cast<int>(slice),
                        .parameter_begin = begin,
                        .slice_begin = slice_begin,
                        .numel = length};
      by_slice_[static_cast<std::size_t>(slice)].push_back(piece);
      by_parameter_[static_cast<std::size_t>(parameter)].push_back(piece);
      begin += length;
    }
  }
}

const std::vector<Piece>& PieceTable::in_slice(int slice) const {
  HOPSHARD_CHECK(slice >= 0 && static_cast<std::size_t>(slice) < by_slice_.size(), InvalidArgument,
                 "slice ", slice, " is outside a flat buffer of ", by_slice_.size(), " slices");
  return by_slice_[static_cast<std::size_t>(slice)];
}

const std::vector<Piece>& PieceTable::of_parameter(int parameter) const {
  HOPSHARD_CHECK(parameter >= 0 && static_cast<std::size_t>(parameter) < by_parameter_.size(),
                 InvalidArgument, "parameter ", parameter, " is outside a flat buffer of ",
                 by_parameter_.size(), " parameters");
  return by_parameter_[static_cast<std::size_t>(parameter)];
}

std::vector<Piece> PieceTable::of_range(int parameter, std::int64_t begin, std::int64_t end) const {
  const std::vector<Piece>& pieces = of_parameter(parameter);
  const std::int64_t numel =
      pieces.empty() ? 0 : pieces.back().parameter_begin + pieces.back().numel;
  HOPSHARD_CHECK(begin >= 0 && begin <= end && end <= numel, InvalidArgument, "range [", begin,
                 ", ", end, ") is outside parameter ", parameter, " of ", numel, " elements");
  return clip(pieces, &Piece::parameter_begin, begin, end);
}

std::vector<Piece> PieceTable::of_slice_range(int slice, std::int64_t begin,
                                              std::int64_t end) const {
  const std::vector<Piece>& pieces = in_slice(slice);
  // The upper end needs no check: past the last piece there is only padding, which yields nothing.
  HOPSHARD_CHECK(begin >= 0 && begin <= end, InvalidArgument, "range [", begin, ", ", end,
                 ") of slice ", slice, " is not a range");
  return clip(pieces, &Piece::slice_begin, begin, end);
}

}  // namespace hopshard
