#include "hopshard/runtime/gradient_reducer.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "hopshard/collectives/two_hop_sync.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "runtime/scaled_copy.hpp"

namespace hopshard {

namespace {

/// More would hide more, and hold a flat gradient each.
constexpr std::size_t kMostInFlight = 1;
/// Hop 2 comes in about as many buckets, where they are not small: the first can start early, and
/// what is left at the end of the backward is short.
constexpr std::int64_t kBucketsPerPass = 4;
constexpr std::int64_t kSmallBucketBytes = std::int64_t{1} << 20;

}  // namespace

GradientReducer::GradientReducer(ShardStore& store, CommunicatorPtr sharding,
                                 CommunicatorPtr replication, BufferPool& pool, double scale,
                                 std::int64_t bucket_bytes, Timeline* timeline,
                                 at::ScalarType reduce_dtype)
    : store_(store),
      sharding_(std::move(sharding)),
      replication_(std::move(replication)),
      pool_(pool),
      scale_(scale),
      reduce_dtype_(reduce_dtype),
      bucket_bytes_(bucket_bytes),
      timeline_(timeline),
      members_(store.buffers().size()),
      pending_(store.buffers().size()),
      is_collected_(store.buffers().size(), false),
      has_gradient_(store.parameters().size(), false),
      was_taken_(store.parameters().size(), false) {
  for (std::size_t i = 0; i < store_.parameters().size(); ++i) {
    members_[static_cast<std::size_t>(store_.parameters()[i].buffer)].push_back(
        static_cast<int>(i));
  }
  allocate(first_);
  std::int64_t num_bytes = 0;
  for (const at::Tensor& arena : store_.arenas()) {
    num_bytes += static_cast<std::int64_t>(arena.nbytes());
  }
  early_bucket_bytes_ =
      std::min(bucket_bytes_, std::max(kSmallBucketBytes, num_bytes / kBucketsPerPass));
}

GradientReducer::~GradientReducer() {
  try {
    settle();
  } catch (const std::exception& error) {
    HOPSHARD_LOG(kDebug, "a reduction that was not used failed: ", error.what());
  }
  for (Pending& pending : pending_) {
    drop(pending);
  }
}

void GradientReducer::allocate(Sum& sum) const {
  if (sum.holds.empty()) {
    for (const at::Tensor& arena : store_.arenas()) {
      sum.arenas.push_back(replication_->allocate(static_cast<std::int64_t>(arena.nbytes()))
                               .view(arena.scalar_type()));
    }
    sum.holds.assign(store_.buffers().size(), false);
  }
}

void GradientReducer::define(Sum& sum, int buffer) const {
  const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(buffer)];
  if (owner.is_trainable && !sum.holds[static_cast<std::size_t>(buffer)]) {
    sum.arenas[static_cast<std::size_t>(owner.arena)]
        .narrow(0, owner.arena_begin, owner.master.numel())
        .zero_();
    sum.holds[static_cast<std::size_t>(buffer)] = true;
  }
}

void GradientReducer::define_all(Sum& sum) const {
  for (int buffer = 0; buffer < static_cast<int>(store_.buffers().size()); ++buffer) {
    define(sum, buffer);
  }
}

GradientReducer::Pending& GradientReducer::pending_flat(int buffer) {
  Pending& pending = pending_[static_cast<std::size_t>(buffer)];
  if (!pending.flat.defined()) {
    const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(buffer)];
    const std::int64_t numel = owner.flat->layout().numel();
    const at::ScalarType dtype = dtype_on_wire(*sharding_, owner.master.scalar_type());
    pending.block = pool_.take(numel * static_cast<std::int64_t>(c10::elementSize(dtype)));
    pending.flat = at::from_blob(pending.block.data, {numel}, owner.master.options().dtype(dtype));
  }
  return pending;
}

// Zeros stand for gradients that this rank does not have, and fill the padding.
void GradientReducer::fill_gaps(int buffer, const at::Tensor& flat) const {
  const FlatLayout& layout = store_.buffers()[static_cast<std::size_t>(buffer)].flat->layout();
  const auto itemsize = static_cast<std::int64_t>(flat.element_size());
  char* const data = static_cast<char*>(flat.mutable_data_ptr());
  std::int64_t end = 0;  // Of what is defined so far.
  const auto fill_to = [&](std::int64_t begin) {
    std::memset(data + end * itemsize, 0, static_cast<std::size_t>((begin - end) * itemsize));
  };
  for (const int parameter : members_[static_cast<std::size_t>(buffer)]) {
    if (was_taken_[static_cast<std::size_t>(parameter)]) {
      const int position = store_.parameters()[static_cast<std::size_t>(parameter)].position;
      fill_to(layout.offset_of(position));
      end = layout.offset_of(position) + layout.numel_of(position);
    }
  }
  fill_to(layout.numel());
}

void GradientReducer::drop(Pending& pending) {
  pending.flat.reset();
  pool_.give_back(std::exchange(pending.block, {}));
}

void GradientReducer::take(int parameter) {
  const at::NoGradGuard no_grad;
  const ParameterPlace& place = store_.parameters()[static_cast<std::size_t>(parameter)];
  at::Tensor& grad = place.parameter.mutable_grad();
  if (!grad.defined()) {
    return;  // The user's own hook has used it up.
  }
  const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(place.buffer)];
  const at::Tensor flat = pending_flat(place.buffer).flat;
  const at::Tensor view = owner.flat->view_of(flat, place.position);
  const at::Tensor dense = grad.is_sparse() ? grad.to_dense() : grad.detach();
  const double scale = scale_ / loss_scale_ * wire_scale(flat.scalar_type());
  if (was_taken_[static_cast<std::size_t>(parameter)]) {
    add_scaled(view, dense, scale);
  } else {
    copy_scaled(view, dense, scale);
  }
  was_taken_[static_cast<std::size_t>(parameter)] = true;
  has_gradient_[static_cast<std::size_t>(parameter)] = true;
  grad.reset();
}

void GradientReducer::reduce(int unit, bool is_final) {
  const at::NoGradGuard no_grad;
  Sum& sum = target();
  allocate(sum);
  for (const int buffer : store_.buffers_of(unit)) {
    const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(buffer)];
    if (!owner.is_trainable) {
      continue;
    }
    Pending& pending = pending_flat(buffer);
    fill_gaps(buffer, pending.flat);
    const at::Tensor shard = sum.arenas[static_cast<std::size_t>(owner.arena)].narrow(
        0, owner.arena_begin, owner.master.numel());
    while (in_flight_.size() >= kMostInFlight) {
      finish_oldest();
    }
    const bool accumulates = sum.holds[static_cast<std::size_t>(buffer)];
    Narrow narrow;
    if (pending.flat.scalar_type() != shard.scalar_type()) {
      narrow = make_narrow(shard);
    }
    const bool is_narrow = narrow.values.defined();
    WorkPtr work = reduce_into_shard(*sharding_, pending.flat, is_narrow ? narrow.values : shard,
                                     accumulates && !is_narrow, "reduce/" + store_.unit_name(unit));
    sum.holds[static_cast<std::size_t>(buffer)] = true;
    pending.flat.reset();
    work = watched(timeline_, TimelineLane::kReduce, "hop 1 " + store_.unit_name(unit),
                   std::move(work));
    in_flight_.push_back({std::move(work), std::exchange(pending.block, {}), buffer, is_final,
                          std::move(narrow), accumulates});
    for (const int parameter : members_[static_cast<std::size_t>(buffer)]) {
      was_taken_[static_cast<std::size_t>(parameter)] = false;
    }
  }
  is_open_ = true;
}

void GradientReducer::finish_oldest() {
  const Reduction oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  try {
    oldest.work->wait();
  } catch (...) {
    pool_.give_back(oldest.block);
    pool_.give_back(oldest.narrow.block);
    throw;
  }
  pool_.give_back(oldest.block);
  end_narrow(oldest.narrow, oldest.accumulates);
  if (hops_early_ && oldest.is_final) {
    collect(oldest.buffer);
    if (filled_bytes_ >= early_bucket_bytes_) {
      issue_bucket();
    }
  }
}

void GradientReducer::finish_reductions() {
  while (!in_flight_.empty()) {
    finish_oldest();
  }
}

std::exception_ptr GradientReducer::abandon_reductions() noexcept {
  std::exception_ptr cause;
  for (const Reduction& reduction : std::exchange(in_flight_, {})) {
    cause = find_cause(*reduction.work, cause);
    pool_.give_back(reduction.block);
    pool_.give_back(reduction.narrow.block);
  }
  for (const SecondHop& hop : std::exchange(second_hops_, {})) {
    for (const WorkPtr& work : hop.works) {
      cause = find_cause(*work, cause);
    }
    pool_.give_back(hop.narrow.block);
  }
  return cause;
}

void GradientReducer::begin_pass(bool is_last) {
  finish_reductions();
  hops_early_ = is_last && replication_->size() > 1;
}

bool GradientReducer::is_hopping() const noexcept {
  // A final reduction under way is collected as soon as somebody waits for it.
  const bool will_collect =
      hops_early_ && std::any_of(in_flight_.begin(), in_flight_.end(),
                                 [](const Reduction& reduction) { return reduction.is_final; });
  return will_collect ||
         std::find(is_collected_.begin(), is_collected_.end(), true) != is_collected_.end();
}

void GradientReducer::forget_hops() {
  hops_early_ = false;
  is_collected_.assign(is_collected_.size(), false);
  bucket_.clear();
  filled_bytes_ = 0;
}

void GradientReducer::collect(int buffer) {
  const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(buffer)];
  is_collected_[static_cast<std::size_t>(buffer)] = true;
  const Range range{owner.arena, owner.arena_begin, owner.arena_begin + owner.master.numel()};
  filled_bytes_ += static_cast<std::int64_t>(owner.master.nbytes());
  // A backward mostly goes down the arena, the rest of a pass up.
  if (!bucket_.empty() && bucket_.back().arena == range.arena &&
      bucket_.back().begin == range.end) {
    bucket_.back().begin = range.begin;
  } else if (!bucket_.empty() && bucket_.back().arena == range.arena &&
             bucket_.back().end == range.begin) {
    bucket_.back().end = range.end;
  } else {
    bucket_.push_back(range);
  }
}

void GradientReducer::issue_bucket() {
  for (const Range& range : std::exchange(bucket_, {})) {
    const at::Tensor part = target().arenas[static_cast<std::size_t>(range.arena)].narrow(
        0, range.begin, range.end - range.begin);
    SecondHop hop;
    const at::ScalarType dtype = dtype_on_wire(*replication_, part.scalar_type());
    if (dtype != part.scalar_type()) {
      hop.narrow = make_narrow(part);
      copy_scaled(hop.narrow.values, part, hop.narrow.scale);
    }
    for (WorkPtr& work :
         sum_over_replicas(*replication_, hop.narrow.values.defined() ? hop.narrow.values : part,
                           bucket_bytes_, "second_hop/all")) {
      hop.works.push_back(watched(timeline_, TimelineLane::kSecondHop, "hop 2", std::move(work)));
    }
    second_hops_.push_back(std::move(hop));
  }
  filled_bytes_ = 0;
}

void GradientReducer::settle() {
  finish_reductions();
  while (!second_hops_.empty()) {
    const SecondHop hop = std::move(second_hops_.front());
    second_hops_.pop_front();
    try {
      for (const WorkPtr& work : hop.works) {
        work->wait();
      }
    } catch (...) {
      pool_.give_back(hop.narrow.block);
      throw;
    }
    end_narrow(hop.narrow, /*accumulates=*/false);
  }
}

at::ScalarType GradientReducer::dtype_on_wire(const Communicator& group,
                                              at::ScalarType wide) const {
  const bool is_narrow =
      reduce_dtype_ != at::ScalarType::Undefined && wide == at::kFloat && group.size() > 1;
  return is_narrow ? reduce_dtype_ : wide;
}

double GradientReducer::wire_scale(at::ScalarType dtype) const {
  return dtype == at::kHalf ? loss_scale_ : 1;
}

GradientReducer::Narrow GradientReducer::make_narrow(const at::Tensor& wide) {
  Narrow narrow{.block = {}, .values = {}, .wide = wide, .scale = wire_scale(reduce_dtype_)};
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(reduce_dtype_));
  narrow.block = pool_.take(wide.numel() * itemsize);
  narrow.values =
      at::from_blob(narrow.block.data, {wide.numel()}, wide.options().dtype(reduce_dtype_));
  return narrow;
}

void GradientReducer::end_narrow(const Narrow& narrow, bool accumulates) {
  if (narrow.values.defined() && accumulates) {
    add_scaled(narrow.wide, narrow.values, 1 / narrow.scale);
  } else if (narrow.values.defined()) {
    copy_scaled(narrow.wide, narrow.values, 1 / narrow.scale);
  }
  pool_.give_back(narrow.block);
}

bool GradientReducer::has_leftover(int unit) const {
  return std::any_of(
      store_.buffers_of(unit).begin(), store_.buffers_of(unit).end(),
      [this](int buffer) { return pending_[static_cast<std::size_t>(buffer)].flat.defined(); });
}

void GradientReducer::second_hop() {
  const at::NoGradGuard no_grad;
  finish_reductions();
  Sum& sum = target();
  allocate(sum);
  define_all(sum);
  for (int buffer = 0; buffer < static_cast<int>(store_.buffers().size()); ++buffer) {
    if (store_.buffers()[static_cast<std::size_t>(buffer)].is_trainable &&
        !is_collected_[static_cast<std::size_t>(buffer)]) {
      collect(buffer);
    }
  }
  issue_bucket();
  forget_hops();
  settle();
  if (&sum == &second_) {
    define_all(first_);
    for (std::size_t arena = 0; arena < sum.arenas.size(); ++arena) {
      first_.arenas[arena].add_(second_.arenas[arena]);
    }
    second_ = {};
  }
  is_open_ = false;
  is_closed_ = true;
}

void GradientReducer::zero() {
  // Nobody wants the sums; an error of theirs is not one of forgetting them.
  static_cast<void>(abandon_reductions());
  forget_hops();
  for (Pending& pending : pending_) {
    drop(pending);
  }
  first_.holds.assign(store_.buffers().size(), false);
  second_ = {};
  is_open_ = false;
  is_closed_ = false;
  has_gradient_.assign(has_gradient_.size(), false);
  was_taken_.assign(was_taken_.size(), false);
}

void GradientReducer::zero(int parameter) {
  const at::NoGradGuard no_grad;
  settle();
  const ParameterPlace& place = store_.parameters()[static_cast<std::size_t>(parameter)];
  const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(place.buffer)];
  for (Sum* sum : {&first_, &second_}) {
    if (!sum->holds.empty() && sum->holds[static_cast<std::size_t>(place.buffer)]) {
      store_.piece_of(sum->arenas[static_cast<std::size_t>(owner.arena)], parameter).zero_();
    }
  }
  has_gradient_[static_cast<std::size_t>(parameter)] = false;
  was_taken_[static_cast<std::size_t>(parameter)] = false;
}

void GradientReducer::set_gradient(int parameter, const at::Tensor& full) {
  const ParameterPlace& place = store_.parameters()[static_cast<std::size_t>(parameter)];
  const ShardedBuffer& owner = store_.buffers()[static_cast<std::size_t>(place.buffer)];
  zero(parameter);
  // The full tensor is a mean already. In an open sum hop 2 would add it once per replica, so it
  // goes into the closed one; with nothing closed yet there is nothing open to keep apart.
  HOPSHARD_CHECK(is_closed_ || !is_open_ || replication_->size() == 1, ShardedError,
                 "the gradient of '", place.name,
                 "' was replaced between two backward passes of one step; assign p.grad after the "
                 "last one");
  is_closed_ = true;
  define(first_, place.buffer);
  store_.write_piece(first_.arenas[static_cast<std::size_t>(owner.arena)], parameter, full);
  has_gradient_[static_cast<std::size_t>(parameter)] = true;
}

const std::vector<at::Tensor>& GradientReducer::arenas() {
  settle();
  define_all(first_);
  return first_.arenas;
}

std::int64_t GradientReducer::persistent_bytes() const {
  std::int64_t nbytes = 0;
  for (const Sum* sum : {&first_, &second_}) {
    for (const at::Tensor& arena : sum->arenas) {
      nbytes += static_cast<std::int64_t>(arena.nbytes());
    }
  }
  return nbytes;
}

}  // namespace hopshard
