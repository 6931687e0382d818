// The real NCCL, as far as it goes without a GPU: it loads, and its errors become ours.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include "comm/backends/nccl/nccl_communicator.hpp"
#include "hopshard/comm/registry.hpp"
#include "hopshard/core/error.hpp"
#include "support/fake_nccl.hpp"
#include "support/thread_world.hpp"

namespace hopshard::testing {
namespace {

using hopshard::detail::NcclApi;

/// The library that torch brings; null where only its headers are installed.
std::shared_ptr<NcclApi> library() {
  try {
    return hopshard::detail::load_nccl();
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return nullptr;
  }
}

TEST(NcclLibrary, VersionsAreWrittenAsPeopleDo) {
  EXPECT_EQ(hopshard::detail::nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(hopshard::detail::nccl_version_text(21005), "2.10.5");
  EXPECT_EQ(hopshard::detail::nccl_version_text(2804), "2.8.4");
}

TEST(NcclLibrary, LoadsAndMakesIdsWithoutADriver) {
  const auto api = library();
  if (!api) {
    GTEST_SKIP() << "libnccl.so.2 is not installed here";
  }
  EXPECT_GE(hopshard::detail::check_nccl_version(*api), hopshard::detail::kOldestNccl);
  ncclUniqueId one{};
  ncclUniqueId other{};
  ASSERT_EQ(api->get_unique_id(&one), ncclSuccess) << api->get_last_error(nullptr);
  ASSERT_EQ(api->get_unique_id(&other), ncclSuccess);
  EXPECT_NE(std::string(one.internal, sizeof(one.internal)),
            std::string(other.internal, sizeof(other.internal)));
}

TEST(NcclLibrary, WithoutAGpuConnectingIsATypedErrorOnEveryRank) {
  const auto api = library();
  if (!api) {
    GTEST_SKIP() << "libnccl.so.2 is not installed here";
  }
  run_ranks(2, [&](int rank, ThreadWorld& threads) {
    const Group group = world_of(2, rank);
    try {
      // CPU memory for the GPU's: the connection must fail before it matters.
      static_cast<void>(hopshard::detail::connect_nccl(
          api, std::make_shared<FakeDevice>(),
          {.store = threads.store(), .group = group, .timeout = std::chrono::seconds(20)}, {}));
      // Two ranks on the one GPU of this process: NCCL must not accept them.
      ADD_FAILURE() << "two ranks of one process connected";
    } catch (const CommError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("nccl connect (no tag) in group 'world' on rank"), std::string::npos)
          << text;
      EXPECT_NE(text.find("NCCL could not connect"), std::string::npos) << text;
    }
  });
}

TEST(NcclLibrary, TheRegistryTellsWhyThereIsNoGpu) {
  const auto& all = backends();
  const auto nccl = std::find_if(all.begin(), all.end(),
                                 [](const BackendInfo& backend) { return backend.name == "nccl"; });
  ASSERT_NE(nccl, all.end());
  // This program does not load torch's CUDA libraries, GPU or not.
  ASSERT_FALSE(c10::impl::hasDeviceGuardImpl(at::kCUDA));
  ASSERT_TRUE(nccl->why_not.has_value());
  EXPECT_NE(nccl->why_not->find("CUDA libraries are not loaded"), std::string::npos)
      << *nccl->why_not;
  EXPECT_THROW(static_cast<void>(connect_backend("nccl", {})), ConfigError);
  EXPECT_THROW(static_cast<void>(make_nccl_communicator({})), ConfigError);
}

}  // namespace
}  // namespace hopshard::testing
