#include "hopshard/runtime/shard_store.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "hopshard/core/error.hpp"
#include "hopshard/core/log.hpp"
#include "hopshard/layout/piece_table.hpp"

namespace hopshard {

namespace {

// Masters are at least fp32: 16-bit weights cannot take small updates.
at::ScalarType master_dtype_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor whole_of(const ShardedBuffer& buffer) {
  return at::from_blob(buffer.memory.data, {buffer.flat->layout().numel()}, buffer.shard.options());
}

/// A block for the length of a scope, which a failing collective may end.
class ScopedBlock {
 public:
  ScopedBlock(BufferPool& pool, std::int64_t nbytes) : pool_(pool), block_(pool.take(nbytes)) {}
  ~ScopedBlock() { pool_.give_back(block_); }
  ScopedBlock(const ScopedBlock&) = delete;
  ScopedBlock& operator=(const ScopedBlock&) = delete;

  [[nodiscard]] void* data() const noexcept { return block_.data; }

 private:
  BufferPool& pool_;
  PoolBlock block_;
};

}  // namespace

ShardStore::ShardStore(const std::vector<UnitSpec>& units, CommunicatorPtr world,
                       CommunicatorPtr sharding, BufferPool& pool, Timeline* timeline,
                       CommunicatorPtr secondary)
    : world_(std::move(world)),
      sharding_(std::move(sharding)),
      secondary_(std::move(secondary)),
      pool_(pool),
      timeline_(timeline) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const UnitSpec& spec : units) {
    for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
      const at::Tensor& parameter = spec.parameters[i];
      HOPSHARD_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second, ConfigError,
                     "parameter '", spec.parameter_names.at(i), "' belongs to two units");
      HOPSHARD_CHECK(parameter.device().is_cpu() && parameter.layout() == at::kStrided, ConfigError,
                     "parameter '", spec.parameter_names.at(i), "' is on ", parameter.device(),
                     " with layout ", parameter.layout(), "; dense CPU parameters are supported");
      HOPSHARD_CHECK(!parameter.requires_grad() || parameter.is_floating_point(), ConfigError,
                     "parameter '", spec.parameter_names.at(i), "' of dtype ",
                     parameter.scalar_type(), " cannot be trained");
    }
  }

  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    unit_names_.push_back(units[unit].name);
    buffers_of_unit_.emplace_back();
    add_buffers_of(static_cast<int>(unit), units[unit]);
  }

  make_arenas();
}

// They come last, when their sizes are known; shards move into them.
void ShardStore::make_arenas() {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    std::vector<ShardedBuffer*> members;
    std::int64_t numel = 0;
    for (ShardedBuffer& buffer : buffers_) {
      if (buffer.is_trainable && master_dtype_of(buffer.flat->dtype()) == dtype) {
        buffer.arena = static_cast<int>(arenas_.size());
        buffer.arena_begin = numel;
        numel += buffer.shard.numel();
        members.push_back(&buffer);
      }
    }
    if (members.empty()) {
      continue;
    }
    arenas_.push_back(allocate_shard(numel, dtype));
    const at::ScalarType compute_dtype = members.front()->flat->dtype();
    const bool is_uniform = std::all_of(members.begin(), members.end(), [&](const auto* member) {
      return member->flat->dtype() == compute_dtype;
    });
    shard_arenas_.push_back(
        is_uniform && compute_dtype != dtype ? allocate_shard(numel, compute_dtype) : at::Tensor());
    for (ShardedBuffer* member : members) {
      const std::int64_t slice_numel = member->shard.numel();
      member->master = arenas_.back().narrow(0, member->arena_begin, slice_numel);
      member->master.copy_(member->shard);
      if (member->flat->dtype() == dtype) {
        member->shard = member->master;
      } else if (shard_arenas_.back().defined()) {
        move_shard(*member, shard_arenas_.back().narrow(0, member->arena_begin, slice_numel));
      } else {
        move_shard(*member, allocate_shard(slice_numel, member->flat->dtype()));
      }
    }
  }
  for (ShardedBuffer& buffer : buffers_) {
    if (!buffer.is_trainable) {
      move_shard(buffer, allocate_shard(buffer.shard.numel(), buffer.flat->dtype()));
    }
  }
}

void ShardStore::move_shard(ShardedBuffer& buffer, at::Tensor to) const {
  to.copy_(buffer.shard);
  buffer.shard = std::move(to);
}

at::Tensor ShardStore::allocate_shard(std::int64_t numel, at::ScalarType dtype) const {
  return sharding_->allocate(numel * static_cast<std::int64_t>(c10::elementSize(dtype)))
      .view(dtype);
}

ShardStore::~ShardStore() {
  for (int unit = 0; unit < num_units(); ++unit) {
    release(unit);
  }
}

void ShardStore::add_buffers_of(int unit, const UnitSpec& spec) {
  // Trainable before frozen, then by dtype; a map, so that all ranks agree.
  std::map<std::tuple<bool, int>, std::vector<std::size_t>> members;
  const auto dtype_of = [&](std::size_t i) {
    return spec.dtypes.empty() ? spec.parameters[i].scalar_type() : spec.dtypes.at(i);
  };
  for (std::size_t i = 0; i < spec.parameters.size(); ++i) {
    members[{!spec.parameters[i].requires_grad(), static_cast<int>(dtype_of(i))}].push_back(i);
  }
  for (const auto& [key, indices] : members) {
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    for (const std::size_t i : indices) {
      parameters.push_back(spec.parameters[i]);
      names.push_back(spec.parameter_names[i]);
    }
    // FlatBuffer points the parameters at placeholders: hold on to their values until they are
    // in the flat buffer. Rank 0's travel; the others' buffers are overwritten.
    std::vector<at::Tensor> values;
    const auto dtype = static_cast<at::ScalarType>(std::get<1>(key));
    at::ScalarType initial_dtype = dtype;
    for (const at::Tensor& parameter : parameters) {
      values.push_back(parameter.variable_data());
      if (parameter.scalar_type() != dtype) {
        initial_dtype = master_dtype_of(dtype);  // Masters keep the digits.
        parameter.set_data(at::empty_strided(parameter.sizes(), parameter.strides(),
                                             parameter.options().dtype(dtype)));
      }
    }
    ShardedBuffer buffer;
    buffer.unit = unit;
    buffer.is_trainable = !std::get<0>(key);
    buffer.flat = std::make_unique<FlatBuffer>(parameters, names, sharding_->size());
    const FlatLayout& layout = buffer.flat->layout();
    const auto itemsize = static_cast<std::int64_t>(c10::elementSize(initial_dtype));
    const ScopedBlock memory(pool_, layout.numel() * itemsize);
    const at::Tensor whole =
        at::from_blob(memory.data(), {layout.numel()}, at::TensorOptions().dtype(initial_dtype));
    whole.zero_();
    for (std::size_t i = 0; i < values.size(); ++i) {
      buffer.flat->view_of(whole, static_cast<int>(i)).copy_(values[i]);
      values[i].reset();
    }
    world_->broadcast(whole, 0, {.timeout = {}, .tag = "initial/" + spec.name})->wait();
    buffer.shard =
        whole.narrow(0, sharding_->group().my_slot() * layout.slice_numel(), layout.slice_numel())
            .clone();
    if (secondary_ && !spec.is_persistent) {
      buffer.secondary = secondary_->allocate(buffer.flat->nbytes() / secondary_->size())
                             .view(buffer.flat->dtype());
    }

    buffers_of_unit_[static_cast<std::size_t>(unit)].push_back(static_cast<int>(buffers_.size()));
    buffers_.push_back(std::move(buffer));
    place_parameters(static_cast<int>(buffers_.size()) - 1, names, parameters);
  }
}

void ShardStore::place_parameters(int buffer, const std::vector<std::string>& names,
                                  const std::vector<at::Tensor>& parameters) {
  const ShardedBuffer& owner = buffers_[static_cast<std::size_t>(buffer)];
  const PieceTable pieces(owner.flat->layout());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    ParameterPlace place{.name = names[i],
                         .parameter = parameters[i],
                         .unit = owner.unit,
                         .buffer = buffer,
                         .position = static_cast<int>(i),
                         .is_trainable = owner.is_trainable};
    for (const Piece& piece : pieces.of_parameter(static_cast<int>(i))) {
      if (piece.slice == sharding_->group().my_slot()) {
        place.piece_numel = piece.numel;
        place.piece_in_parameter = piece.parameter_begin;
        place.piece_in_slice = piece.slice_begin;
      }
    }
    places_.push_back(std::move(place));
  }
}

const ParameterPlace& ShardStore::place(int parameter) const {
  return places_.at(static_cast<std::size_t>(parameter));
}

bool ShardStore::is_trainable(int unit) const {
  for (const int index : buffers_of(unit)) {
    if (buffers_[static_cast<std::size_t>(index)].is_trainable) {
      return true;
    }
  }
  return false;
}

void ShardStore::begin_gather(int unit, bool from_secondary, bool keeps_secondary) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode off(false);  // Transports write on threads of their own.
  for (const int index : buffers_of(unit)) {
    const ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(index)];
    buffer.flat->check_untouched();
    HOPSHARD_CHECK(!from_secondary || buffer.holds_secondary, CommError, "the gather that was to ",
                   "leave secondary shards of unit '", unit_name(unit), "' on this rank failed");
  }
  Communicator& group = from_secondary ? *secondary_ : *sharding_;
  group.group_begin();
  for (const int index : buffers_of(unit)) {
    ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(index)];
    buffer.memory = pool_.take(buffer.flat->nbytes());
    buffer.keeps_secondary = keeps_secondary;
    buffer.holds_secondary = buffer.holds_secondary && !keeps_secondary;
    buffer.gathering =
        watched(timeline_, TimelineLane::kGather, "gather " + unit_name(unit),
                group.all_gather(whole_of(buffer), from_secondary ? buffer.secondary : buffer.shard,
                                 {.timeout = {}, .tag = "unshard/" + unit_name(unit)}));
  }
  group.group_end();
}

void ShardStore::wait_for_gather(ShardedBuffer& buffer) const {
  const WorkPtr work = std::move(buffer.gathering);
  if (!work) {
    return;
  }
  work->wait();
  if (buffer.keeps_secondary) {
    const at::NoGradGuard no_grad;
    const std::int64_t numel = buffer.secondary.numel();
    buffer.secondary.copy_(
        whole_of(buffer).narrow(0, secondary_->group().my_slot() * numel, numel));
    buffer.holds_secondary = true;
  }
}

void ShardStore::finish_gather(int unit) {
  for (const int index : buffers_of(unit)) {
    ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(index)];
    if (buffer.gathering) {
      wait_for_gather(buffer);
      buffer.flat->attach(buffer.memory.data);
    }
  }
}

std::exception_ptr ShardStore::abandon_gathers() noexcept {
  std::exception_ptr cause;
  for (ShardedBuffer& buffer : buffers_) {
    if (const WorkPtr work = std::move(buffer.gathering)) {
      cause = find_cause(*work, cause);
      pool_.give_back(std::exchange(buffer.memory, {}));
    }
  }
  return cause;
}

void ShardStore::release(int unit) noexcept {
  for (const int index : buffers_of(unit)) {
    ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(index)];
    try {
      wait_for_gather(buffer);
    } catch (const std::exception& error) {
      // Nobody wanted the values; whoever asks for others hears of it.
      HOPSHARD_LOG(kDebug, "a gather that was not used failed: ", error.what());
    }
    if (buffer.flat->is_attached()) {
      buffer.flat->detach();
    }
    pool_.give_back(std::exchange(buffer.memory, {}));
  }
}

void ShardStore::write_back(int unit) {
  const at::NoGradGuard no_grad;
  for (const int index : buffers_of(unit)) {
    ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(index)];
    HOPSHARD_CHECK(buffer.flat->is_attached(), ScheduleError, "unit '", unit_name(unit),
                   "' is sharded: there is nothing to write back");
    buffer.flat->take_back_rebound();
    const std::int64_t slice_numel = buffer.flat->layout().slice_numel();
    const at::Tensor slice =
        buffer.flat->whole().narrow(0, sharding_->group().my_slot() * slice_numel, slice_numel);
    if (buffer.is_trainable && buffer.master.dtype() != buffer.shard.dtype()) {
      // What was not changed keeps the digits that the compute dtype does not have.
      const at::Tensor wide = slice.to(buffer.master.scalar_type());
      buffer.master.copy_(at::where(slice.ne(buffer.shard), wide, buffer.master));
    }
    buffer.shard.copy_(slice);
  }
}

bool ShardStore::holds_secondary(int unit) const {
  return std::all_of(buffers_of(unit).begin(), buffers_of(unit).end(), [this](int buffer) {
    return buffers_[static_cast<std::size_t>(buffer)].holds_secondary;
  });
}

void ShardStore::forget_secondary(int unit) {
  for (const int index : buffers_of(unit)) {
    buffers_[static_cast<std::size_t>(index)].holds_secondary = false;
  }
}

bool ShardStore::is_attached(int unit) const {
  return std::all_of(buffers_of(unit).begin(), buffers_of(unit).end(), [this](int buffer) {
    return buffers_[static_cast<std::size_t>(buffer)].flat->is_attached();
  });
}

void ShardStore::check_unchanged(int unit) const {
  for (const int index : buffers_of(unit)) {
    buffers_[static_cast<std::size_t>(index)].flat->check_unchanged();
  }
}

void ShardStore::accept_changes(int unit) const {
  for (const int index : buffers_of(unit)) {
    buffers_[static_cast<std::size_t>(index)].flat->accept_changes();
  }
}

void ShardStore::refresh_shards(bool with_arenas) {
  const at::NoGradGuard no_grad;
  for (ShardedBuffer& buffer : buffers_) {
    if (!buffer.is_trainable || buffer.master.dtype() == buffer.shard.dtype()) {
      continue;
    }
    if (with_arenas || !shard_arenas_[static_cast<std::size_t>(buffer.arena)].defined()) {
      buffer.shard.copy_(buffer.master);
    }
  }
}

void ShardStore::write_parameter(int parameter, const at::Tensor& full) {
  const at::NoGradGuard no_grad;
  const ParameterPlace& where = place(parameter);
  const ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(where.buffer)];
  const at::Tensor piece = piece_from_full(parameter, full);
  buffer.shard.narrow(0, where.piece_in_slice, where.piece_numel).copy_(piece);
  if (buffer.is_trainable) {
    buffer.master.narrow(0, where.piece_in_slice, where.piece_numel).copy_(piece);
  }
}

at::Tensor ShardStore::piece_of(const at::Tensor& arena_like, int parameter) const {
  const ParameterPlace& where = place(parameter);
  const ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(where.buffer)];
  HOPSHARD_CHECK(buffer.is_trainable, InvalidArgument, "parameter '", where.name,
                 "' is frozen: it has no gradient and no optimizer state");
  return arena_like.narrow(0, buffer.arena_begin + where.piece_in_slice, where.piece_numel);
}

at::Tensor ShardStore::piece_from_full(int parameter, const at::Tensor& full) const {
  const at::NoGradGuard no_grad;
  const ParameterPlace& where = place(parameter);
  return buffers_[static_cast<std::size_t>(where.buffer)]
      .flat->in_memory_order(full.detach(), where.position)
      .narrow(0, where.piece_in_parameter, where.piece_numel);
}

void ShardStore::write_piece(const at::Tensor& arena_like, int parameter,
                             const at::Tensor& full) const {
  piece_of(arena_like, parameter).copy_(piece_from_full(parameter, full));
}

at::Tensor ShardStore::gather_full(const at::Tensor& arena_like, int parameter,
                                   const std::string& tag) {
  const ParameterPlace& where = place(parameter);
  const ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(where.buffer)];
  HOPSHARD_CHECK(buffer.is_trainable, InvalidArgument, "parameter '", where.name, "' is frozen");
  at::Tensor full;
  gather_flat(buffer, arena_like, tag + "/" + where.name, [&](const at::Tensor& flat) {
    full = buffer.flat->view_of(flat, where.position).clone();
  });
  return full;
}

std::map<int, at::Tensor> ShardStore::gather_masters(int unit) {
  std::map<int, at::Tensor> masters;
  for (const int index : buffers_of(unit)) {
    const ShardedBuffer& buffer = buffers_[static_cast<std::size_t>(index)];
    if (!buffer.is_trainable) {
      continue;
    }
    const at::Tensor& arena = arenas_[static_cast<std::size_t>(buffer.arena)];
    gather_flat(buffer, arena, "masters/" + unit_name(unit), [&](const at::Tensor& flat) {
      for (std::size_t i = 0; i < places_.size(); ++i) {
        if (places_[i].buffer == index) {
          masters[static_cast<int>(i)] = buffer.flat->view_of(flat, places_[i].position).clone();
        }
      }
    });
  }
  return masters;
}

void ShardStore::gather_flat(const ShardedBuffer& buffer, const at::Tensor& arena_like,
                             const std::string& tag,
                             const std::function<void(const at::Tensor& flat)>& use) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode off(false);
  const FlatLayout& layout = buffer.flat->layout();
  const ScopedBlock block(pool_, layout.numel() * arena_like.element_size());
  const at::Tensor flat = at::from_blob(block.data(), {layout.numel()},
                                        at::TensorOptions().dtype(arena_like.scalar_type()));
  const at::Tensor slice = arena_like.narrow(0, buffer.arena_begin, layout.slice_numel());
  sharding_->all_gather(flat, slice, {.timeout = {}, .tag = tag})->wait();
  use(flat);
}

std::int64_t ShardStore::persistent_bytes() const {
  std::int64_t nbytes = 0;
  for (const at::Tensor& arena : arenas_) {
    nbytes += static_cast<std::int64_t>(arena.nbytes());
  }
  for (const ShardedBuffer& buffer : buffers_) {
    if (!buffer.is_trainable || buffer.master.dtype() != buffer.shard.dtype()) {
      nbytes += static_cast<std::int64_t>(buffer.shard.nbytes());
    }
    if (buffer.secondary.defined()) {
      nbytes += static_cast<std::int64_t>(buffer.secondary.nbytes());
    }
  }
  return nbytes;
}

void ShardStore::bump_versions() const {
  for (const ParameterPlace& where : places_) {
    where.parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace hopshard
