// What one generation of one group has issued and completed, kept so that others can read it while this process is
// stuck.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <type_traits>

#include "waiting.h"

namespace deadpool {

// Plain words, 64 bits each, at an address of the owner's choice (later: shared memory read by the agent).
// `waiting` is the number of threads blocked in a wait; `last_op` is c10d's OpType of the operation issued last.
struct GroupCounters {
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> issued;
  std::atomic<uint64_t> completed;
  std::atomic<uint64_t> waiting;
  std::atomic<uint64_t> last_op;
};
static_assert(std::is_standard_layout_v<GroupCounters> && sizeof(GroupCounters) == 40);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// How the operations of a generation are answered.
enum class Kind : int {
  kNone = 0, // by an error
  kConnected = 1, // together with the peers
  kLocal = 2, // here, because the group has one member
  kSolo = 3, // here, as if every peer agreed, while a newcomer constructs alone
};

// One generation of one group; works in flight share it, so it outlives the replacement of the communicator.
class Epoch {
 public:
  Epoch(int64_t generation_in, Kind kind_in, GroupCounters* counters) : generation(generation_in), kind(kind_in) {
    attach(counters);
    if (counters != nullptr) {
      counters->generation = static_cast<uint64_t>(generation_in);
      counters->issued = 0;
      counters->completed = 0;
      counters->waiting = 0;
      counters->last_op = 0;
    }
  }

  const int64_t generation;
  const Kind kind;
  std::atomic<bool> fenced{false};
  // Calls inside the communicator, and collectives that it has accepted and not finished: zero means that no thread of
  // it touches a tensor any more (point-to-point is covered by its sockets being closed).
  std::atomic<int64_t> pending{0};
  Waiting waiting_threads;

  void attach(GroupCounters* counters) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_ = counters;
  }
  // After a replacement: late completions of this generation must not count for the next one (INV-4).
  void detach() {
    attach(nullptr);
  }
  void issued(uint64_t op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (counters_ != nullptr) {
      counters_->last_op = op;
      ++counters_->issued;
    }
  }
  void completed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (counters_ != nullptr) {
      ++counters_->completed;
    }
  }
  void waiting(int64_t change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (counters_ != nullptr) {
      counters_->waiting += static_cast<uint64_t>(change);
    }
  }

 private:
  std::mutex mutex_;
  GroupCounters* counters_{nullptr};
};

} // namespace deadpool
