// Destroying old communicators away from Python.
//
// A gloo communicator's destructor waits for its threads. Run on the trainer's thread with the GIL held it leaks threads
// and descriptors at every replacement, so it runs here, on a native thread that never touches Python.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace deadpool {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

class Retirement {
 public:
  // Never destroyed: a detached thread may outlive static destruction.
  static Retirement& instance() {
    static auto* retirement = new Retirement();
    return *retirement;
  }

  // Drops these references on one native thread; returns at once.
  void add(std::vector<BackendPtr> backends) {
    if (backends.empty()) {
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      count_ += static_cast<int64_t>(backends.size());
    }
    std::thread([this, owned = std::move(backends)]() mutable {
      for (auto& backend : owned) {
        // Whoever else still holds it (a call that is returning, a Python variable) should drop it first, so that the
        // destructor runs here.
        for (int ms = 0; ms < kPatienceMs && backend.use_count() > 1; ++ms) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        backend.reset();
        const std::lock_guard<std::mutex> lock(mutex_);
        --count_;
        changed_.notify_all();
      }
    }).detach();
  }

  // Communicators handed over and not destroyed yet.
  int64_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }

  // Waits until at most `limit` are left; false when `timeout` passed first.
  bool wait(int64_t limit, std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, timeout, [&] { return count_ <= limit; });
  }

 private:
  static constexpr int kPatienceMs = 1000;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t count_{0};
};

} // namespace deadpool
