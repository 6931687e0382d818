// Which libfabric provider and which network cards; pure, so that the choice on an EFA machine is
// tested without one. Next: rail.hpp.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hopshard::detail::ofi {

/// What fi_getinfo offers, as far as the choice depends on it.
struct Candidate {
  std::string provider;  ///< "tcp;ofi_rxm", "net", "efa", ...
  std::string domain;    ///< The card: "eth0", "rdmap0s6-rdm", ...
  std::string address;   ///< IPv4 or IPv6 source address; empty if it is no socket.
};

struct ProviderRequest {
  std::string provider;                 ///< Empty or "auto": choose.
  std::vector<std::string> interfaces;  ///< Names or addresses; empty: choose.
  bool allow_tcp = false;
  bool has_efa_device = false;
};

/// "tcp;ofi_rxm" as people name it: "tcp".
[[nodiscard]] std::string_view core_provider(std::string_view provider);

/// Indices into `candidates`, one for each rail.
/// @param address_of  of an interface by name; nothing if there is no such interface.
/// @throws ConfigError  nothing fits (lists what there is), or sockets on an EFA machine.
[[nodiscard]] std::vector<std::size_t> choose_rails(
    const std::vector<Candidate>& candidates, const ProviderRequest& request,
    std::optional<std::string> (*address_of)(const std::string& interface));

/// The EFA devices that sysfs lists, by PCI or InfiniBand name, even if no driver is loaded.
/// @param sysfs  "/sys", or a copy of it.
[[nodiscard]] std::vector<std::string> efa_devices(const std::filesystem::path& sysfs);

/// The IPv4 address of an interface, or its IPv6 address if it has no other.
[[nodiscard]] std::optional<std::string> interface_address(const std::string& interface);

}  // namespace hopshard::detail::ofi
