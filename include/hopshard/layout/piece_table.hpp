// Which part of which parameter lies in which slice, and back: the map that optimizers, state
// dicts and checkpoints share. Pure. Next: comm/group.hpp.
#pragma once

#include <cstdint>
#include <vector>

#include "hopshard/layout/flat_layout.hpp"

namespace hopshard {

/// A range of one parameter that lies inside one slice. All counts are elements.
struct Piece {
  int parameter = 0;  ///< Index in the FlatLayout.
  int slice = 0;
  std::int64_t parameter_begin = 0;  ///< First element, within the flattened parameter.
  std::int64_t slice_begin = 0;      ///< The same element, within the slice.
  std::int64_t numel = 0;            ///< Never 0.
  bool operator==(const Piece&) const = default;
};

/// All pieces of one flat buffer.
class PieceTable {
 public:
  explicit PieceTable(const FlatLayout& layout);

  /// Ascending in slice_begin.
  [[nodiscard]] const std::vector<Piece>& in_slice(int slice) const;
  /// Ascending in parameter_begin; empty for an empty parameter.
  [[nodiscard]] const std::vector<Piece>& of_parameter(int parameter) const;
  /// The parts of elements [begin, end) of `parameter`, ascending.
  /// @throws InvalidArgument  range outside the parameter.
  [[nodiscard]] std::vector<Piece> of_range(int parameter, std::int64_t begin,
                                            std::int64_t end) const;
  /// The parts of elements [begin, end) of `slice`, ascending; padding yields nothing.
  [[nodiscard]] std::vector<Piece> of_slice_range(int slice, std::int64_t begin,
                                                  std::int64_t end) const;

 private:
  std::vector<std::vector<Piece>> by_slice_;
  std::vector<std::vector<Piece>> by_parameter_;
};

}  // namespace hopshard
