#include "hopshard/core/ordered_worker.hpp"

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace hopshard {
namespace {

TEST(OrderedWorker, RunsTasksInTheOrderInWhichTheyCame) {
  std::vector<int> ran;
  {
    OrderedWorker worker("order");
    for (int task = 0; task < 1000; ++task) {
      worker.submit([&ran, task] { ran.push_back(task); });
    }
  }
  ASSERT_EQ(ran.size(), 1000U);
  for (int task = 0; task < 1000; ++task) {
    EXPECT_EQ(ran[static_cast<std::size_t>(task)], task);
  }
}

TEST(OrderedWorker, ItsDestructorRunsWhatWasSubmitted) {
  std::promise<void> gate;
  int num_run = 0;
  auto worker = std::make_unique<OrderedWorker>("drain");
  worker->submit([opened = gate.get_future().share()] { opened.wait(); });
  for (int task = 0; task < 10; ++task) {
    worker->submit([&] { ++num_run; });
  }
  std::thread opener([&] { gate.set_value(); });
  worker.reset();
  opener.join();
  EXPECT_EQ(num_run, 10);
}

TEST(OrderedWorker, UsesOneThreadOfItsOwnWithTheGivenName) {
  std::array<char, 16> name{};
  std::vector<std::thread::id> threads;
  {
    OrderedWorker worker("a-name-that-is-too-long");
    std::promise<void> named;  // The name is set once the constructor returned.
    worker.submit([&, ready = named.get_future().share()] {
      ready.wait();
      pthread_getname_np(pthread_self(), name.data(), name.size());
      threads.push_back(std::this_thread::get_id());
    });
    named.set_value();
    worker.submit([&] { threads.push_back(std::this_thread::get_id()); });
  }
  EXPECT_STREQ(name.data(), "a-name-that-is-");
  ASSERT_EQ(threads.size(), 2U);
  EXPECT_EQ(threads[0], threads[1]);
  EXPECT_NE(threads[0], std::this_thread::get_id());
}

TEST(OrderedWorker, WhatATaskCapturesEndsBeforeTheNextTaskStarts) {
  auto captured = std::make_shared<int>(1);
  std::weak_ptr<int> watched = captured;
  bool was_gone = false;
  {
    OrderedWorker worker("captures");
    worker.submit([captured] {});
    captured.reset();
    worker.submit([&] { was_gone = watched.expired(); });
  }
  EXPECT_TRUE(was_gone);
}

TEST(OrderedWorker, ManyThreadsMaySubmit) {
  int num_run = 0;  // Only the worker touches it.
  {
    OrderedWorker worker("many");
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (int task = 0; task < 250; ++task) {
          worker.submit([&] { ++num_run; });
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  EXPECT_EQ(num_run, 1000);
}

TEST(OrderedWorker, ATaskMaySubmitFromAnotherWorker) {
  std::vector<int> ran;
  {
    OrderedWorker second("second");
    OrderedWorker first("first");
    first.submit([&] { second.submit([&] { ran.push_back(1); }); });
  }
  EXPECT_EQ(ran, std::vector<int>{1});
}

}  // namespace
}  // namespace hopshard
