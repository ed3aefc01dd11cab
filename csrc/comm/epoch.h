// What one generation of one group has issued and completed, kept so that others can read it while this process is
// stuck.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "pulse.h"
#include "waiting.h"

namespace deadpool {

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
  // `group`: its number in the table of groups that whoever looks from outside has.
  Epoch(int64_t generation_in, Kind kind_in, GroupCounters* counters, uint64_t group_in)
      : generation(generation_in), kind(kind_in), group(group_in) {
    attach(counters);
    if (counters != nullptr) {
      counters->sequence = counters->sequence | 1;
      counters->generation = static_cast<uint64_t>(generation_in);
      counters->issued = 0;
      counters->completed = 0;
      counters->waiting = 0;
      counters->last_op = 0;
      counters->collectives = 0;
      counters->sequence = counters->sequence + 1;
    }
  }

  const int64_t generation;
  const Kind kind;
  std::atomic<uint64_t> group;
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
  // Returns the number of a collective among those of this generation, from 1; 0 for an operation that not every
  // member issues.
  uint64_t issued(uint64_t op, bool collective) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = collective ? ++collectives_ : 0;
    if (counters_ != nullptr) {
      counters_->last_op.store(op, std::memory_order_relaxed);
      counters_->collectives.store(collectives_, std::memory_order_relaxed);
      add(counters_->moves, 1);
      add(counters_->issued, 1);
    }
    return number;
  }
  void completed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (counters_ != nullptr) {
      add(counters_->moves, 1);
      add(counters_->completed, 1);
    }
  }
  void waiting(int64_t change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (counters_ != nullptr) {
      add(counters_->waiting, static_cast<uint64_t>(change));
    }
  }

 private:
  // Writers hold the lock; readers do not.
  static void add(std::atomic<uint64_t>& word, uint64_t change) {
    word.store(word.load(std::memory_order_relaxed) + change, std::memory_order_release);
  }

  std::mutex mutex_;
  uint64_t collectives_{0};
  GroupCounters* counters_{nullptr};
};

} // namespace deadpool
