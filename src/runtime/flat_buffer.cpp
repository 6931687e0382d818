#include "hopshard/runtime/flat_buffer.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "hopshard/core/error.hpp"
#include "hopshard/runtime/placeholder.hpp"

namespace hopshard {

namespace {

c10::DataPtr borrow(void* memory) { return c10::DataPtr(memory, c10::Device(c10::kCPU)); }

std::vector<std::int64_t> numels_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> numels;
  numels.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    numels.push_back(tensor.numel());
  }
  return numels;
}

std::vector<std::int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t dim = sizes.size(); dim-- > 1;) {
    strides[dim - 1] = strides[dim] * std::max<std::int64_t>(sizes[dim], 1);
  }
  return strides;
}

at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType dtype, std::int64_t offset,
                       at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace

bool is_dense(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.is_non_overlapping_and_dense();
}

FlatBuffer::FlatBuffer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                       int num_slices)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      dtype_(parameters_.at(0).scalar_type()),
      itemsize_bytes_(parameters_.at(0).element_size()),
      layout_(numels_of(parameters_), itemsize_bytes_, num_slices) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes(), borrow(detached_memory(nbytes())),
      /*allocator=*/nullptr, /*resizable=*/false));
  const std::int64_t numel = layout_.numel();
  whole_ = tensor_over(storage, dtype_, 0, {numel}, {1});
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    const std::vector<std::int64_t> strides =
        is_dense(parameter) ? parameter.strides().vec() : contiguous_strides(parameter.sizes());
    views_.push_back(tensor_over(storage, dtype_, layout_.offset_of(static_cast<int>(i)),
                                 parameter.sizes(), strides));
    placeholders_.push_back(make_placeholder(
        views_.back(), detail::concatenate("parameter '", names_[i],
                                           "' is sharded: its values are not on this rank. Use "
                                           "`with hopshard.unshard(module):` around the access")));
  }
  point_at(placeholders_);
}

FlatBuffer::~FlatBuffer() {
  whole_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(borrow(detached_memory(nbytes())));
}

void FlatBuffer::point_at(const std::vector<at::Tensor>& targets) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(targets[i]);
  }
}

void FlatBuffer::check_untouched() const {
  const std::vector<at::Tensor>& expected = is_attached_ ? views_ : placeholders_;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    HOPSHARD_CHECK(parameter.scalar_type() == dtype_ && parameter.sizes() == views_[i].sizes(),
                   ConfigError, "parameter '", names_[i], "' was ", dtype_, " ", views_[i].sizes(),
                   " when it was wrapped and is ", parameter.scalar_type(), " ", parameter.sizes(),
                   " now. Change dtype and shape before hopshard.DistributedModel(module)");
    HOPSHARD_CHECK(
        parameter.numel() == 0 || parameter.storage().unsafeGetStorageImpl() ==
                                      expected[i].storage().unsafeGetStorageImpl(),
        ShardedError, "parameter '", names_[i],
        "' was given new data while it was sharded, which would be lost. Assign inside `with "
        "hopshard.unshard(module):` or use model.load_state_dict()");
  }
}

void FlatBuffer::attach(void* memory) {
  check_untouched();
  whole_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(borrow(memory));
  point_at(views_);
  is_attached_ = true;
  accept_changes();
}

void FlatBuffer::detach() {
  point_at(placeholders_);
  whole_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(borrow(detached_memory(nbytes())));
  is_attached_ = false;
}

at::Tensor FlatBuffer::view_of(const at::Tensor& flat, int parameter) const {
  const at::Tensor& view = views_.at(static_cast<std::size_t>(parameter));
  return at::as_strided(flat, view.sizes(), view.strides(),
                        flat.storage_offset() + layout_.offset_of(parameter));
}

at::Tensor FlatBuffer::in_memory_order(const at::Tensor& full, int parameter) const {
  const at::Tensor& view = views_.at(static_cast<std::size_t>(parameter));
  HOPSHARD_CHECK(full.sizes() == view.sizes(), InvalidArgument, "parameter '",
                 names_[static_cast<std::size_t>(parameter)], "' has shape ", view.sizes(),
                 ", the tensor given for it ", full.sizes());
  at::Tensor dense = at::empty_strided(view.sizes(), view.strides(), full.options());
  dense.copy_(full);
  return at::as_strided(dense, {dense.numel()}, {1});
}

void FlatBuffer::take_back_rebound() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& parameter = parameters_[i];
    const at::Tensor& view = views_[i];
    if (parameter.sizes() == view.sizes() && parameter.scalar_type() == dtype_ &&
        (parameter.numel() == 0 ||
         parameter.storage().unsafeGetStorageImpl() == view.storage().unsafeGetStorageImpl())) {
      continue;
    }
    const at::Tensor rebound = parameter.variable_data();
    parameter.set_data(view);
    HOPSHARD_CHECK(rebound.sizes() == view.sizes() && rebound.scalar_type() == dtype_, ConfigError,
                   "parameter '", names_[i], "' is ", dtype_, " ", view.sizes(), " and was set to ",
                   rebound.scalar_type(), " ", rebound.sizes(),
                   ". Shape and dtype are fixed since hopshard.DistributedModel(module)");
    view.copy_(rebound);
  }
}

void FlatBuffer::accept_changes() {
  versions_.clear();
  for (const at::Tensor& parameter : parameters_) {
    versions_.push_back(parameter.unsafeGetTensorImpl()->version_counter().current_version());
  }
}

void FlatBuffer::check_unchanged() const {
  for (std::size_t i = 0; is_attached_ && i < parameters_.size(); ++i) {
    HOPSHARD_CHECK(
        parameters_[i].unsafeGetTensorImpl()->version_counter().current_version() == versions_[i],
        ShardedError, "parameter '", names_[i],
        "' was changed in place while it was gathered (in a forward, a hook, or by an option such "
        "as Embedding(max_norm=...)), which would be lost: every rank keeps only its slice. Change "
        "it inside `with hopshard.unshard(module):`, in the same way on all ranks");
  }
}

bool FlatBuffer::aliases(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == whole_.storage().unsafeGetStorageImpl();
}

}  // namespace hopshard
