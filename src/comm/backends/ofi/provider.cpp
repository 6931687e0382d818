#include "provider.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <set>

#include "hopshard/core/error.hpp"

namespace hopshard::detail::ofi {
namespace {

// tcp lists reliable datagrams as "tcp;ofi_rxm" in 1.17 and by itself from 1.18 on, which took over
// what was "net"; "sockets" was taken out in 2.0.
constexpr std::array<std::string_view, 4> kByPreference = {"efa", "tcp", "net", "sockets"};

bool uses_sockets(std::string_view core) {
  return core == "tcp" || core == "net" || core == "sockets" || core == "udp";
}

bool is_loopback(const Candidate& candidate) {
  return candidate.address.starts_with("127.") || candidate.address == "::1";
}

bool is_ipv4(const Candidate& candidate) {
  return candidate.address.find(':') == std::string::npos;
}

/// Bridges and pairs that containers and virtual machines make: never the way to another node.
bool is_virtual(const Candidate& candidate) {
  return std::ranges::any_of(std::array{"docker", "virbr", "veth", "br-", "cni", "flannel"},
                             [&](auto prefix) { return candidate.domain.starts_with(prefix); });
}

std::string list(const std::vector<Candidate>& candidates) {
  std::set<std::string> seen;
  for (const Candidate& candidate : candidates) {
    seen.insert(concatenate(core_provider(candidate.provider), " on ", candidate.domain,
                            candidate.address.empty() ? "" : " ", candidate.address));
  }
  std::string text;
  for (const std::string& one : seen) {
    text += (text.empty() ? "" : ", ") + one;
  }
  return text.empty() ? "nothing" : text;
}

std::string read_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<std::string> address_text(const sockaddr* address) {
  const bool ipv4 = address->sa_family == AF_INET;
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, ipv4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6), text.data(),
                  text.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return std::nullopt;
  }
  return std::string(text.data());
}

}  // namespace

std::string_view core_provider(std::string_view provider) {
  return provider.substr(0, provider.find(';'));
}

std::vector<std::size_t> choose_rails(
    const std::vector<Candidate>& candidates, const ProviderRequest& request,
    std::optional<std::string> (*address_of)(const std::string& interface)) {
  const bool automatic = request.provider.empty() || request.provider == "auto";
  const auto is_offered = [&](std::string_view core) {
    return std::ranges::any_of(candidates, [&](const Candidate& candidate) {
      return core_provider(candidate.provider) == core;
    });
  };
  std::string chosen(core_provider(request.provider));
  if (automatic) {
    const auto* const first = std::ranges::find_if(kByPreference, is_offered);
    HOPSHARD_CHECK(first != kByPreference.end(), ConfigError,
                   "ofi: libfabric offers no provider that hopshard uses (efa, tcp, net), only ",
                   list(candidates), "; see fi_info");
    chosen = *first;
  } else {
    HOPSHARD_CHECK(is_offered(chosen), ConfigError, "ofi: libfabric does not offer provider '",
                   request.provider, "' (HOPSHARD_OFI_PROVIDER), only ", list(candidates),
                   "; see fi_info");
  }
  HOPSHARD_CHECK(!uses_sockets(chosen) || !request.has_efa_device || request.allow_tcp, ConfigError,
                 "ofi: this machine has EFA devices, but the data would go over ", chosen,
                 " sockets, at a small part of their speed: ",
                 automatic
                     ? "libfabric does not offer them. Look at fi_info -p efa, the EFA driver, and "
                       "whether the container was given /dev/infiniband"
                     : "HOPSHARD_OFI_PROVIDER asks for it",
                 ". To use sockets all the same, set HOPSHARD_OFI_ALLOW_TCP=1");

  std::vector<std::size_t> fitting;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (core_provider(candidates[i].provider) == chosen) {
      fitting.push_back(i);
    }
  }
  std::vector<std::size_t> rails;
  for (const std::string& interface : request.interfaces) {
    const std::string address = address_of(interface).value_or(interface);
    const auto rail = std::ranges::find_if(fitting, [&](std::size_t i) {
      const Candidate& candidate = candidates[i];
      // EFA's domains are named after the device, with a suffix for the kind of endpoint.
      return candidate.address.empty() ? candidate.domain.starts_with(interface)
                                       : candidate.address == address;
    });
    HOPSHARD_CHECK(rail != fitting.end(), ConfigError, "ofi: provider '", chosen,
                   "' has no interface '", interface, "' (HOPSHARD_OFI_INTERFACE), only ",
                   list(candidates));
    rails.push_back(*rail);
  }
  if (!rails.empty()) {
    return rails;
  }
  if (chosen == "efa") {
    // One rail for each card; a card may be listed several times, the best endpoint first.
    std::set<std::string> domains;
    for (const std::size_t i : fitting) {
      if (domains.insert(candidates[i].domain).second) {
        rails.push_back(i);
      }
    }
    return rails;
  }
  const auto rank_of = [&](std::size_t i) {
    return (is_loopback(candidates[i]) ? 4 : 0) + (is_virtual(candidates[i]) ? 2 : 0) +
           (is_ipv4(candidates[i]) ? 0 : 1);
  };
  return {*std::ranges::min_element(fitting, {}, rank_of)};
}

std::vector<std::string> efa_devices(const std::filesystem::path& sysfs) {
  std::vector<std::string> devices;
  const auto look_in = [&](const std::filesystem::path& folder, const char* below) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
      // Amazon's vendor id; 0xefa0, 0xefa1, ... are the generations of EFA.
      if (read_line(entry.path() / below / "vendor") == "0x1d0f" &&
          read_line(entry.path() / below / "device").starts_with("0xefa")) {
        devices.push_back(entry.path().filename());
      }
    }
  };
  look_in(sysfs / "class" / "infiniband", "device");
  if (devices.empty()) {
    look_in(sysfs / "bus" / "pci" / "devices", "");
  }
  std::ranges::sort(devices);
  return devices;
}

std::optional<std::string> interface_address(const std::string& interface) {
  ifaddrs* raw = nullptr;
  if (getifaddrs(&raw) != 0) {
    return std::nullopt;
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(raw, freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr != nullptr && one->ifa_addr->sa_family == family &&
          interface == one->ifa_name) {
        return address_text(one->ifa_addr);
      }
    }
  }
  return std::nullopt;
}

}  // namespace hopshard::detail::ofi
