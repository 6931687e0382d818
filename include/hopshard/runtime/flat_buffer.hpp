// One unit's parameters of one dtype and trainability as views of one storage (D3).
//
// [Note: the storage stays, the memory comes and goes]
// Autograd saves views of weights (weight.t()) in forward. They alias the flat buffer's
// StorageImpl, so it is made once and lives as long as the unit; attach() gives it pool memory
// and detach() points it at NaNs. After the next attach() what was saved is valid again,
// wherever the memory lies. Parameters saved themselves are safe too: while detached they are
// placeholders whose every access names them. Next: shard_engine.hpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hopshard/layout/flat_layout.hpp"
#include "hopshard/runtime/buffer_pool.hpp"

namespace hopshard {

/// Lifetime: the parameters are the user's; this holds references and re-points their data.
/// Threads: one at a time.
class FlatBuffer {
 public:
  /// @param parameters  same dtype, CPU; any dense shape, in any stride order; their values are
  ///                    lost: copy them before (see fill()).
  /// @param names       what errors call them.
  FlatBuffer(std::vector<at::Tensor> parameters, std::vector<std::string> names, int num_slices);
  ~FlatBuffer();
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;

  [[nodiscard]] const FlatLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] at::ScalarType dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::int64_t nbytes() const noexcept { return layout_.numel() * itemsize_bytes_; }
  [[nodiscard]] bool is_attached() const noexcept { return is_attached_; }

  /// Gives the storage memory (at least nbytes()) and points the parameters at their views.
  /// @throws ShardedError  a parameter was given other data, shape or dtype while sharded.
  void attach(void* memory);
  /// Points the parameters at their placeholders and the storage at NaNs.
  void detach();

  /// All elements, 1-D, padding included; valid while attached.
  [[nodiscard]] const at::Tensor& whole() const noexcept { return whole_; }
  [[nodiscard]] const at::Tensor& view(int parameter) const {
    return views_.at(static_cast<std::size_t>(parameter));
  }
  /// Parameter `parameter` seen through another flat tensor of this layout (gradients, moments).
  [[nodiscard]] at::Tensor view_of(const at::Tensor& flat, int parameter) const;
  /// The elements of a full tensor of the parameter's shape in the order of the flat buffer, 1-D.
  [[nodiscard]] at::Tensor in_memory_order(const at::Tensor& full, int parameter) const;

  /// Copies what users bound to parameters while attached (p.data = other) into the views.
  /// @throws ConfigError  it has another shape or dtype; the parameter is as before then.
  void take_back_rebound();
  /// In-place changes made from now on are what check_unchanged() finds.
  void accept_changes();
  /// @throws ShardedError  a parameter was changed in place since attach() or accept_changes():
  ///                       gathered values are a copy, so the change is about to be lost.
  void check_unchanged() const;
  [[nodiscard]] bool aliases(const at::Tensor& tensor) const;
  /// Throws ShardedError unless every parameter is as attach() or detach() left it.
  void check_untouched() const;

 private:
  void point_at(const std::vector<at::Tensor>& targets);

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  at::ScalarType dtype_;
  std::int64_t itemsize_bytes_;
  FlatLayout layout_;
  at::Tensor whole_;
  std::vector<at::Tensor> views_;
  std::vector<at::Tensor> placeholders_;
  std::vector<std::uint32_t> versions_;  // Of the parameters, when last accepted.
  bool is_attached_ = false;
};

/// True if `tensor` fills its memory without gaps or overlaps, in any order of dimensions.
[[nodiscard]] bool is_dense(const at::Tensor& tensor);

}  // namespace hopshard
