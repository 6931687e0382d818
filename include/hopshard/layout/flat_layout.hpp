// Where each parameter lies in a unit's flat buffer, and how the buffer is cut into slices (D3).
//
//   p = 2, fp32, parameters of 40, 3 and 30 elements, alignment 128 bytes = 32 elements
//     offset 0        64   67     96        126
//            |w (40)..|b(3)|......|v (30)...|pad|      numel() = 128
//            |<-- slice 0: 64 -->|<- slice 1: 64 ->|   a parameter may lie in several slices
// Pure. Next: piece_table.hpp.
#pragma once

#include <cstdint>
#include <vector>

namespace hopshard {

inline constexpr std::int64_t kFlatAlignmentBytes =
    128;  // A cache-line pair; AVX-512 and NCCL like it.

/// Offsets and slices of one flat buffer. All counts are elements.
class FlatLayout {
 public:
  /// @param numels         elements of each parameter; 0 is legal.
  /// @param itemsize_bytes bytes of an element, a power of two of at most 128.
  /// @param num_slices     p >= 1.
  /// Every parameter starts at a multiple of kFlatAlignmentBytes; so does every slice.
  /// @throws InvalidArgument
  FlatLayout(const std::vector<std::int64_t>& numels, std::int64_t itemsize_bytes, int num_slices);

  [[nodiscard]] int num_parameters() const noexcept { return static_cast<int>(numels_.size()); }
  [[nodiscard]] int num_slices() const noexcept { return num_slices_; }
  [[nodiscard]] std::int64_t offset_of(int parameter) const {
    return offsets_.at(static_cast<std::size_t>(parameter));
  }
  [[nodiscard]] std::int64_t numel_of(int parameter) const {
    return numels_.at(static_cast<std::size_t>(parameter));
  }
  /// Elements of the whole buffer, padding included: num_slices() * slice_numel().
  [[nodiscard]] std::int64_t numel() const noexcept { return slice_numel_ * num_slices_; }
  [[nodiscard]] std::int64_t slice_numel() const noexcept { return slice_numel_; }
  /// Elements that belong to parameters.
  [[nodiscard]] std::int64_t parameter_numel() const noexcept { return parameter_numel_; }

 private:
  std::vector<std::int64_t> numels_;
  std::vector<std::int64_t> offsets_;
  std::int64_t parameter_numel_ = 0;
  std::int64_t slice_numel_ = 0;
  int num_slices_ = 1;
};

}  // namespace hopshard
