// What a worker shows of its communication to whoever looks from outside: plain words in memory that may be shared
// (deadpool_ext/comm/pulse.py has the same layout and reads them), written without locks or system calls.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace deadpool {

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// One cache line a group. `sequence` is odd while a generation begins; `waiting` is the number of threads blocked in a
// wait; `last_op` is c10d's OpType of the operation issued last; `collectives` counts those issued that every member
// issues; `moves` counts beginnings and ends of operations and is never reset.
struct GroupCounters {
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> issued;
  std::atomic<uint64_t> completed;
  std::atomic<uint64_t> waiting;
  std::atomic<uint64_t> last_op;
  std::atomic<uint64_t> collectives;
  std::atomic<uint64_t> moves;
};
static_assert(std::is_standard_layout_v<GroupCounters> && sizeof(GroupCounters) == 64);

// A thread that is inside an operation. `ticket`: 0 free, 1 being written, else a value that never comes again.
// `number`: of a collective, from 1; 0 for point-to-point. `peer`: rank in the group plus 1; 0: all others.
struct BlockedThread {
  std::atomic<uint64_t> ticket;
  std::atomic<uint64_t> group;
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> number;
  std::atomic<uint64_t> op;
  std::atomic<uint64_t> peer;
  std::atomic<uint64_t> since_ns; // CLOCK_MONOTONIC
  std::atomic<uint64_t> unused;
};
static_assert(std::is_standard_layout_v<BlockedThread> && sizeof(BlockedThread) == 64);

constexpr size_t kBlockedThreads = 32;

struct Pulse {
  std::atomic<uint64_t> waited_ns; // by all threads together, in operations that have ended
  std::atomic<uint64_t> untold; // operations that found no free place below
  std::array<std::atomic<uint64_t>, 6> unused;
  std::array<BlockedThread, kBlockedThreads> blocked;

  // Where this process shows it: its own memory, until it is given another place.
  static Pulse& instance() {
    return *where().load(std::memory_order_acquire);
  }
  // `target` must stay valid for the life of the process; null: the process's own memory again.
  static void place(Pulse* target) {
    where().store(target != nullptr ? target : own(), std::memory_order_release);
  }

 private:
  static Pulse* own() {
    static Pulse pulse{};
    return &pulse;
  }
  static std::atomic<Pulse*>& where() {
    static std::atomic<Pulse*> pointer{own()};
    return pointer;
  }
};
static_assert(std::is_standard_layout_v<Pulse> && sizeof(Pulse) == 64 * (1 + kBlockedThreads));

// What a blocked thread is in.
struct Operation {
  uint64_t group;
  uint64_t generation;
  uint64_t number;
  uint64_t op;
  uint64_t peer;
};

// For as long as it lives the calling thread is shown as blocked in this operation.
class Blocked {
 public:
  explicit Blocked(const Operation& operation) : pulse_(Pulse::instance()), since_ns_(now_ns()) {
    for (size_t tried = 0; tried < kBlockedThreads; ++tried) {
      auto& place = pulse_.blocked[(favourite() + tried) % kBlockedThreads];
      uint64_t free = 0;
      if (place.ticket.load(std::memory_order_relaxed) == 0 &&
          place.ticket.compare_exchange_strong(free, 1, std::memory_order_acq_rel)) {
        favourite() = (favourite() + tried) % kBlockedThreads;
        place.group.store(operation.group, std::memory_order_relaxed);
        place.generation.store(operation.generation, std::memory_order_relaxed);
        place.number.store(operation.number, std::memory_order_relaxed);
        place.op.store(operation.op, std::memory_order_relaxed);
        place.peer.store(operation.peer, std::memory_order_relaxed);
        place.since_ns.store(since_ns_, std::memory_order_relaxed);
        place.ticket.store(next_ticket().fetch_add(1, std::memory_order_relaxed), std::memory_order_release);
        place_ = &place;
        return;
      }
    }
    pulse_.untold.fetch_add(1, std::memory_order_relaxed);
  }
  ~Blocked() {
    if (place_ != nullptr) {
      place_->ticket.store(0, std::memory_order_release);
    }
    pulse_.waited_ns.fetch_add(now_ns() - since_ns_, std::memory_order_relaxed);
  }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  static uint64_t now_ns() { // steady_clock is CLOCK_MONOTONIC, read without a system call
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }
  static std::atomic<uint64_t>& next_ticket() {
    static std::atomic<uint64_t> ticket{2};
    return ticket;
  }
  // Where this thread found room last: threads do not meet on one cache line then.
  static size_t& favourite() {
    static std::atomic<size_t> threads{0};
    thread_local size_t mine = threads.fetch_add(1, std::memory_order_relaxed) % kBlockedThreads;
    return mine;
  }

  Pulse& pulse_;
  const uint64_t since_ns_;
  BlockedThread* place_{nullptr};
};

} // namespace deadpool
