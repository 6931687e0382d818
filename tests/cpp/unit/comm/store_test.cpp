#include "hopshard/comm/store.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

using std::chrono::milliseconds;

TEST(MemoryStore, KeepsBytesAndReplacesThem) {
  const StorePtr store = make_memory_store();
  const std::string bytes("a\0b\xff", 4);
  EXPECT_FALSE(store->has("key"));
  store->set("key", bytes);
  EXPECT_TRUE(store->has("key"));
  EXPECT_EQ(store->get("key", milliseconds(1)), bytes);
  store->set("key", "");
  EXPECT_TRUE(store->has("key"));
  EXPECT_EQ(store->get("key", milliseconds(1)), "");
}

TEST(MemoryStore, AGetWaitsForTheKey) {
  const StorePtr store = make_memory_store();
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(20));
    store->set("other", "no");
    store->set("address", "10.0.0.1");
  });
  EXPECT_EQ(store->get("address", milliseconds(10'000)), "10.0.0.1");
  writer.join();
}

TEST(MemoryStore, AGetEndsAtItsLimitAndNamesTheKey) {
  const StorePtr store = make_memory_store();
  try {
    static_cast<void>(store->get("rank 3", milliseconds(10)));
    ADD_FAILURE() << "no error";
  } catch (const TimeoutError& error) {
    EXPECT_STREQ(error.what(), "no rank wrote 'rank 3' within 10 ms");
  }
}

TEST(MemoryStore, ManyThreadsMayUseIt) {
  const StorePtr store = make_memory_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; ++rank) {
    threads.emplace_back([&, rank] {
      store->set("rank" + std::to_string(rank), std::to_string(rank * rank));
      for (int other = 0; other < 8; ++other) {
        EXPECT_EQ(store->get("rank" + std::to_string(other), milliseconds(10'000)),
                  std::to_string(other * other));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(PrefixStore, KeepsKeysApart) {
  const StorePtr store = make_memory_store();
  const StorePtr one = make_prefix_store(store, "one");
  const StorePtr inner = make_prefix_store(one, "inner");
  one->set("key", "1");
  inner->set("key", "2");
  EXPECT_EQ(store->get("one/key", milliseconds(1)), "1");
  EXPECT_EQ(store->get("one/inner/key", milliseconds(1)), "2");
  EXPECT_EQ(one->get("inner/key", milliseconds(1)), "2");
  EXPECT_FALSE(store->has("key"));
  EXPECT_FALSE(make_prefix_store(store, "two")->has("key"));
  EXPECT_THROW(static_cast<void>(make_prefix_store(nullptr, "x")), InvalidArgument);
}

}  // namespace
}  // namespace hopshard
