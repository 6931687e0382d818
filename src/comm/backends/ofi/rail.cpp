#include "rail.hpp"

#include <arpa/inet.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "hopshard/core/log.hpp"

namespace hopshard::detail::ofi {
namespace {

// The newest interface that this code is written for. Asking for an old one turns features off (EFA
// writes by itself only from 1.18 on), asking for a newer one than the library's fails.
constexpr std::uint32_t kWrittenFor = FI_VERSION(2, 0);

std::uint32_t api_version() { return std::min(fi_version(), kWrittenFor); }

InfoPtr make_hints(const std::string& provider) {
  InfoPtr hints(fi_allocinfo());
  HOPSHARD_CHECK(hints, CommError, "ofi: out of memory");
  hints->ep_attr->type = FI_EP_RDM;
  hints->caps = FI_MSG | FI_TAGGED | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->av_type = FI_AV_TABLE;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  if (!provider.empty()) {
    hints->fabric_attr->prov_name = strdup(provider.c_str());  // Freed with the hints.
  }
  return hints;
}

std::string source_address(const fi_info& info) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* address = nullptr;
  int family = 0;
  if (info.src_addr == nullptr) {
    return "";
  }
  if (info.addr_format == FI_SOCKADDR_IN ||
      static_cast<const sockaddr*>(info.src_addr)->sa_family == AF_INET) {
    family = AF_INET;
    address = &static_cast<const sockaddr_in*>(info.src_addr)->sin_addr;
  } else if (info.addr_format == FI_SOCKADDR_IN6) {
    family = AF_INET6;
    address = &static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr;
  } else {
    return "";
  }
  return inet_ntop(family, address, text.data(), text.size()) != nullptr ? text.data() : "";
}

bool is_socket(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
         info.addr_format == FI_SOCKADDR_IN6;
}

}  // namespace

static_assert(std::is_standard_layout_v<Request>, "its context must be at its address");

Rail::Rail(InfoPtr info) : info_(std::move(info)) {
  const std::string address_text = is_socket(*info_) ? source_address(*info_) : "";
  name_ = concatenate("'", provider(), "' on ", info_->domain_attr->name,
                      address_text.empty() ? "" : " ", address_text);
  fid_fabric* fabric = nullptr;
  check(fi_fabric(info_->fabric_attr, &fabric, nullptr), "fi_fabric", name_);
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  check(fi_domain(fabric, info_.get(), &domain, nullptr), "fi_domain", name_);
  domain_.reset(domain);
  fi_av_attr av_attributes{};
  av_attributes.type = FI_AV_TABLE;
  fid_av* av = nullptr;
  check(fi_av_open(domain, &av_attributes, &av, nullptr), "fi_av_open", name_);
  addresses_.reset(av);
  fi_cq_attr cq_attributes{};
  cq_attributes.format = FI_CQ_FORMAT_TAGGED;
  cq_attributes.wait_obj = FI_WAIT_NONE;
  cq_attributes.size = std::max<std::size_t>(info_->tx_attr->size + info_->rx_attr->size, 1024);
  fid_cq* cq = nullptr;
  check(fi_cq_open(domain, &cq_attributes, &cq, nullptr), "fi_cq_open", name_);
  completions_.reset(cq);
  fid_ep* endpoint = nullptr;
  check(fi_endpoint(domain, info_.get(), &endpoint, nullptr), "fi_endpoint", name_);
  endpoint_.reset(endpoint);
  check(fi_ep_bind(endpoint, &av->fid, 0), "fi_ep_bind", name_);
  check(fi_ep_bind(endpoint, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind", name_);
  check(fi_enable(endpoint), "fi_enable", name_);
  std::size_t length = 0;
  fi_getname(&endpoint->fid, nullptr, &length);  // Says how long it is, by failing.
  address_.resize(length);
  check(fi_getname(&endpoint->fid, address_.data(), &length), "fi_getname", name_);
  address_.resize(length);
}

bool Rail::offers_device_memory() const {
  const InfoPtr hints = make_hints(info_->fabric_attr->prov_name);
  hints->caps |= FI_HMEM;
  fi_info* found = nullptr;
  const int code = fi_getinfo(api_version(), nullptr, nullptr, 0, hints.get(), &found);
  const InfoPtr freed(found);
  return code == 0;
}

void Rail::insert_peers(const std::vector<std::string>& addresses) {
  peers_.resize(addresses.size());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const int inserted =
        fi_av_insert(addresses_.get(), addresses[i].data(), 1, &peers_[i], 0, nullptr);
    HOPSHARD_CHECK(inserted == 1, CommError, "ofi: the address of rank ", i,
                   " of the group is not accepted by ", name_,
                   ". On EFA: does the security group allow all traffic from and to itself, "
                   "outbound too?");
  }
}

Registration Rail::register_memory(const void* data, std::size_t num_bytes) {
  constexpr std::uint64_t kAccess = FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
  const int mode = info_->domain_attr->mr_mode;
  const std::uint64_t key = (mode & FI_MR_PROV_KEY) != 0 ? 0 : next_key_++;
  fid_mr* region = nullptr;
  check(fi_mr_reg(domain_.get(), data, num_bytes, kAccess, 0, key, 0, &region, nullptr),
        concatenate("fi_mr_reg of ", num_bytes, " bytes"), name_);
  Registration result{Handle<fid_mr>(region),
                      (mode & FI_MR_VIRT_ADDR) != 0 ? 0 : reinterpret_cast<std::uint64_t>(data)};
  if ((mode & FI_MR_ENDPOINT) != 0) {
    check(fi_mr_bind(region, &endpoint_->fid, 0), "fi_mr_bind", name_);
    check(fi_mr_enable(region), "fi_mr_enable", name_);
  }
  return result;
}

Post Rail::posted(long code, std::string_view call) const {
  if (code == -FI_EAGAIN) {
    return Post::kTryAgain;
  }
  check(code, call, name_);
  return Post::kPosted;
}

Post Rail::send(Request& request, const void* data, std::size_t num_bytes,
                const Registration* registration, std::uint64_t tag) {
  return posted(fi_tsend(endpoint_.get(), data, num_bytes,
                         registration != nullptr ? registration->descriptor() : nullptr,
                         peers_[static_cast<std::size_t>(request.peer)], tag, &request.context),
                "fi_tsend");
}

Post Rail::receive(Request& request, void* data, std::size_t num_bytes,
                   const Registration* registration, std::uint64_t tag) {
  return posted(fi_trecv(endpoint_.get(), data, num_bytes,
                         registration != nullptr ? registration->descriptor() : nullptr,
                         FI_ADDR_UNSPEC, tag, 0, &request.context),
                "fi_trecv");
}

Post Rail::write(Request& request, const void* data, std::size_t num_bytes,
                 const Registration* registration, std::uint32_t immediate,
                 const RemoteMemory& to) {
  return posted(fi_writedata(endpoint_.get(), data, num_bytes,
                             registration != nullptr ? registration->descriptor() : nullptr,
                             immediate, peers_[static_cast<std::size_t>(request.peer)], to.address,
                             to.key, &request.context),
                "fi_writedata");
}

std::span<Rail::Event> Rail::poll() {
  std::array<fi_cq_tagged_entry, kMaxEvents> entries;
  const ssize_t count = fi_cq_read(completions_.get(), entries.data(), entries.size());
  if (count == -FI_EAGAIN) {
    return {};
  }
  if (count == -FI_EAVAIL) {
    fi_cq_err_entry failed{};
    std::array<char, 256> buffer{};
    failed.err_data_size = 0;
    if (fi_cq_readerr(completions_.get(), &failed, 0) < 0) {
      return {};
    }
    const char* detail = fi_cq_strerror(completions_.get(), failed.prov_errno, failed.err_data,
                                        buffer.data(), buffer.size());
    events_[0] = {static_cast<Request*>(failed.op_context), 0,
                  concatenate(fi_strerror(failed.err), detail != nullptr ? ", " : "",
                              detail != nullptr ? detail : "", " (", name_, ")")};
    return {events_.data(), 1};
  }
  check(count, "fi_cq_read", name_);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const bool from_peer = (entries[i].flags & FI_REMOTE_WRITE) != 0;
    events_[i].request = from_peer ? nullptr : static_cast<Request*>(entries[i].op_context);
    events_[i].immediate = from_peer ? static_cast<std::uint32_t>(entries[i].data) : 0;
    events_[i].error.clear();
  }
  return {events_.data(), static_cast<std::size_t>(count)};
}

std::vector<std::unique_ptr<Rail>> open_rails(const ProviderRequest& request) {
  const bool automatic = request.provider.empty() || request.provider == "auto";
  fi_info* raw = nullptr;
  // By name if one is asked for: some are only listed when named.
  const InfoPtr hints = make_hints(automatic ? "" : request.provider);
  const int code = fi_getinfo(api_version(), nullptr, nullptr, 0, hints.get(), &raw);
  const InfoPtr all(raw);
  if (code != 0 && code != -FI_ENODATA) {
    check(code, "fi_getinfo", automatic ? "all providers" : request.provider);
  }
  std::vector<Candidate> candidates;
  std::vector<const fi_info*> infos;
  for (const fi_info* info = all.get(); info != nullptr; info = info->next) {
    candidates.push_back({info->fabric_attr->prov_name, info->domain_attr->name,
                          is_socket(*info) ? source_address(*info) : ""});
    infos.push_back(info);
  }
  std::vector<std::unique_ptr<Rail>> rails;
  for (const std::size_t i : choose_rails(candidates, request, &interface_address)) {
    InfoPtr info(fi_dupinfo(infos[i]));
    HOPSHARD_CHECK(info, CommError, "ofi: out of memory");
    rails.push_back(std::make_unique<Rail>(std::move(info)));
    HOPSHARD_LOG(kDebug, "ofi: rail ", rails.size() - 1, " is ", rails.back()->name(),
                 ", libfabric ", FI_MAJOR(fi_version()), '.', FI_MINOR(fi_version()));
  }
  return rails;
}

}  // namespace hopshard::detail::ofi
