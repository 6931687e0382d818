// One network card: its fabric, domain, address vector, completion queue and endpoint. Knows
// nothing of ranks, groups or operations. Next: engine.hpp, the only caller.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "./handles.hpp"
#include "provider.hpp"

namespace hopshard::detail::ofi {

/// What libfabric gives back when it has finished; must stay in place until then.
struct Request {
  enum class Kind { kMessageSend, kMessageReceive, kDataSend, kDataReceive };

  fi_context2 context{};  ///< libfabric's own; first, so that its address is the request's.
  Kind kind = Kind::kMessageSend;
  int rail = 0;
  int peer = -1;          ///< -1: any.
  void* owner = nullptr;  ///< What the engine finds its own record by.
  std::size_t index = 0;  ///< Of the chunk.
};

/// Memory that a card may read and write.
struct Registration {
  Handle<fid_mr> region;
  std::uint64_t base =
      0;  ///< Remote addresses count from here: 0 unless virtual addresses are used.

  [[nodiscard]] std::uint64_t key() const { return fi_mr_key(region.get()); }
  [[nodiscard]] void* descriptor() const { return fi_mr_desc(region.get()); }
};

struct RemoteMemory {
  std::uint64_t address = 0;
  std::uint64_t key = 0;
};

enum class Post { kPosted, kTryAgain };

/// Threads: one at a time (FI_THREAD_DOMAIN).
class Rail {
 public:
  /// @throws CommError
  explicit Rail(InfoPtr info);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::string_view provider() const noexcept { return info_->fabric_attr->prov_name; }
  /// The endpoint's address, for peers to insert.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Whether immediates are wide enough for remote writes to be counted by them.
  [[nodiscard]] bool can_write() const noexcept {
    return (info_->caps & FI_RMA) != 0 && info_->domain_attr->cq_data_size >= sizeof(std::uint32_t);
  }
  [[nodiscard]] std::size_t max_message_bytes() const noexcept {
    return info_->ep_attr->max_msg_size;
  }
  /// FI_HMEM: whether the card could reach GPU memory by itself.
  [[nodiscard]] bool offers_device_memory() const;
  [[nodiscard]] bool needs_local_registration() const noexcept {
    return (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
  }

  /// Inserts the peers in order, so that peer `i` is address `i`.
  void insert_peers(const std::vector<std::string>& addresses);

  [[nodiscard]] Registration register_memory(const void* data, std::size_t num_bytes);
  /// Where a peer has to write to reach `data`, which lies in `registration`.
  [[nodiscard]] static RemoteMemory remote_memory(const Registration& registration,
                                                  const void* data) {
    return {reinterpret_cast<std::uint64_t>(data) - registration.base, registration.key()};
  }

  // All post one operation; `registration` may be null where none is needed. @throws CommError
  Post send(Request& request, const void* data, std::size_t num_bytes,
            const Registration* registration, std::uint64_t tag);
  Post receive(Request& request, void* data, std::size_t num_bytes,
               const Registration* registration, std::uint64_t tag);
  /// The target gets a completion with `immediate` once the data is there. Never followed by a
  /// flag: EFA does not keep the order of writes.
  Post write(Request& request, const void* data, std::size_t num_bytes,
             const Registration* registration, std::uint32_t immediate, const RemoteMemory& to);

  struct Event {
    Request* request = nullptr;  ///< Null: a peer's write has arrived.
    std::uint32_t immediate = 0;
    std::string error{};  ///< Empty: success.
  };
  /// Nothing arrives afterwards in memory that was given to this rail.
  void close_endpoint() noexcept { endpoint_.reset(); }

  /// Moves data and returns what has ended; empty if nothing. @throws CommError
  std::span<Event> poll();

 private:
  static constexpr std::size_t kMaxEvents = 32;

  Post posted(long code, std::string_view call) const;

  InfoPtr info_;
  std::string name_;
  Handle<fid_fabric> fabric_;
  Handle<fid_domain> domain_;
  Handle<fid_av> addresses_;
  Handle<fid_cq> completions_;
  Handle<fid_ep> endpoint_;
  std::string address_;
  std::vector<fi_addr_t> peers_;
  std::uint64_t next_key_ = 1;
  std::array<Event, kMaxEvents> events_;
};

/// Opens the rails that the request asks for. @throws ConfigError, CommError
[[nodiscard]] std::vector<std::unique_ptr<Rail>> open_rails(const ProviderRequest& request);

}  // namespace hopshard::detail::ofi
