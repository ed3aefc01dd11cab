// Letting go of operations that gloo lost.
//
// When a connection ends while gloo writes to it, the write fails in the calling thread, which marks the connection as
// failed and only then queues the operation: nobody ever tells that operation, and its waiter sleeps until the group's
// timeout. Sockets closed and every gloo thread asleep means that what is still pending is such a loss: no byte can
// arrive and nothing computes, so its waiters may be woken with an error.
#pragma once

#include <dirent.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace deadpool {

// Threads that wait for operations of one generation of one group.
class Waiting {
 public:
  // Blocks until `done()`, asked under this object's lock after every `changed()`; false if abandoned first.
  template <typename F>
  bool until(F&& done) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done() || abandoned_; });
    return done();
  }
  // Marks something that `done` depends on as changed.
  template <typename F>
  void change(F&& change) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      change();
    }
    changed_.notify_all();
  }
  // For an operation that only its own handle can wake: it is aborted when the generation is abandoned.
  bool enter(c10d::Work* work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !abandoned_ && inside_.insert(work).second;
  }
  void leave(c10d::Work* work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    inside_.erase(work);
  }
  bool anybody_inside() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !inside_.empty();
  }
  // Wakes everybody; waits that begin later end at once.
  void abandon() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      abandoned_ = true;
      for (auto* work : inside_) {
        try {
          work->abort();
        } catch (const std::exception&) { // not every handle can: its waiter stays until the group's timeout
        }
      }
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<c10d::Work*> inside_;
  bool abandoned_{false};
};

// State and context switches of every thread of this process that runs gloo's collectives, by thread id.
inline std::map<std::string, std::string> gloo_threads() {
  std::map<std::string, std::string> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir("/proc/self/task"), ::closedir);
  while (const dirent* entry = tasks ? ::readdir(tasks.get()) : nullptr) {
    const std::string path = std::string("/proc/self/task/") + entry->d_name;
    std::string name;
    std::getline(std::ifstream(path + "/comm"), name);
    if (name != "pt_gloo_runloop") {
      continue;
    }
    std::ifstream status(path + "/status");
    std::string line;
    std::string& state = found[entry->d_name];
    while (std::getline(status, line)) {
      if (line.rfind("State:", 0) == 0 || line.find("ctxt_switches:") != std::string::npos) {
        state += line + "\n";
      }
    }
  }
  return found;
}

// Whether all of them slept, and none ran, over the whole of `period`.
inline bool gloo_sleeps(std::chrono::milliseconds period) {
  const auto before = gloo_threads();
  for (const auto& [thread, state] : before) {
    if (state.find("State:\tS") == std::string::npos) {
      return false;
    }
  }
  std::this_thread::sleep_for(period);
  return gloo_threads() == before;
}

} // namespace deadpool
