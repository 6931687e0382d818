// Long, because the algorithms are read side by side: they differ in who sends what, no more.
#include "operations.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "../../reduce_parts.hpp"
#include "group_state.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::detail::ofi {
namespace {

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

const std::byte* const_bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

/// The chunks of `slice` (in elements) in bytes, moved so that the slice begins at `begin_bytes`.
std::vector<Slice> byte_chunks(const Slice& slice, std::size_t chunk, std::size_t element_bytes,
                               std::size_t begin_bytes) {
  std::vector<Slice> chunks;
  for (const Slice& one : chunks_of({0, slice.count}, chunk)) {
    chunks.push_back({begin_bytes + one.begin * element_bytes, one.count * element_bytes});
  }
  return chunks;
}

class Barrier final : public Operation {
 public:
  using Operation::Operation;

 private:
  void do_start() override { start_agreement(); }
  void do_arrival(InStream& /*stream*/, std::size_t /*index*/) override {}
};

/// With what all-gather and all-reduce share: a ring in which each rank hands on what it got, chunk
/// by chunk, every chunk landing at its final place.
class GatheringOperation : public Operation {
 public:
  using Operation::Operation;

 protected:
  static constexpr std::uint16_t kGatherChannel = 1;

  /// `slices` in elements, of all members, in the memory at `base`.
  void start_ring(std::byte* base, std::size_t num_bytes, const std::vector<Slice>& slices,
                  std::size_t chunk, std::size_t element_bytes) {
    const int size = group().group().size();
    const int rank = group().group().rank;
    const auto chunks_of_member = [&](int member) {
      const Slice& slice = slices[static_cast<std::size_t>(member)];
      return byte_chunks(slice, chunk, element_bytes, slice.begin * element_bytes);
    };
    std::vector<Slice> to_send = chunks_of_member(rank);
    num_own_ = to_send.size();
    std::vector<Slice> to_receive;
    for (int step = 1; step < size; ++step) {
      const std::vector<Slice> chunks = chunks_of_member((rank - step + size) % size);
      to_receive.insert(to_receive.end(), chunks.begin(), chunks.end());
      if (step < size - 1) {
        to_send.insert(to_send.end(), chunks.begin(), chunks.end());
      }
    }
    num_handed_on_ = to_send.size() - num_own_;
    base_ = base;
    will_send_from(base, num_bytes);
    ring_in_ =
        &receive((rank + size - 1) % size, kGatherChannel, base, num_bytes, std::move(to_receive));
    ring_out_ = &stream_to((rank + 1) % size, kGatherChannel, std::move(to_send));
  }

  void push_own(std::size_t index, const std::byte* data) { push(*ring_out_, index, data); }
  [[nodiscard]] std::size_t num_own_chunks() const noexcept { return num_own_; }
  /// Of this rank's slice, from the base.
  [[nodiscard]] const Slice& own_chunk(std::size_t index) const { return ring_out_->chunks[index]; }

  [[nodiscard]] bool is_of_ring(const InStream& stream) const { return &stream == ring_in_; }
  void hand_on(std::size_t index) {
    if (index < num_handed_on_) {
      push(*ring_out_, num_own_ + index, base_ + ring_in_->chunks[index].begin);
    }
  }

 private:
  std::byte* base_ = nullptr;
  InStream* ring_in_ = nullptr;
  OutStream* ring_out_ = nullptr;
  std::size_t num_own_ = 0;
  std::size_t num_handed_on_ = 0;
};

class RingAllGather final : public GatheringOperation {
 public:
  RingAllGather(CallInfo call, at::Tensor output, at::Tensor input)
      : GatheringOperation(std::move(call)), output_(std::move(output)), input_(std::move(input)) {}

 private:
  void do_start() override {
    const std::size_t element_bytes = input_.itemsize();
    const auto numel = static_cast<std::size_t>(input_.numel());
    const std::vector<Slice> slices = slot_slices(group().group(), numel);
    const Slice own = slices[static_cast<std::size_t>(group().group().rank)];
    std::byte* slot = bytes_of(output_) + own.begin * element_bytes;
    const std::byte* from = const_bytes_of(input_);
    start_ring(bytes_of(output_), output_.nbytes(), slices,
               chunk_numel(numel, element_bytes, engine().num_rails()), element_bytes);
    if (from != slot) {
      will_send_from(from, input_.nbytes());
    }
    for (std::size_t i = 0; i < num_own_chunks(); ++i) {
      push_own(i, from + (own_chunk(i).begin - own.begin * element_bytes));
    }
    if (from != slot) {
      std::memcpy(slot, from, input_.nbytes());
    }
  }

  void do_arrival(InStream& /*stream*/, std::size_t index) override { hand_on(index); }

  at::Tensor output_;
  at::Tensor input_;
};

class DirectAllGather final : public Operation {
 public:
  DirectAllGather(CallInfo call, at::Tensor output, at::Tensor input)
      : Operation(std::move(call)), output_(std::move(output)), input_(std::move(input)) {}

 private:
  void do_start() override {
    const Group& members = group().group();
    const std::size_t num_bytes = input_.nbytes();
    std::byte* output = bytes_of(output_);
    const std::byte* from = const_bytes_of(input_);
    will_send_from(from, num_bytes);
    for (const int member : peers_after(members.rank, members.size())) {
      const auto slot = static_cast<std::size_t>(members.slot_of(member));
      receive(member, 0, output + slot * num_bytes, num_bytes, {{0, num_bytes}});
    }
    for (const int member : peers_after(members.rank, members.size())) {
      push(stream_to(member, 0, {{0, num_bytes}}), 0, from);
    }
    std::byte* slot = output + static_cast<std::size_t>(members.my_slot()) * num_bytes;
    if (slot != from) {
      std::memcpy(slot, from, num_bytes);
    }
  }

  void do_arrival(InStream& /*stream*/, std::size_t /*index*/) override {}

  at::Tensor output_;
  at::Tensor input_;
};

class Broadcast final : public Operation {
 public:
  Broadcast(CallInfo call, at::Tensor tensor, int root)
      : Operation(std::move(call)), tensor_(std::move(tensor)), root_(root) {}

 private:
  void do_start() override {
    start_agreement();
    const Group& members = group().group();
    const std::size_t num_bytes = tensor_.nbytes();
    const bool small = num_bytes <= kTreeBytes;
    const TreePlace place = small ? binomial_tree(members.rank, root_, members.size())
                                  : chain(members.rank, root_, members.size());
    const std::size_t chunk = small ? num_bytes : chunk_numel(num_bytes, 1, engine().num_rails());
    std::vector<Slice> chunks = chunks_of({0, num_bytes}, chunk);
    will_send_from(const_bytes_of(tensor_), num_bytes);
    if (place.parent >= 0) {
      receive(place.parent, 0, bytes_of(tensor_), num_bytes, chunks);
    }
    for (const int child : place.children) {
      children_.push_back(&stream_to(child, 0, chunks));
    }
    if (place.parent < 0) {
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        hand_on(i, chunks[i]);
      }
    }
  }

  void do_arrival(InStream& stream, std::size_t index) override {
    hand_on(index, stream.chunks[index]);
  }

  void hand_on(std::size_t index, const Slice& chunk) {
    for (OutStream* child : children_) {
      push(*child, index, const_bytes_of(tensor_) + chunk.begin);
    }
  }

  static constexpr std::size_t kTreeBytes = 32 * 1024;

  at::Tensor tensor_;
  int root_;
  std::vector<OutStream*> children_;
};

/// Everybody sends its whole tensor to everybody, and all sum in the order of the ranks.
class GatheredSum final : public Operation {
 public:
  GatheredSum(CallInfo call, at::Tensor tensor, ReduceOp op)
      : Operation(std::move(call)), tensor_(std::move(tensor)), op_(op) {}

 private:
  void do_start() override {
    const Group& members = group().group();
    const std::size_t num_bytes = tensor_.nbytes();
    // Also this rank's own part: the sum may be written while it is still being sent.
    parts_ = scratch(num_bytes * static_cast<std::size_t>(members.size()));
    std::memcpy(part(members.rank), const_bytes_of(tensor_), num_bytes);
    num_left_ = members.size() - 1;
    for (const int member : peers_after(members.rank, members.size())) {
      receive(member, 0, part(member), num_bytes, {{0, num_bytes}});
    }
    for (const int member : peers_after(members.rank, members.size())) {
      push(stream_to(member, 0, {{0, num_bytes}}), 0, part(members.rank));
    }
  }

  void do_arrival(InStream& /*stream*/, std::size_t /*index*/) override {
    if (--num_left_ > 0) {
      return;
    }
    std::vector<const void*> parts;
    for (int member = 0; member < group().group().size(); ++member) {
      parts.push_back(part(member));
    }
    reduce_parts(bytes_of(tensor_), parts, tensor_.numel(), tensor_.scalar_type(), op_);
  }

  [[nodiscard]] std::byte* part(int member) const {
    return parts_->data + static_cast<std::size_t>(member) * tensor_.nbytes();
  }

  at::Tensor tensor_;
  ReduceOp op_;
  Scratch parts_;
  int num_left_ = 0;
};

/// Reduces every member's slice at its owner and, for an all-reduce, gathers the slices again; a
/// chunk goes round as soon as it is summed.
class Reduction : public GatheringOperation {
 public:
  struct Arguments {
    at::Tensor input;
    at::Tensor output;  ///< The own slice; for an all-reduce the input.
    std::vector<Slice> slices;
    ReduceOp op = ReduceOp::kSum;
    bool accumulate = false;
    bool gather = false;
  };

  Reduction(CallInfo call, Arguments arguments)
      : GatheringOperation(std::move(call)), arguments_(std::move(arguments)) {}

 protected:
  virtual void start_reduction() = 0;
  virtual void on_partial(InStream& stream, std::size_t index) = 0;

  [[nodiscard]] const Arguments& arguments() const noexcept { return arguments_; }
  [[nodiscard]] const Slice& slice(int member) const {
    return arguments_.slices[static_cast<std::size_t>(member)];
  }
  [[nodiscard]] const Slice& own_slice() const { return slice(group().group().rank); }
  [[nodiscard]] at::ScalarType dtype() const { return arguments_.input.scalar_type(); }
  [[nodiscard]] std::size_t element_bytes() const { return arguments_.input.itemsize(); }
  /// In elements.
  [[nodiscard]] std::size_t chunk() const {
    return chunk_numel(arguments_.slices.front().count, element_bytes(), engine().num_rails());
  }
  [[nodiscard]] const std::byte* input_at(std::size_t element) const {
    return const_bytes_of(arguments_.input) + element * element_bytes();
  }
  /// Where the result of the own slice's element `element` goes.
  [[nodiscard]] std::byte* output_at(std::size_t element) const {
    const std::size_t begin = arguments_.gather ? own_slice().begin : 0;
    return bytes_of(arguments_.output) + (begin + element) * element_bytes();
  }
  /// The own slice's chunk `index` has its final value.
  void on_reduced(std::size_t index) {
    if (arguments_.gather) {
      push_own(index, output_at(index * chunk()));
    }
  }

 private:
  void do_start() final {
    if (arguments_.gather) {
      start_ring(bytes_of(arguments_.output), arguments_.output.nbytes(), arguments_.slices,
                 chunk(), element_bytes());
    } else {
      will_send_from(const_bytes_of(arguments_.input), arguments_.input.nbytes());
    }
    start_reduction();
  }

  void do_arrival(InStream& stream, std::size_t index) final {
    if (is_of_ring(stream)) {
      hand_on(index);
    } else {
      on_partial(stream, index);
    }
  }

  Arguments arguments_;
};

class DirectReduction final : public Reduction {
 public:
  using Reduction::Reduction;

 private:
  void start_reduction() override {
    const Group& members = group().group();
    const Slice own = own_slice();
    chunks_ = chunks_of({0, own.count}, chunk());
    num_left_.assign(chunks_.size(), members.size() - 1);
    const std::size_t part_bytes = own.count * element_bytes();
    parts_ = scratch(part_bytes * static_cast<std::size_t>(members.size()));
    const std::vector<int> others = peers_after(members.rank, members.size());
    for (const int member : others) {
      receive(member, 0, part(member), part_bytes, byte_chunks(own, chunk(), element_bytes(), 0));
    }
    std::vector<OutStream*> streams;
    std::size_t max_chunks = 0;
    for (const int member : others) {
      streams.push_back(
          &stream_to(member, 0, byte_chunks(slice(member), chunk(), element_bytes(), 0)));
      max_chunks = std::max(max_chunks, streams.back()->chunks.size());
    }
    // Chunk by chunk to everybody, so that all owners can begin to sum.
    for (std::size_t i = 0; i < max_chunks; ++i) {
      for (std::size_t other = 0; other < others.size(); ++other) {
        if (i < streams[other]->chunks.size()) {
          push(*streams[other], i,
               input_at(slice(others[other]).begin) + streams[other]->chunks[i].begin);
        }
      }
    }
  }

  void on_partial(InStream& /*stream*/, std::size_t index) override {
    if (--num_left_[index] > 0) {
      return;
    }
    const Group& members = group().group();
    const Slice& range = chunks_[index];
    std::vector<const void*> parts;
    for (int member = 0; member < members.size(); ++member) {
      parts.push_back(member == members.rank ? input_at(own_slice().begin + range.begin)
                                             : part(member) + range.begin * element_bytes());
    }
    reduce_parts(output_at(range.begin), parts, static_cast<std::int64_t>(range.count), dtype(),
                 arguments().op, arguments().accumulate);
    on_reduced(index);
  }

  [[nodiscard]] std::byte* part(int member) const {
    return parts_->data + static_cast<std::size_t>(member) * own_slice().count * element_bytes();
  }

  std::vector<Slice> chunks_;
  std::vector<int> num_left_;
  Scratch parts_;
};

/// bf16 and fp16 partial sums are fp32, so that each element is rounded once.
template <typename T>
class HalfSums {
 public:
  /// partial = partial op value
  static void add(float* partial, const void* values, std::size_t count, ReduceOp op) {
    for_blocks(values, count, [&](std::size_t begin, std::size_t n, float* wide) {
      reduce_parts(partial + begin, {partial + begin, wide}, static_cast<std::int64_t>(n),
                   at::kFloat, op);
    });
  }

  /// output = [output op] (partial op value)
  static void finish(void* output, float* partial, const void* values, std::size_t count,
                     ReduceOp op, bool accumulate) {
    add(partial, values, count, op);
    if (accumulate) {
      add(partial, output, count, op);
    }
    auto* narrow = static_cast<T*>(output);
    for (std::size_t i = 0; i < count; ++i) {
      narrow[i] = static_cast<T>(partial[i]);
    }
  }

  static void widen(float* wide, const void* values, std::size_t count) {
    const auto* narrow = static_cast<const T*>(values);
    for (std::size_t i = 0; i < count; ++i) {
      wide[i] = static_cast<float>(narrow[i]);
    }
  }

 private:
  template <typename Function>
  static void for_blocks(const void* values, std::size_t count, Function function) {
    constexpr std::size_t kBlock = 1024;
    std::array<float, kBlock> wide;
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
      const std::size_t n = std::min(kBlock, count - begin);
      widen(wide.data(), static_cast<const T*>(values) + begin, n);
      function(begin, n, wide.data());
    }
  }
};

class RingReduction final : public Reduction {
 public:
  using Reduction::Reduction;

 private:
  /// One step's chunk: which elements of the input it is a partial sum of.
  struct Partial {
    Slice elements;
    std::size_t index_in_slice;
  };

  [[nodiscard]] bool is_half() const { return dtype() == at::kHalf || dtype() == at::kBFloat16; }
  [[nodiscard]] std::size_t wire_bytes() const {
    return is_half() ? sizeof(float) : element_bytes();
  }

  void start_reduction() override {
    const Group& members = group().group();
    const int size = members.size();
    const int rank = members.rank;
    // Step s: this rank sends the partial sum of the slice of the member s + 1 before it, and
    // receives that of the one before; the last one that comes is its own.
    std::vector<Slice> to_receive;
    std::size_t end = 0;
    for (int step = 0; step < size - 1; ++step) {
      const Slice& one = slice((rank + 2 * size - 2 - step) % size);
      const std::vector<Slice> chunks = byte_chunks(one, chunk(), wire_bytes(), end);
      to_receive.insert(to_receive.end(), chunks.begin(), chunks.end());
      std::size_t index = 0;
      for (const Slice& elements : chunks_of(one, chunk())) {
        partials_.push_back({elements, index++});
      }
      end += one.count * wire_bytes();
    }
    num_final_ = chunks_of(own_slice(), chunk()).size();
    const Slice& first = slice((rank + size - 1) % size);
    // The neighbour's landing place begins with what this rank sends first.
    std::vector<Slice> to_send = byte_chunks(first, chunk(), wire_bytes(), 0);
    num_first_ = to_send.size();
    for (std::size_t i = 0; i + num_final_ < to_receive.size(); ++i) {
      to_send.push_back({first.count * wire_bytes() + to_receive[i].begin, to_receive[i].count});
    }
    landing_ = scratch(end);
    in_ = &receive((rank + size - 1) % size, 0, landing_->data, end, std::move(to_receive));
    out_ = &stream_to((rank + 1) % size, 0, std::move(to_send));
    const std::byte* from = input_at(first.begin);
    if (is_half()) {
      first_ = scratch(first.count * wire_bytes());
      widen(floats(first_->data), from, first.count);
      from = first_->data;
    }
    for (std::size_t i = 0; i < num_first_; ++i) {
      push(*out_, i, from + out_->chunks[i].begin);
    }
  }

  void on_partial(InStream& stream, std::size_t index) override {
    const auto& [elements, index_in_slice] = partials_[index];
    std::byte* partial = landing_->data + stream.chunks[index].begin;
    const std::byte* values = input_at(elements.begin);
    if (index + num_final_ < partials_.size()) {
      if (is_half()) {
        add(floats(partial), values, elements.count);
      } else {
        reduce_parts(partial, {partial, values}, static_cast<std::int64_t>(elements.count), dtype(),
                     arguments().op);
      }
      push(*out_, num_first_ + index, partial);
      return;
    }
    std::byte* output = output_at(elements.begin - own_slice().begin);
    if (is_half()) {
      finish(output, floats(partial), values, elements.count);
    } else {
      reduce_parts(output, {partial, values}, static_cast<std::int64_t>(elements.count), dtype(),
                   arguments().op, arguments().accumulate);
    }
    on_reduced(index_in_slice);
  }

  static float* floats(std::byte* data) { return reinterpret_cast<float*>(data); }

  void widen(float* wide, const void* values, std::size_t count) const {
    dtype() == at::kHalf ? HalfSums<at::Half>::widen(wide, values, count)
                         : HalfSums<at::BFloat16>::widen(wide, values, count);
  }
  void add(float* partial, const void* values, std::size_t count) const {
    dtype() == at::kHalf ? HalfSums<at::Half>::add(partial, values, count, arguments().op)
                         : HalfSums<at::BFloat16>::add(partial, values, count, arguments().op);
  }
  void finish(void* output, float* partial, const void* values, std::size_t count) const {
    const auto& [op, accumulate] = std::pair(arguments().op, arguments().accumulate);
    dtype() == at::kHalf
        ? HalfSums<at::Half>::finish(output, partial, values, count, op, accumulate)
        : HalfSums<at::BFloat16>::finish(output, partial, values, count, op, accumulate);
  }

  Scratch landing_;
  Scratch first_;
  InStream* in_ = nullptr;
  OutStream* out_ = nullptr;
  std::vector<Partial> partials_;
  std::size_t num_first_ = 0;
  std::size_t num_final_ = 0;
};

std::shared_ptr<Operation> make_reduction(CallInfo call, const std::vector<std::string>& nodes,
                                          Reduction::Arguments arguments) {
  const std::size_t slice_bytes = arguments.slices.front().count * arguments.input.itemsize();
  const bool is_half =
      arguments.input.scalar_type() == at::kHalf || arguments.input.scalar_type() == at::kBFloat16;
  const bool direct = is_direct(slice_bytes, static_cast<int>(nodes.size())) ||
                      choose_reduce_algorithm(nodes, is_half ? 2 : 1) == ReduceAlgorithm::kDirect;
  if (direct) {
    return std::make_shared<DirectReduction>(std::move(call), std::move(arguments));
  }
  return std::make_shared<RingReduction>(std::move(call), std::move(arguments));
}

}  // namespace

std::shared_ptr<Operation> make_barrier(CallInfo call) {
  return std::make_shared<Barrier>(std::move(call));
}

std::shared_ptr<Operation> make_all_gather(CallInfo call, const Group& group, at::Tensor output,
                                           at::Tensor input) {
  if (input.numel() == 0) {
    return make_barrier(std::move(call));
  }
  if (is_direct(input.nbytes(), group.size())) {
    return std::make_shared<DirectAllGather>(std::move(call), std::move(output), std::move(input));
  }
  return std::make_shared<RingAllGather>(std::move(call), std::move(output), std::move(input));
}

std::shared_ptr<Operation> make_reduce_scatter(CallInfo call, const Group& group,
                                               const std::vector<std::string>& nodes,
                                               at::Tensor output, at::Tensor input, ReduceOp op,
                                               bool accumulate) {
  if (output.numel() == 0) {
    return make_barrier(std::move(call));
  }
  Reduction::Arguments arguments;
  arguments.slices = slot_slices(group, static_cast<std::size_t>(output.numel()));
  arguments.input = std::move(input);
  arguments.output = std::move(output);
  arguments.op = op;
  arguments.accumulate = accumulate;
  return make_reduction(std::move(call), nodes, std::move(arguments));
}

std::shared_ptr<Operation> make_all_reduce(CallInfo call, const Group& group,
                                           const std::vector<std::string>& nodes, at::Tensor tensor,
                                           ReduceOp op) {
  if (tensor.numel() == 0) {
    return make_barrier(std::move(call));
  }
  // Below one element for each rank the slices would be empty.
  if ((tensor.nbytes() <= kGatheredSumBytes && group.size() <= kGatheredSumRanks) ||
      tensor.numel() < group.size()) {
    return std::make_shared<GatheredSum>(std::move(call), std::move(tensor), op);
  }
  Reduction::Arguments arguments;
  arguments.slices = even_slices(group.size(), static_cast<std::size_t>(tensor.numel()));
  arguments.input = tensor;
  arguments.output = std::move(tensor);
  arguments.op = op;
  arguments.gather = true;
  return make_reduction(std::move(call), nodes, std::move(arguments));
}

std::shared_ptr<Operation> make_broadcast(CallInfo call, at::Tensor tensor, int root) {
  if (tensor.numel() == 0) {
    return make_barrier(std::move(call));
  }
  return std::make_shared<Broadcast>(std::move(call), std::move(tensor), root);
}

}  // namespace hopshard::detail::ofi
