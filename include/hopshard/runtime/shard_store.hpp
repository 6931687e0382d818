// This rank's slices of all units: who lies where, gather and release, write-back. Collective
// where said; knows nothing of when (schedule.hpp) or of gradients (gradient_reducer.hpp).
//
// [Note: arenas]
// The fp32 (or fp64) masters of all trainable units lie side by side in one arena per dtype, in
// unit order. Gradients and optimizer moments are tensors of the same layout, so the norm, the
// optimizer and hop 2 each run over one contiguous range. Where the compute dtype is the
// master's, the master is the shard that gathers send: no second copy. Where it is one 16-bit type
// throughout, the shards are an arena of the same layout, which an optimizer can write as it goes.
// All of them are the transport's memory: peers read a rank's shards where they are.
//   unit        | 0: root      | 1: h.0             | 2: h.1             |
//   arena [0..) | slice, pad   | slice, pad         | slice, pad         |
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hopshard/comm/communicator.hpp"
#include "hopshard/runtime/buffer_pool.hpp"
#include "hopshard/runtime/flat_buffer.hpp"
#include "hopshard/runtime/timeline.hpp"

namespace hopshard {

/// A unit as the user's model gives it.
struct UnitSpec {
  std::string name;
  std::vector<std::string> parameter_names;  ///< As in module.named_parameters().
  std::vector<at::Tensor> parameters;        ///< The user's parameters, on this rank's device.
  bool is_persistent = false;                ///< Gathered once per step, and stays.
  /// Of the computation, by parameter; empty: what they have. A parameter gets this dtype, and its
  /// master the values that it had.
  std::vector<at::ScalarType> dtypes = {};
};

/// A unit's parameters of one dtype and trainability.
struct ShardedBuffer {
  int unit = 0;
  bool is_trainable = false;
  std::unique_ptr<FlatBuffer> flat;
  PoolBlock memory;      ///< Attached to `flat` while gathered.
  WorkPtr gathering;     ///< Fills `memory`, which is not attached before it is done.
  at::Tensor shard;      ///< [slice_numel], compute dtype: what gathers send.
  at::Tensor secondary;  ///< This rank's part of the secondary group's copy; see schedule.hpp.
  bool keeps_secondary = false;  ///< The gather under way leaves it.
  bool holds_secondary = false;
  int arena = -1;  ///< Index of the arena that holds the master; -1 if frozen.
  std::int64_t arena_begin = 0;
  at::Tensor master;  ///< [slice_numel], a view of the arena; `shard` itself if same dtype.
};

/// Where one parameter is. The piece is this rank's part; numel 0 if it has none.
struct ParameterPlace {
  std::string name;
  at::Tensor parameter;
  int unit = 0;
  int buffer = 0;    ///< Index in ShardStore::buffers().
  int position = 0;  ///< Index in the buffer's layout.
  bool is_trainable = false;
  std::int64_t piece_numel = 0;
  std::int64_t piece_in_parameter = 0;  ///< First element, in the parameter's memory order.
  std::int64_t piece_in_slice = 0;      ///< The same element in the slice.
};

/// Threads: one at a time. Collective functions are called by all ranks in one order.
class ShardStore {
 public:
  /// Collective over `world`: rank 0's values become everyone's. Unit 0 is the root and may be
  /// empty; a parameter belongs to one unit.
  /// @param timeline   null, or where gathers are watched.
  /// @param secondary  null, or the group that gathers from secondary shards.
  /// @throws ConfigError  names the parameter: on two units, of a dtype that cannot be trained.
  ShardStore(const std::vector<UnitSpec>& units, CommunicatorPtr world, CommunicatorPtr sharding,
             BufferPool& pool, Timeline* timeline = nullptr, CommunicatorPtr secondary = nullptr);
  ~ShardStore();

  [[nodiscard]] int num_units() const noexcept { return static_cast<int>(unit_names_.size()); }
  [[nodiscard]] const std::string& unit_name(int unit) const {
    return unit_names_.at(static_cast<std::size_t>(unit));
  }
  [[nodiscard]] const std::vector<int>& buffers_of(int unit) const {
    return buffers_of_unit_.at(static_cast<std::size_t>(unit));
  }
  [[nodiscard]] const std::vector<ShardedBuffer>& buffers() const noexcept { return buffers_; }
  [[nodiscard]] const std::vector<ParameterPlace>& parameters() const noexcept { return places_; }
  [[nodiscard]] const std::vector<at::Tensor>& arenas() const noexcept { return arenas_; }
  /// What gathers send, laid out like the arena of the same index; undefined where that is the
  /// arena itself or dtypes are mixed.
  [[nodiscard]] const std::vector<at::Tensor>& shard_arenas() const noexcept {
    return shard_arenas_;
  }
  [[nodiscard]] bool is_trainable(int unit) const;

  /// Collective over `sharding`, or `secondary`: issues the unit's all-gathers; finish_gather or
  /// release follows.
  void begin_gather(int unit, bool from_secondary = false, bool keeps_secondary = false);
  /// Waits, then the unit's parameters become whole.
  void finish_gather(int unit);
  /// After a failure: ends all gathers under way. Returns the reason if one of them knows it.
  [[nodiscard]] std::exception_ptr abandon_gathers() noexcept;
  /// They become placeholders. Nothing happens to a unit that is not gathered.
  void release(int unit) noexcept;
  /// Copies this rank's slice of the gathered parameters into shard and master.
  /// @throws ConfigError  a parameter was given another shape or dtype.
  void write_back(int unit);
  [[nodiscard]] bool is_attached(int unit) const;
  [[nodiscard]] bool holds_secondary(int unit) const;
  /// The weights change: what they hold is no longer the unit.
  void forget_secondary(int unit);
  /// @throws ShardedError  a gathered parameter was changed in place and not written back.
  void check_unchanged(int unit) const;
  /// Gathered parameters may differ from the shards on purpose.
  void accept_changes(int unit) const;
  /// Compute-dtype shards follow the masters (after an optimizer step).
  /// @param with_arenas  false: those of shard_arenas() do already.
  void refresh_shards(bool with_arenas = true);
  /// Sets this rank's piece from a full tensor; gathered copies are not touched.
  void write_parameter(int parameter, const at::Tensor& full);

  /// Copies the full tensor's piece of this rank into `arena_like`.
  void write_piece(const at::Tensor& arena_like, int parameter, const at::Tensor& full) const;
  /// This rank's piece of a full tensor of the parameter's shape, 1-D.
  [[nodiscard]] at::Tensor piece_from_full(int parameter, const at::Tensor& full) const;
  /// This rank's piece of a parameter in a tensor laid out like its arena, 1-D.
  [[nodiscard]] at::Tensor piece_of(const at::Tensor& arena_like, int parameter) const;
  /// Collective over `sharding`: the full tensor whose pieces lie in `arena_like`.
  [[nodiscard]] at::Tensor gather_full(const at::Tensor& arena_like, int parameter,
                                       const std::string& tag);
  /// Collective over `sharding`: the unit's trainable parameters as the masters hold them.
  [[nodiscard]] std::map<int, at::Tensor> gather_masters(int unit);
  /// Bytes that stay: shards, masters.
  [[nodiscard]] std::int64_t persistent_bytes() const;
  /// Users of the parameters see that their values changed.
  void bump_versions() const;

 private:
  void make_arenas();
  void move_shard(ShardedBuffer& buffer, at::Tensor to) const;
  void gather_flat(const ShardedBuffer& buffer, const at::Tensor& arena_like,
                   const std::string& tag, const std::function<void(const at::Tensor& flat)>& use);
  void wait_for_gather(ShardedBuffer& buffer) const;
  [[nodiscard]] at::Tensor allocate_shard(std::int64_t numel, at::ScalarType dtype) const;
  void add_buffers_of(int unit, const UnitSpec& spec);
  void place_parameters(int buffer, const std::vector<std::string>& names,
                        const std::vector<at::Tensor>& parameters);
  const ParameterPlace& place(int parameter) const;

  CommunicatorPtr world_;
  CommunicatorPtr sharding_;
  CommunicatorPtr secondary_;
  BufferPool& pool_;
  Timeline* timeline_;
  std::vector<std::string> unit_names_;
  std::vector<std::vector<int>> buffers_of_unit_;
  std::vector<ShardedBuffer> buffers_;
  std::vector<ParameterPlace> places_;
  std::vector<at::Tensor> arenas_;
  std::vector<at::Tensor> shard_arenas_;
};

}  // namespace hopshard
