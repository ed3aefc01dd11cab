// Handles of operations: done at once (CompletedWork), counted and with clear errors (ShellWork), several (JointWork).
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <typeindex>
#include <utility>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "epoch.h"

namespace deadpool {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// An operation that was answered locally. Its future holds the output tensors, as gloo's does.
class CompletedWork : public c10d::Work {
 public:
  CompletedWork(int rank, c10d::OpType op, std::vector<at::Tensor> outputs)
      : Work(rank, op), outputs_(std::move(outputs)) {
    finish();
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  std::vector<at::Tensor> outputs_;
};

// To be called from a catch block: turns what a communicator throws when a connection ends into DistBackendError, so
// that a lost peer can be told from an error of the caller. Errors about arguments pass unchanged.
[[noreturn]] inline void rethrow_communication_error(const Epoch& epoch, const std::string& group, c10d::OpType op) {
  std::string detail;
  try {
    throw;
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error& error) {
    detail = error.what_without_backtrace();
    if (!epoch.fenced && detail.find("timed out") == std::string::npos) {
      throw;
    }
  } catch (const std::runtime_error& error) { // gloo's own exceptions
    detail = error.what();
  }
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "deadpool: ",
          c10d::opTypeToString(op),
          " in group '",
          group,
          "', generation ",
          epoch.generation,
          epoch.fenced ? ", ended by a fence: " : ", failed: ",
          detail));
}

// Of gloo's works only some have a future: those run by its own threads. The others (point-to-point, and compositions
// that do their last part in the wait) throw when asked, so each class is asked once.
inline c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  static auto* mutex = new std::mutex();
  static auto* without = new std::set<std::type_index>();
  const std::type_index type(typeid(work));
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    if (without->count(type) != 0) {
      return nullptr;
    }
  }
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    const std::lock_guard<std::mutex> lock(*mutex);
    without->insert(type);
    return nullptr;
  }
}

// An operation of a real communicator. Unless `by_future` (then a callback of the communicator's own thread counts the
// completion), it counts as completed when its end is first observed here, or when the handle is dropped.
class ShellWork : public c10d::Work {
 public:
  // `ended`: set by that callback, through the generation's Waiting; null without one.
  ShellWork(
      WorkPtr inner,
      std::shared_ptr<Epoch> epoch,
      std::string group,
      int rank,
      c10d::OpType op,
      std::shared_ptr<std::atomic<bool>> ended,
      const Operation& operation)
      : Work(rank, op),
        inner_(std::move(inner)),
        epoch_(std::move(epoch)),
        group_(std::move(group)),
        ended_(std::move(ended)),
        settled_(ended_ != nullptr),
        operation_(operation) {}
  ~ShellWork() override {
    settle();
  }
  bool isCompleted() override {
    const bool done = inner_->isCompleted();
    if (done) {
      settle();
    }
    return done;
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return inner_->result();
  }
  void synchronize() override {
    translated([&] { inner_->synchronize(); return true; });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return translated([&] {
      if (ended_ && timeout == kNoTimeout && !epoch_->waiting_threads.until([&] { return ended_->load(); })) {
        throw std::runtime_error("the operation was lost when its connection ended");
      }
      if (ended_) {
        return inner_->wait(timeout);
      }
      return is_point_to_point(retrieveOpType()) ? wait_inside(timeout) : wait_apart(timeout);
    });
  }
  void blockCurrentStream() override {
    inner_->blockCurrentStream();
  }
  void abort() override {
    inner_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return inner_->getFuture();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return inner_->getFutureResult();
  }
  float getDuration() const override {
    return inner_->getDuration();
  }
  uint64_t getSequencenumber() const override {
    return inner_->getSequencenumber();
  }

 private:
  static bool is_point_to_point(c10d::OpType op) {
    return op == c10d::OpType::SEND || op == c10d::OpType::RECV || op == c10d::OpType::RECVANYSOURCE;
  }
  // A composition that does its last part in the wait and cannot be ended early: it waits on a thread of its own, which
  // is left behind when the generation is abandoned.
  bool wait_apart(std::chrono::milliseconds timeout) {
    struct Outcome {
      bool done{false};
      bool good{false};
      std::exception_ptr error;
    };
    auto outcome = std::make_shared<Outcome>();
    ++epoch_->pending;
    std::thread([inner = inner_, epoch = epoch_, outcome, timeout, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      bool good = false;
      std::exception_ptr error;
      try {
        good = inner->wait(timeout);
      } catch (...) {
        error = std::current_exception();
      }
      --epoch->pending;
      epoch->waiting_threads.change([&] { *outcome = Outcome{true, good, error}; });
    }).detach();
    if (!epoch_->waiting_threads.until([&] { return outcome->done; })) {
      throw std::runtime_error("the operation was lost when its connection ended");
    }
    if (outcome->error) {
      std::rethrow_exception(outcome->error);
    }
    return outcome->good;
  }
  // A wait that only the handle itself can end early.
  bool wait_inside(std::chrono::milliseconds timeout) {
    if (!epoch_->waiting_threads.enter(inner_.get())) {
      throw std::runtime_error("the generation was abandoned");
    }
    bool good = false;
    try {
      good = inner_->wait(timeout);
    } catch (...) {
      epoch_->waiting_threads.leave(inner_.get());
      throw;
    }
    epoch_->waiting_threads.leave(inner_.get());
    if (!good && epoch_->fenced) {
      throw std::runtime_error("the operation was lost when its connection ended");
    }
    return good;
  }
  template <typename F>
  bool translated(F&& call) {
    const Blocked blocked(operation_);
    epoch_->waiting(+1);
    try {
      const bool result = call();
      epoch_->waiting(-1);
      settle();
      return result;
    } catch (...) {
      epoch_->waiting(-1);
      settle();
      rethrow_communication_error(*epoch_, group_, retrieveOpType());
    }
  }
  void settle() {
    if (!settled_.exchange(true)) {
      epoch_->completed();
    }
  }

  const WorkPtr inner_;
  const std::shared_ptr<Epoch> epoch_;
  const std::string group_;
  const std::shared_ptr<std::atomic<bool>> ended_;
  std::atomic<bool> settled_;
  const Operation operation_;
};

// The operations issued in one coalescing block of a communicator that does not coalesce itself.
class JointWork : public c10d::Work {
 public:
  JointWork(int rank, std::vector<WorkPtr> parts) : Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}
  bool isCompleted() override {
    bool done = true;
    for (const auto& part : parts_) {
      done = part->isCompleted() && done;
    }
    return done;
  }
  bool isSuccess() const override {
    bool good = true;
    for (const auto& part : parts_) {
      good = part->isSuccess() && good;
    }
    return good;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    bool good = true;
    for (const auto& part : parts_) {
      good = part->wait(timeout) && good;
    }
    return good;
  }
  void synchronize() override {
    for (const auto& part : parts_) {
      part->synchronize();
    }
  }

 private:
  const std::vector<WorkPtr> parts_;
};

} // namespace deadpool
