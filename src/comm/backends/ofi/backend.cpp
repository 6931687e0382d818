// The communicator, and how ranks find each other: each leaves the addresses of its endpoints in
// the store. Next: engine.hpp, which moves the data.
#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <sstream>
#include <utility>

#include "../../completion.hpp"
#include "../../describe.hpp"
#include "../backends.hpp"
#include "./engine.hpp"
#include "./group_state.hpp"
#include "./operations.hpp"
#include "hopshard/comm/ofi.hpp"
#include "hopshard/core/env.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/core/hash.hpp"
#include "hopshard/core/log.hpp"

namespace hopshard {
namespace {

using detail::concatenate;
using detail::ofi::CallInfo;
using detail::ofi::Engine;
using detail::ofi::GroupState;
using detail::ofi::Operation;
using std::chrono::milliseconds;

constexpr std::string_view kBackend = "ofi";

/// Memory of the caller's own that stays registered while a communicator, or one that was split
/// from it, lives.
class RegisteredMemory {
 public:
  RegisteredMemory(std::shared_ptr<Engine> engine, std::shared_ptr<RegisteredMemory> parent)
      : engine_(std::move(engine)), parent_(std::move(parent)) {}
  ~RegisteredMemory() {
    for (const auto& [data, num_bytes] : memory_) {
      engine_->forget_memory(data, num_bytes);
    }
  }
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  void add(const void* data, std::size_t num_bytes) {
    engine_->remember_memory(data, num_bytes);
    memory_.emplace_back(data, num_bytes);
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<RegisteredMemory> parent_;
  std::vector<std::pair<const void*, std::size_t>> memory_;
};

class OfiCommunicator final : public Communicator {
 public:
  /// @param engine  null in a world of one rank.
  OfiCommunicator(std::shared_ptr<Engine> engine, Group group, milliseconds timeout,
                  std::shared_ptr<RegisteredMemory> parent_memory)
      : Communicator(std::move(group)), engine_(std::move(engine)), timeout_(timeout) {
    if (engine_ == nullptr) {
      return;
    }
    memory_ = std::make_shared<RegisteredMemory>(engine_, std::move(parent_memory));
    if (size() == 1) {
      return;
    }
    const Group& members = this->group();
    for (const int rank : members.ranks) {
      nodes_.push_back(
          engine_->peers().nodes[static_cast<std::size_t>(engine_->peers().index_of(rank))]);
    }
    state_ = std::make_shared<GroupState>(*engine_, members, engine_->next_group_key(members));
    engine_->post([engine = engine_.get(), state = state_] { engine->add_group(state); });
  }

  ~OfiCommunicator() override {
    if (state_ != nullptr) {
      engine_->post([state = state_] { state->leave(); });
    }
  }

  [[nodiscard]] std::string_view backend() const noexcept override { return kBackend; }

  void abort(std::string_view reason) override {
    if (state_ != nullptr) {
      engine_->post([state = state_, text = std::string(reason)] { state->abort(text); });
    }
  }

 private:
  at::Tensor do_allocate(std::int64_t num_bytes) override {
    if (engine_ == nullptr) {
      return Communicator::do_allocate(num_bytes);
    }
    std::shared_ptr<void> memory = engine_->allocate(static_cast<std::size_t>(num_bytes));
    void* data = memory.get();
    return at::from_blob(
        data, {num_bytes}, [memory = std::move(memory)](void*) mutable { memory.reset(); },
        at::TensorOptions().dtype(at::kByte));
  }

  void do_register_memory(const at::Tensor& memory) override {
    if (engine_ != nullptr && memory.is_cpu()) {
      memory_->add(memory.const_data_ptr(), memory.nbytes());
    }
  }

  WorkPtr do_all_gather(at::Tensor output, at::Tensor input, const CommOptions& options) override {
    check_device("all_gather", output, options);
    CallInfo call = describe(
        {.op = "all_gather", .numel = input.numel(), .dtype = input.scalar_type()}, options);
    return issue(make_all_gather(std::move(call), group(), std::move(output), std::move(input)),
                 options);
  }

  WorkPtr do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                            const CommOptions& options) override {
    check_device("reduce_scatter", output, options);
    CallInfo call = describe({.op = "reduce_scatter",
                              .numel = output.numel(),
                              .dtype = output.scalar_type(),
                              .reduce_op = op},
                             options);
    return issue(make_reduce_scatter(std::move(call), group(), nodes_, std::move(output),
                                     std::move(input), op, options.accumulate),
                 options);
  }

  WorkPtr do_all_reduce(at::Tensor tensor, ReduceOp op, const CommOptions& options) override {
    check_device("all_reduce", tensor, options);
    CallInfo call = describe({.op = "all_reduce",
                              .numel = tensor.numel(),
                              .dtype = tensor.scalar_type(),
                              .reduce_op = op},
                             options);
    return issue(make_all_reduce(std::move(call), group(), nodes_, std::move(tensor), op), options);
  }

  WorkPtr do_broadcast(at::Tensor tensor, int root, const CommOptions& options) override {
    check_device("broadcast", tensor, options);
    CallInfo call = describe(
        {.op = "broadcast", .numel = tensor.numel(), .dtype = tensor.scalar_type(), .root = root},
        options);
    return issue(make_broadcast(std::move(call), std::move(tensor), root), options);
  }

  void do_barrier(const CommOptions& options) override {
    issue(detail::ofi::make_barrier(describe({.op = "barrier"}, options)), options)->wait();
  }

  CommunicatorPtr do_split(Group part) override {
    return std::make_shared<OfiCommunicator>(engine_, std::move(part), timeout_, memory_);
  }

  void check_device(std::string_view op, const at::Tensor& tensor,
                    const CommOptions& options) const {
    HOPSHARD_CHECK(tensor.is_cpu(), InvalidArgument,
                   detail::describe_call(kBackend, op, options.tag, group()), ": the tensor is on ",
                   tensor.device(), ", but ofi moves CPU tensors only (provider '",
                   engine_->provider(), engine_->offers_device_memory() ? "' offers" : "' lacks",
                   " FI_HMEM, which this backend does not use). For GPU tensors take the nccl "
                   "backend; on EFA with the aws-ofi-nccl plugin");
  }

  [[nodiscard]] CallInfo describe(detail::OperationText operation,
                                  const CommOptions& options) const {
    operation.tag = options.tag;
    CallInfo call;
    call.text = to_string(operation);
    call.call_text = detail::describe_call(kBackend, operation.op, options.tag, group());
    // Slots decide where data lands, so they must agree too.
    if (!group().has_identity_slots()) {
      call.text += ", slots";
      for (const int slot : group().slots) {
        call.text += concatenate(' ', slot);
      }
    }
    Fnv1a hash;
    for (const char letter : call.text) {
      hash.add(static_cast<unsigned char>(letter));
    }
    call.hash = hash.value();
    return call;
  }

  WorkPtr issue(std::shared_ptr<Operation> operation, const CommOptions& options) {
    const milliseconds limit = options.timeout.count() > 0 ? options.timeout : timeout_;
    const std::shared_ptr<detail::Completion> completion = operation->completion();
    auto give_up = [engine = engine_, state = state_, weak = std::weak_ptr(operation),
                    limit](bool unwinding) {
      engine->post([state, weak, limit, unwinding] {
        const std::shared_ptr<Operation> pending = weak.lock();
        if (pending == nullptr) {
          return;
        }
        if (unwinding) {
          state->withdraw(*pending);
        } else {
          state->give_up(pending, limit);
        }
      });
    };
    engine_->post([state = state_, operation = std::move(operation)]() mutable {
      state->issue(std::move(operation));
    });
    return detail::make_completion_work(completion, limit, std::move(give_up));
  }

  std::shared_ptr<Engine> engine_;
  milliseconds timeout_;
  std::shared_ptr<RegisteredMemory> memory_;
  std::shared_ptr<GroupState> state_;
  std::vector<std::string> nodes_;  ///< By member.
};

// --- connecting ---

// Raised when messages or plans change, so that ranks of different builds do not meet.
constexpr std::uint32_t kProtocol = 1;

/// What a rank leaves in the store.
struct Card {
  std::string node;
  std::string provider;
  std::vector<std::string> addresses;  ///< One for each rail.
  std::string failure;                 ///< Why this rank cannot connect; then all else is empty.
};

void put(std::string& out, std::string_view text) {
  const auto size = static_cast<std::uint32_t>(text.size());
  out.append(reinterpret_cast<const char*>(&size), sizeof(size));
  out.append(text);
}

std::string pack(const Card& card) {
  std::string out;
  put(out, concatenate("hopshard-ofi ", kProtocol, ' ', sizeof(detail::ofi::MessageHeader)));
  for (const std::string* text : {&card.failure, &card.node, &card.provider}) {
    put(out, *text);
  }
  for (const std::string& address : card.addresses) {
    put(out, address);
  }
  return out;
}

Card unpack(std::string_view bytes, const std::string& whose) {
  std::vector<std::string> texts;
  while (!bytes.empty()) {
    std::uint32_t size = 0;
    HOPSHARD_CHECK(bytes.size() >= sizeof(size), CommError, whose, " left a broken address");
    std::memcpy(&size, bytes.data(), sizeof(size));
    bytes.remove_prefix(sizeof(size));
    HOPSHARD_CHECK(bytes.size() >= size, CommError, whose, " left a broken address");
    texts.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  HOPSHARD_CHECK(texts.size() >= 4 && texts[0] == concatenate("hopshard-ofi ", kProtocol, ' ',
                                                              sizeof(detail::ofi::MessageHeader)),
                 ConfigError, whose, " runs another build of hopshard; all ranks need the same");
  return {texts[2], texts[3], {texts.begin() + 4, texts.end()}, texts[1]};
}

std::string node_name() {
  if (!env().node_id.empty()) {
    return env().node_id;
  }
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string key_of(int member) { return concatenate("ofi/", member); }

std::vector<std::unique_ptr<detail::ofi::Rail>> open_rails(const OfiOptions& ofi) {
  const detail::ofi::ProviderRequest request{
      .provider = ofi.provider,
      .interfaces = ofi.interfaces,
      .allow_tcp = ofi.allow_tcp,
      .has_efa_device = !detail::ofi::efa_devices("/sys").empty()};
  auto rails = detail::ofi::open_rails(request);
  HOPSHARD_CHECK(rails.size() <= detail::ofi::kMaxRails, ConfigError, "ofi: ", rails.size(),
                 " interfaces are given, at most ", detail::ofi::kMaxRails, " can be used");
  return rails;
}

}  // namespace

OfiOptions ofi_options_from_env() {
  OfiOptions options;
  options.provider = env().ofi_provider;
  options.allow_tcp = env().ofi_allow_tcp;
  std::istringstream list(env().ofi_interface);
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) {
      options.interfaces.push_back(name);
    }
  }
  return options;
}

CommunicatorPtr connect_ofi(const ConnectOptions& options, const OfiOptions& ofi) {
  const Group& group = options.group;
  group.validate();
  if (group.size() == 1) {
    return std::make_shared<OfiCommunicator>(nullptr, group, options.timeout, nullptr);
  }
  const std::string who =
      concatenate("ofi: connecting group '", group.name, "' on rank ", group.rank, " of ",
                  group.size(), " (global rank ", group.global_rank(), ")");
  Card mine;
  std::vector<std::unique_ptr<detail::ofi::Rail>> rails;
  try {
    rails = open_rails(ofi);
    mine.node = ofi.node.empty() ? node_name() : ofi.node;
    mine.provider = rails.front()->provider();
    for (const auto& rail : rails) {
      mine.addresses.push_back(rail->address());
    }
  } catch (const Error& error) {
    mine.failure = error.what();
    options.store->set(key_of(group.rank), pack(mine));
    throw;
  }
  options.store->set(key_of(group.rank), pack(mine));

  detail::ofi::Peers peers{.global_ranks = group.ranks, .nodes = {}, .mine = group.rank};
  std::vector<std::vector<std::string>> addresses(rails.size());
  bool remote_writes = ofi.remote_writes;
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  for (int member = 0; member < group.size(); ++member) {
    const std::string whose =
        concatenate("global rank ", group.ranks[static_cast<std::size_t>(member)]);
    Card card;
    try {
      const auto left =
          std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
      card = unpack(options.store->get(key_of(member), std::max(left, milliseconds(1))),
                    concatenate(who, ": ", whose));
    } catch (const TimeoutError& error) {
      throw TimeoutError(concatenate(who, ": ", whose, " did not arrive within the ",
                                     options.timeout.count(), " ms: ", error.what()));
    }
    HOPSHARD_CHECK(card.failure.empty(), CommError, who, ": ", whose, " failed: ", card.failure);
    HOPSHARD_CHECK(card.provider == mine.provider && card.addresses.size() == rails.size(),
                   ConfigError, who, ": this rank has ", rails.size(), " of provider '",
                   mine.provider, "', but ", whose, " has ", card.addresses.size(), " of '",
                   card.provider,
                   "'; set HOPSHARD_OFI_PROVIDER and HOPSHARD_OFI_INTERFACE alike on all ranks");
    peers.nodes.push_back(card.node);
    for (std::size_t rail = 0; rail < rails.size(); ++rail) {
      addresses[rail].push_back(card.addresses[rail]);
    }
  }
  for (std::size_t rail = 0; rail < rails.size(); ++rail) {
    rails[rail]->insert_peers(addresses[rail]);
    // The same provider everywhere, so all ranks decide alike.
    remote_writes = remote_writes && rails[rail]->can_write();
  }
  HOPSHARD_LOG(kDebug, who, ": ", rails.size(), " x ", rails.front()->name(),
               remote_writes ? ", remote writes" : ", tagged messages");
  auto engine = std::make_shared<Engine>(std::move(rails), std::move(peers), remote_writes);
  return std::make_shared<OfiCommunicator>(std::move(engine), group, options.timeout, nullptr);
}

namespace detail {

BackendInfo describe_ofi() {
  return {
      "ofi", "libfabric: EFA between nodes on AWS, tcp elsewhere", std::nullopt,
      [](const ConnectOptions& options) { return connect_ofi(options, ofi_options_from_env()); }};
}

}  // namespace detail
}  // namespace hopshard
