// A group's place for a communicator that is replaced at each recovery: what goes in and out, who may use it, and the
// count of what was done.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "epoch.h"
#include "retire.h"
#include "solo_backend.h"
#include "works.h"

namespace deadpool {

// Thread-safe, except that coalescing blocks belong to one thread at a time (as in c10d). Holds at most one communicator
// per device type and routes by the tensors' device; operations without tensors go to the accelerator's, if there is one.
class Replaceable : public c10d::Backend {
 public:
  Replaceable(int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size),
        options_(c10::make_intrusive<Options>("deadpool", timeout)),
        epoch_(std::make_shared<Epoch>(-1, Kind::kNone, &own_counters_, 0)) {}
  ~Replaceable() override {
    epoch_->detach();
    Retirement::instance().add(take());
  }

  // ---- replacement ------------------------------------------------------------------------------------------------

  // From now on operations go to these communicators (either may be null, not both); the fence of older generations is
  // lifted; what was there before is destroyed elsewhere. Any thread.
  void set_inner(int64_t generation, Kind kind, BackendPtr cpu, BackendPtr cuda) {
    for (const auto& inner : {cpu, cuda}) {
      if (inner) {
        inner->setGroupUid(pg_uid_);
        inner->setGroupDesc(pg_desc_);
        inner->setBoundDeviceId(bound_device_id_);
      }
    }
    std::vector<BackendPtr> old;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      old = take();
      epoch_->fenced = true;
      epoch_->detach();
      epoch_ = std::make_shared<Epoch>(generation, kind, counters_, group_index_);
      inner_ = {std::move(cpu), std::move(cuda)};
      coalescing_.reset();
    }
    Retirement::instance().add(std::move(old));
  }
  void set_local(int64_t generation, Kind kind) {
    set_inner(generation, kind, c10::make_intrusive<SoloBackend>(rank_, size_), nullptr);
  }
  // Operations of generations before `generation` are refused from the return of this on (INV-4). Any thread; never
  // waits for an operation.
  bool fence(int64_t generation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (epoch_->generation < generation) {
      epoch_->fenced = true;
    }
    return epoch_->fenced;
  }
  // Gives up the communicators (destroyed elsewhere); operations are refused until the next set_inner.
  void release() {
    std::vector<BackendPtr> old;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      epoch_->fenced = true;
      old = take();
    }
    Retirement::instance().add(std::move(old));
  }

  // ---- observation ------------------------------------------------------------------------------------------------

  bool fenced() {
    return epoch()->fenced;
  }
  int64_t generation() {
    return epoch()->generation;
  }
  Kind kind() {
    return epoch()->kind;
  }
  // Calls and collectives of the current generation that have not ended.
  int64_t pending() {
    return epoch()->pending;
  }
  bool anybody_waits_inside() {
    return epoch()->waiting_threads.anybody_inside();
  }
  // Wakes, with an error, whoever waits for an operation of the current generation, which must be fenced and aborted.
  void abandon() {
    epoch()->waiting_threads.abandon();
  }
  bool closed() const {
    return closed_;
  }
  uint64_t total(Kind kind) const {
    return totals_[static_cast<size_t>(kind)];
  }
  BackendPtr inner(c10::DeviceType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return inner_[slot(type)];
  }
  GroupCounters* counters() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
  }
  // Keeps the counters at `target` from now on (which must stay valid while this object lives); null: its own again.
  // `group`: the group's number in the table that whoever looks from outside has.
  void bind_counters(GroupCounters* target, uint64_t group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* next = target != nullptr ? target : &own_counters_;
    if (next == counters_) {
      return;
    }
    epoch_->detach();
    next->sequence = next->sequence | 1;
    next->generation = counters_->generation.load();
    next->issued = counters_->issued.load();
    next->completed = counters_->completed.load();
    next->waiting = counters_->waiting.load();
    next->last_op = counters_->last_op.load();
    next->collectives = counters_->collectives.load();
    next->moves = next->moves + 1;
    next->sequence = next->sequence + 1;
    counters_ = next;
    group_index_ = group;
    epoch_->group = group;
    epoch_->attach(next);
  }

 protected:
  using OpType = c10d::OpType;

  struct Coalescing {
    std::optional<c10::DeviceType> device;
    bool native{false}; // the communicator coalesces by itself
    bool point_to_point{false}; // holds such operations
    std::vector<WorkPtr> works;
  };
  // A call inside a communicator: keeps it alive and keeps the generation pending for as long as it lasts.
  struct Call {
    Call(BackendPtr inner_in, std::shared_ptr<Epoch> epoch_in, bool by_accelerator_in)
        : inner(std::move(inner_in)), epoch(std::move(epoch_in)), by_accelerator(by_accelerator_in) {
      ++epoch->pending;
    }
    ~Call() {
      --epoch->pending;
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    BackendPtr inner;
    std::shared_ptr<Epoch> epoch;
    const bool by_accelerator;
  };
  // Whom an operation needs: every member, or one (-1: any) of them.
  struct Needs {
    bool everybody{true};
    int peer{-1};
  };

  static size_t slot(c10::DeviceType type) {
    return type == c10::kCUDA ? 1 : 0;
  }
  std::shared_ptr<Epoch> epoch() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return epoch_;
  }
  BackendPtr primary() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return inner_[1] ? inner_[1] : inner_[0];
  }
  std::array<BackendPtr, 2> fence_and_copy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    epoch_->fenced = true;
    return inner_;
  }
  std::vector<BackendPtr> take() {
    std::vector<BackendPtr> taken;
    for (auto& inner : inner_) {
      if (inner) {
        taken.push_back(std::move(inner));
      }
    }
    inner_ = {};
    return taken;
  }

  Call enter(std::optional<c10::DeviceType> type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool any = inner_[0] || inner_[1];
    if (epoch_->fenced || !any) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "deadpool: group '",
              pg_uid_,
              "' is ",
              closed_                       ? "destroyed"
                  : epoch_->generation < 0 ? "not connected"
                                            : c10::str("fenced, generation ", epoch_->generation, " is over"),
              "; no operation may start"));
    }
    // gloo and the local answer take accelerator tensors too, where there is no communicator for them.
    const auto wanted = type ? slot(*type) : (inner_[1] ? 1 : 0);
    const auto& inner = inner_[wanted] ? inner_[wanted] : inner_[0];
    TORCH_CHECK(inner, "deadpool: group '", pg_uid_, "' was made for CUDA tensors only (backend nccl)");
    return Call(inner, epoch_, &inner == &inner_[1]);
  }
  // `peer`: rank in the group of the one that a point-to-point operation needs; -1: all.
  Operation count(Epoch& epoch, OpType op, bool collective, int peer) {
    const auto number = epoch.issued(static_cast<uint64_t>(op), collective);
    ++totals_[static_cast<size_t>(epoch.kind)];
    return Operation{
        epoch.group,
        static_cast<uint64_t>(epoch.generation),
        number,
        static_cast<uint64_t>(op),
        static_cast<uint64_t>(peer + 1)};
  }
  template <typename F>
  auto ask(std::optional<c10::DeviceType> type, F&& function) -> decltype(function(std::declval<Backend&>())) {
    const auto entered = enter(type);
    return function(*entered.inner);
  }

  template <typename F>
  WorkPtr issue(OpType op, std::optional<c10::DeviceType> type, F&& function, Needs needs = {}) {
    const auto call = enter(type);
    coalesce(call, type, needs);
    const auto operation = count(*call.epoch, op, needs.everybody, needs.peer);
    WorkPtr inner;
    try {
      std::optional<Blocked> blocked; // NCCL connects in its first operation, and its queue may be full
      if (call.by_accelerator) {
        blocked.emplace(operation);
      }
      inner = function(*call.inner);
    } catch (...) {
      call.epoch->completed();
      rethrow_communication_error(*call.epoch, pg_uid_, op);
    }
    auto work = follow(std::move(inner), call, op, operation);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (coalescing_ && !coalescing_->native) {
      coalescing_->works.push_back(work);
    }
    return work;
  }

  // The first operation of a coalescing block decides which communicator coalesces.
  void coalesce(const Call& call, std::optional<c10::DeviceType> type, Needs needs) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (coalescing_ && !needs.everybody) {
        coalescing_->point_to_point = true;
      }
      if (!coalescing_ || coalescing_->device) {
        return;
      }
      coalescing_->device = type.value_or(c10::kCPU);
      coalescing_->native = call.inner->supportsCoalescing();
      if (!coalescing_->native) {
        return;
      }
    }
    call.inner->startCoalescing();
  }

  // Counts the completion of an operation. Null (an operation inside a communicator's own coalescing block) stays null.
  WorkPtr follow(WorkPtr inner, const Call& call, OpType op, const Operation& operation) {
    if (!inner || call.epoch->kind != Kind::kConnected) {
      call.epoch->completed();
      return inner;
    }
    // NCCL's futures are complete when the kernel is queued, so they say nothing.
    auto future = call.inner->getBackendName() == "gloo" ? future_of(*inner) : nullptr;
    std::shared_ptr<std::atomic<bool>> ended;
    if (future) {
      ++call.epoch->pending;
      ended = std::make_shared<std::atomic<bool>>(false);
      future->addCallback(
          [epoch = call.epoch, ended](c10::ivalue::Future& /*future*/) {
            epoch->completed();
            --epoch->pending;
            epoch->waiting_threads.change([&] { *ended = true; });
          },
          /*uses_future=*/false);
    }
    return c10::make_intrusive<ShellWork>(std::move(inner), call.epoch, pg_uid_, rank_, op, std::move(ended), operation);
  }

  const c10::intrusive_ptr<Options> options_;
  mutable std::mutex mutex_; // guards what follows; never held while a communicator is called, except to set a timeout
  GroupCounters own_counters_{};
  GroupCounters* counters_{&own_counters_};
  uint64_t group_index_{0};
  std::shared_ptr<Epoch> epoch_;
  std::array<BackendPtr, 2> inner_{}; // cpu, cuda
  std::optional<Coalescing> coalescing_;
  std::atomic<bool> closed_{false};
  std::array<std::atomic<uint64_t>, 4> totals_{}; // by kind, over all generations
};

} // namespace deadpool
