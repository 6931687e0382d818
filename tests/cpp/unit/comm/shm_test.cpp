// The parts of shm below its protocol: files in memory, arenas, control blocks. What it does as a
// communicator is tested by the conformance suite and, between processes, in world/.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <string>

#include "comm/backends/shm/control_block.hpp"
#include "comm/backends/shm/memory.hpp"
#include "comm/backends/shm/peers.hpp"
#include "hopshard/comm/registry.hpp"
#include "hopshard/core/error.hpp"

namespace hopshard::detail::shm {
namespace {

TEST(ShmArenas, MemoryIsFoundByAddressAndMappedElsewhere) {
  Arenas& arenas = Arenas::of_process();
  at::Tensor memory = arenas.allocate(10'000);
  auto* data = memory.mutable_data_ptr<std::uint8_t>();
  data[5000] = 42;
  const auto location = arenas.find(data + 5000, 5000);
  ASSERT_TRUE(location);
  EXPECT_EQ(location->place, Location::Place::kArena);
  EXPECT_EQ(location->offset, 5000U);
  EXPECT_FALSE(arenas.find(data + 5000, 100'000)) << "reaches beyond its end";
  int elsewhere = 0;
  EXPECT_FALSE(arenas.find(&elsewhere, sizeof(elsewhere)));

  PeerArenas peer(::getpid());
  const PeerArenas::Memory mapped = peer.resolve(*location);
  EXPECT_NE(static_cast<void*>(mapped.data), static_cast<void*>(data + 5000));
  EXPECT_EQ(*mapped.data, 42);
  *mapped.data = 43;
  EXPECT_EQ(data[5000], 43);

  memory = at::Tensor();
  EXPECT_EQ(*mapped.data, 0) << "the memory of a freed arena is given back, mapped or not";
  EXPECT_THROW(static_cast<void>(peer.resolve(*location)), CommError);
  EXPECT_FALSE(arenas.find(data, 1));
}

TEST(ShmArenas, ViewsKeepTheMemory) {
  at::Tensor memory = Arenas::of_process().allocate(1 << 20);
  at::Tensor view = memory.narrow(0, 100, 10);
  memory = at::Tensor();
  view.mutable_data_ptr<std::uint8_t>()[0] = 7;
  EXPECT_TRUE(Arenas::of_process().find(view.const_data_ptr(), 10));
  EXPECT_EQ(view.const_data_ptr<std::uint8_t>()[0], 7);
}

TEST(ShmFiles, AnotherFileUnderTheSameNumberIsNotTaken) {
  const File file = make_memory_file(kPageBytes);
  EXPECT_THROW(static_cast<void>(open_memory_file_of(::getpid(), file.get(), file.inode() + 1)),
               CommError);
  try {
    static_cast<void>(open_memory_file_of(::getpid(), 1'000'000, 1));
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("/fd/1000000"), std::string::npos) << error.what();
  }
}

TEST(ShmControlBlock, PartsDoNotOverlap) {
  constexpr std::size_t kRanks = 3;
  constexpr std::size_t kInline = 100;
  const std::size_t bytes = ControlBlock::num_bytes(kRanks, kInline);
  const File file = make_memory_file(bytes);
  const Mapping mapping(file, bytes);
  const ControlBlock block(mapping.data(), kRanks, kInline);
  std::set<const void*> places = {&block.header()};
  for (std::size_t member = 0; member < kRanks; ++member) {
    places.insert(&block.rank(member));
    for (std::uint64_t sequence = 0; sequence < kRingSize; ++sequence) {
      Post& post = block.post(member, sequence);
      EXPECT_EQ(post.ready.load(), 0U) << "overwritten by the text of another";
      post.ready.store(1);
      std::memset(block.inline_data(member, sequence), 0xFF, kInline);
      places.insert(&post);
      EXPECT_LE(block.inline_data(member, sequence) + kInline, mapping.data() + bytes);
      EXPECT_EQ(&block.post(member, sequence + kRingSize), &post);
    }
  }
  EXPECT_EQ(places.size(), 1 + kRanks * (1 + kRingSize));
  EXPECT_EQ(block.header().fail_from.load(), 0U);
}

class ShmLifeLine : public ::testing::TestWithParam<bool> {};

TEST_P(ShmLifeLine, SeesTheEndOfAProcessThatIsNotReaped) {
  const bool use_pid = GetParam();
  const File file = make_memory_file(kPageBytes);
  std::array<int, 2> ready{};
  std::array<int, 2> end{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  ASSERT_EQ(::pipe(end.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const File own = open_memory_file_of(::getppid(), file.get(), file.inode());
    hold_life_lock(own.get(), 1);
    char byte = 'x';
    static_cast<void>(!::write(ready[1], &byte, 1));
    static_cast<void>(!::read(end[0], &byte, 1));
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  // What matters of the identity is its start time, which only the process itself can tell here.
  ProcessIdentity identity = ProcessIdentity::of(child);
  const LifeLine life_line(identity, use_pid, file.get(), 1);
  EXPECT_FALSE(life_line.is_dead());
  ++identity.start_time;
  EXPECT_EQ(LifeLine(identity, use_pid, file.get(), 1).is_dead(), use_pid) << "a reused pid";
  ASSERT_EQ(::write(end[1], &byte, 1), 1);
  for (int i = 0; i < 2000 && !life_line.is_dead(); ++i) {
    ::usleep(1000);
  }
  EXPECT_TRUE(life_line.is_dead());
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(life_line.is_dead());
}

INSTANTIATE_TEST_SUITE_P(Means, ShmLifeLine, ::testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "pidfd" : "lock");
});

TEST(ShmBackend, IsAvailableAndSaysWhoItIsFor) {
  const BackendInfo& info = require_backend("shm");
  EXPECT_NE(info.summary.find("one host"), std::string::npos);
  EXPECT_NE(info.connect, nullptr);
  EXPECT_THROW(static_cast<void>(connect_backend("shm", {.store = nullptr,
                                                         .group = {"g", {0, 1}, 0, {}},
                                                         .timeout = std::chrono::seconds(1)})),
               InvalidArgument);
}

}  // namespace
}  // namespace hopshard::detail::shm
