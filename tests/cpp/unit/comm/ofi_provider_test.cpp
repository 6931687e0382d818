// Which provider and cards the `ofi` backend takes: tested without libfabric, and without EFA.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "comm/backends/ofi/provider.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::detail::ofi {
namespace {

const std::vector<Candidate> kSockets = {
    {"tcp;ofi_rxm", "lo", "127.0.0.1"}, {"tcp;ofi_rxm", "docker0", "172.17.0.1"},
    {"tcp;ofi_rxm", "eth0", "fe80::1"}, {"tcp;ofi_rxm", "eth0", "10.0.0.1"},
    {"net", "eth0", "10.0.0.1"},        {"shm", "shm", ""}};

std::vector<Candidate> with_efa() {
  std::vector<Candidate> all = kSockets;
  all.insert(
      all.end(),
      {{"efa", "rdmap0s6-rdm", ""}, {"efa", "rdmap0s7-rdm", ""}, {"efa", "rdmap0s6-rdm", ""}});
  return all;
}

std::optional<std::string> address_of(const std::string& interface) {
  return interface == "eth0" ? std::optional<std::string>("10.0.0.1") : std::nullopt;
}

std::vector<std::size_t> choose(const std::vector<Candidate>& candidates,
                                const ProviderRequest& request) {
  return choose_rails(candidates, request, address_of);
}

/// The ConfigError's text; empty if there is none.
std::string refusal(const std::vector<Candidate>& candidates, const ProviderRequest& request) {
  try {
    static_cast<void>(choose(candidates, request));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

using Rails = std::vector<std::size_t>;

TEST(OfiProvider, TakesEfaAndAllItsCardsIfThereIsOne) {
  const ProviderRequest request{.has_efa_device = true};
  EXPECT_EQ(choose(with_efa(), request), (Rails{6, 7}));
}

TEST(OfiProvider, ElseTcpOnTheInterfaceThatMayReachOtherNodes) {
  EXPECT_EQ(choose(kSockets, {}), Rails{3});
  EXPECT_EQ(choose({kSockets[0], kSockets[2]}, {}), Rails{1});
  EXPECT_EQ(choose({kSockets[0]}, {.provider = "auto"}), Rails{0});
}

TEST(OfiProvider, TakesWhatIsAskedFor) {
  EXPECT_EQ(choose(kSockets, {.provider = "net"}), Rails{4});
  EXPECT_EQ(choose(kSockets, {.provider = "shm"}), Rails{5});
  EXPECT_EQ(choose(kSockets, {.provider = "tcp;ofi_rxm"}), Rails{3});
  EXPECT_EQ(choose(kSockets, {.interfaces = {"127.0.0.1", "eth0", "eth0"}}), (Rails{0, 3, 3}));
  EXPECT_EQ(choose(with_efa(), {.interfaces = {"rdmap0s7"}}), Rails{7});
}

TEST(OfiProvider, SocketsOnAnEfaMachineAreRefusedUnlessAllowed) {
  const ProviderRequest fell_back{.has_efa_device = true};
  EXPECT_NE(refusal(kSockets, fell_back).find("HOPSHARD_OFI_ALLOW_TCP=1"), std::string::npos);
  EXPECT_NE(refusal(kSockets, fell_back).find("fi_info -p efa"), std::string::npos);
  const ProviderRequest asked{.provider = "tcp", .has_efa_device = true};
  EXPECT_NE(refusal(with_efa(), asked).find("HOPSHARD_OFI_PROVIDER asks for it"),
            std::string::npos);
  EXPECT_EQ(choose(kSockets, {.allow_tcp = true, .has_efa_device = true}), Rails{3});
}

TEST(OfiProvider, SaysWhatThereIsIfNothingFits) {
  EXPECT_NE(refusal(kSockets, {.provider = "efa"}).find("tcp on eth0 10.0.0.1"), std::string::npos);
  EXPECT_NE(refusal(kSockets, {.interfaces = {"eth7"}}).find("no interface 'eth7'"),
            std::string::npos);
  EXPECT_NE(refusal({}, {}).find("only nothing"), std::string::npos);
  EXPECT_NE(refusal({kSockets[5]}, {}).find("shm on shm"), std::string::npos);
}

class Sysfs : public ::testing::Test {
 protected:
  Sysfs()
      : root_(std::filesystem::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~Sysfs() override { std::filesystem::remove_all(root_); }

  void add(const std::string& folder, const char* vendor, const char* device) const {
    std::filesystem::create_directories(root_ / folder);
    std::ofstream(root_ / folder / "vendor") << vendor << '\n';
    std::ofstream(root_ / folder / "device") << device << '\n';
  }

  std::filesystem::path root_;
};

TEST_F(Sysfs, EfaDevicesAreFoundByTheirIds) {
  EXPECT_TRUE(efa_devices(root_).empty());
  add("bus/pci/devices/0000:00:05.0", "0x1d0f", "0xec20");  // Amazon's Ethernet.
  add("class/infiniband/mlx5_0/device", "0x15b3", "0x101d");
  EXPECT_TRUE(efa_devices(root_).empty());
  add("bus/pci/devices/0000:00:06.0", "0x1d0f", "0xefa2");  // Its driver is not loaded.
  EXPECT_EQ(efa_devices(root_), std::vector<std::string>{"0000:00:06.0"});
  add("class/infiniband/rdmap0s6/device", "0x1d0f", "0xefa2");
  EXPECT_EQ(efa_devices(root_), std::vector<std::string>{"rdmap0s6"});
}

TEST(OfiInterface, LoopbackHasItsAddress) {
  EXPECT_EQ(interface_address("lo"), "127.0.0.1");
  EXPECT_FALSE(interface_address("no such interface").has_value());
}

}  // namespace
}  // namespace hopshard::detail::ofi
