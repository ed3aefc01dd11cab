// The backend that a process group keeps for the whole job: c10d's interface in front of a replaceable communicator.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "replaceable.h"

namespace deadpool {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

class ShellBackend : public Replaceable {
 public:
  using Replaceable::Replaceable;

  const std::string getBackendName() const override {
    return "deadpool";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  bool supportsCoalescing() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return (inner_[0] && inner_[0]->supportsCoalescing()) || (inner_[1] && inner_[1]->supportsCoalescing());
  }
  bool supportsTimeEstimation() const override {
    const auto inner = primary();
    return inner && inner->supportsTimeEstimation();
  }
  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    const auto inner = primary();
    return inner && inner->supportsTensorAlloc(index);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& inner : inner_) {
      if (inner) {
        inner->setTimeout(timeout);
      }
    }
  }
  std::chrono::milliseconds timeout() const {
    return options_->timeout;
  }
  void setGroupUid(const std::string& uid) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    pg_uid_ = uid;
    for (const auto& inner : inner_) {
      if (inner) {
        inner->setGroupUid(uid);
      }
    }
  }
  void setSequenceNumberForGroup() override {} // nothing may communicate while a group is made
  uint64_t getSequenceNumberForGroup() override {
    return ask(std::nullopt, [](Backend& b) { return b.getSequenceNumberForGroup(); });
  }
  void eagerConnectSingleDevice(at::Device device) override {
    ask(device.type(), [&](Backend& b) { b.eagerConnectSingleDevice(device); });
  }
  c10d::ErrorType getError() override {
    return ask(std::nullopt, [](Backend& b) { return b.getError(); });
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return ask(std::nullopt, [](Backend& b) { return b.getMemAllocator(); });
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return ask(options.device().type(), [&](Backend& b) { return b.allocateTensor(size, options); });
  }
  void enableCollectivesTiming() override {
    ask(std::nullopt, [](Backend& b) { b.enableCollectivesTiming(); });
  }
  // c10d's own abort of this group alone: refuse what comes, end what runs where the communicator can.
  void abort() override {
    const auto [cpu, cuda] = fence_and_copy();
    if (cpu) {
      cpu->abort();
    }
    if (cuda) {
      cuda->abort();
    }
  }
  // The group is being destroyed by its owner: no operation any more, and the registry forgets it.
  void shutdown() override {
    closed_ = true;
    release();
  }

  void startCoalescing() override {
    enter(std::nullopt); // refuses when fenced
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!coalescing_, "group '", pg_uid_, "' is coalescing already");
    coalescing_.emplace();
  }
  WorkPtr endCoalescing() override {
    std::optional<Coalescing> block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      block = std::move(coalescing_);
      coalescing_.reset();
    }
    TORCH_CHECK(block, "group '", pg_uid_, "' was not coalescing, or its communicator was replaced meanwhile");
    if (block->native) {
      return issue(
          OpType::COALESCED,
          block->device,
          [](Backend& b) { return b.endCoalescing(); },
          Needs{!block->point_to_point, -1}); // members differ in the latter
    }
    return c10::make_intrusive<JointWork>(rank_, std::move(block->works));
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return issue(OpType::BROADCAST, device(t), [&](Backend& b) { return b.broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return issue(OpType::ALLREDUCE, device(t), [&](Backend& b) { return b.allreduce(t, o); });
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return issue(OpType::_ALLREDUCE_SPARSE, device(t), [&](Backend& b) { return b.allreduce_sparse(t, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return issue(OpType::ALLREDUCE_COALESCED, device(t), [&](Backend& b) { return b.allreduce_coalesced(t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return issue(OpType::REDUCE, device(t), [&](Backend& b) { return b.reduce(t, o); });
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return issue(OpType::ALLGATHER, device(in), [&](Backend& b) { return b.allgather(out, in, o); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return issue(OpType::_ALLGATHER_BASE, in.device().type(), [&](Backend& b) { return b._allgather_base(out, in, o); });
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return issue(
        OpType::ALLGATHER_COALESCED, device(in), [&](Backend& b) { return b.allgather_coalesced(out, in, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return issue(
        OpType::COALESCED, device(in), [&](Backend& b) { return b.allgather_into_tensor_coalesced(out, in, o); });
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return issue(OpType::GATHER, device(in), [&](Backend& b) { return b.gather(out, in, o); });
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return issue(OpType::SCATTER, device(out), [&](Backend& b) { return b.scatter(out, in, o); });
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return issue(OpType::REDUCE_SCATTER, device(out), [&](Backend& b) { return b.reduce_scatter(out, in, o); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return issue(OpType::_REDUCE_SCATTER_BASE, in.device().type(), [&](Backend& b) {
      return b._reduce_scatter_base(out, in, o);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return issue(OpType::REDUCE_SCATTER_TENSOR_COALESCED, device(in), [&](Backend& b) {
      return b.reduce_scatter_tensor_coalesced(out, in, o);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& o) override {
    return issue(OpType::ALLTOALL_BASE, in.device().type(), [&](Backend& b) {
      return b.alltoall_base(out, in, out_splits, in_splits, o);
    });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return issue(OpType::ALLTOALL, device(in), [&](Backend& b) { return b.alltoall(out, in, o); });
  }
  WorkPtr send(Tensors& t, int peer, int tag) override {
    return issue(OpType::SEND, device(t), [&](Backend& b) { return b.send(t, peer, tag); }, Needs{false, peer});
  }
  WorkPtr recv(Tensors& t, int peer, int tag) override {
    return issue(OpType::RECV, device(t), [&](Backend& b) { return b.recv(t, peer, tag); }, Needs{false, peer});
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return issue(OpType::RECVANYSOURCE, device(t), [&](Backend& b) { return b.recvAnysource(t, tag); }, Needs{false, -1});
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    std::optional<c10::DeviceType> type;
    if (o.device) {
      type = o.device->type();
    } else if (!o.device_ids.empty() || bound_device_id_) {
      type = c10::kCUDA;
    }
    return issue(OpType::BARRIER, type, [&](Backend& b) { return b.barrier(o); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    const auto call = enter(c10::kCPU);
    const auto operation = count(*call.epoch, OpType::BARRIER, true, -1);
    try {
      const Blocked blocked(operation);
      call.inner->monitoredBarrier(o, wait_all_ranks);
    } catch (...) {
      call.epoch->completed();
      rethrow_communication_error(*call.epoch, pg_uid_, OpType::BARRIER);
    }
    call.epoch->completed();
  }

 private:
  static std::optional<c10::DeviceType> device(const Tensors& tensors) {
    return tensors.empty() ? std::nullopt : std::make_optional(tensors.front().device().type());
  }
};

} // namespace deadpool
