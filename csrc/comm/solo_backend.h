// A communicator without peers: answers a listed set of collectives as if every peer held what this rank holds.
//
// A newcomer constructs its model alone through upstream's set-up with this inside its groups, and everything it obtains
// this way is overwritten by the restore. Groups of one member use it for good: then it is exact. Point-to-point has no
// such answer and is refused, as is everything not listed here.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "works.h"

namespace deadpool {

class SoloBackend : public c10d::Backend {
 public:
  SoloBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override {
    return "deadpool-solo";
  }
  void setTimeout(std::chrono::milliseconds /*timeout*/) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return operations_;
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& /*opts*/) override {
    return done(c10d::OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    reduce_all(tensors, opts.reduceOp);
    return done(c10d::OpType::ALLREDUCE, tensors);
  }
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    reduce_all(tensors, opts.reduceOp);
    return done(c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override {
    if (opts.rootRank == rank_) {
      reduce_all(tensors, opts.reduceOp);
    }
    return done(c10d::OpType::REDUCE, tensors);
  }
  WorkPtr allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& /*opts*/) override {
    same_count(outputs.size(), inputs.size(), "allgather");
    for (size_t i = 0; i < inputs.size(); ++i) {
      copy_to_all(outputs[i], inputs[i]);
    }
    return done(c10d::OpType::ALLGATHER, flat(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*opts*/) override {
    fill(output, input);
    return done(c10d::OpType::_ALLGATHER_BASE, {output});
  }
  WorkPtr allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& /*opts*/) override {
    // One list per member, each with one tensor per input.
    for (auto& list : outputs) {
      same_count(list.size(), inputs.size(), "allgather_coalesced");
      for (size_t i = 0; i < inputs.size(); ++i) {
        copy(list[i], inputs[i]);
      }
    }
    return done(c10d::OpType::ALLGATHER_COALESCED, flat(outputs));
  }
  WorkPtr allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& /*opts*/) override {
    same_count(outputs.size(), inputs.size(), "allgather_into_tensor_coalesced");
    for (size_t i = 0; i < inputs.size(); ++i) {
      fill(outputs[i], inputs[i]);
    }
    return done(c10d::OpType::COALESCED, outputs);
  }
  WorkPtr gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& opts) override {
    if (opts.rootRank == rank_) {
      same_count(outputs.size(), inputs.size(), "gather");
      copy_to_all(outputs.at(0), inputs.at(0));
    }
    return done(c10d::OpType::GATHER, flat(outputs));
  }
  WorkPtr scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& opts) override {
    if (opts.rootRank == rank_) { // elsewhere the output keeps its value, like a broadcast's
      copy(outputs.at(0), inputs.at(0).at(rank_));
    }
    return done(c10d::OpType::SCATTER, outputs);
  }
  WorkPtr reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    same_count(outputs.size(), inputs.size(), "reduce_scatter");
    for (size_t i = 0; i < outputs.size(); ++i) {
      copy(outputs[i], inputs[i].at(rank_));
    }
    reduce_all(outputs, opts.reduceOp);
    return done(c10d::OpType::REDUCE_SCATTER, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    take_part(output, input, opts.reduceOp);
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    same_count(outputs.size(), inputs.size(), "reduce_scatter_tensor_coalesced");
    for (size_t i = 0; i < outputs.size(); ++i) {
      take_part(outputs[i], inputs[i], opts.reduceOp);
    }
    return done(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs);
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& /*opts*/) override {
    // Every peer holds the same input and the same splits, so all of them send what this rank would send to itself.
    c10d::checkSplitSizes(input_splits, input, size_);
    c10d::checkSplitSizes(output_splits, output, size_);
    const int64_t own = input_splits.empty() ? input.size(0) / size_ : input_splits[rank_];
    const int64_t start = input_splits.empty() ? own * rank_ : sum(input_splits, rank_);
    const auto part = input.narrow(0, start, own);
    int64_t offset = 0;
    for (int peer = 0; peer < size_; ++peer) {
      const int64_t length = output_splits.empty() ? output.size(0) / size_ : output_splits[peer];
      const int64_t usable = std::min(length, own); // where the splits contradict the premise the rest keeps its value
      copy(output.narrow(0, offset, usable), part.narrow(0, 0, usable));
      offset += length;
    }
    return done(c10d::OpType::ALLTOALL_BASE, {output});
  }
  WorkPtr alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& /*opts*/) override {
    for (auto& output : outputs) {
      if (output.numel() == inputs.at(rank_).numel()) {
        copy(output.view_as(inputs[rank_]), inputs[rank_]);
      }
    }
    return done(c10d::OpType::ALLTOALL, outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions& /*opts*/) override {
    return done(c10d::OpType::BARRIER, {});
  }
  void monitoredBarrier(const c10d::BarrierOptions& /*opts*/, bool /*wait_all_ranks*/) override {
    ++operations_;
  }

  WorkPtr send(std::vector<at::Tensor>& /*tensors*/, int peer, int /*tag*/) override {
    refuse(c10::str("send to rank ", peer));
  }
  WorkPtr recv(std::vector<at::Tensor>& /*tensors*/, int peer, int /*tag*/) override {
    refuse(c10::str("receive from rank ", peer));
  }
  WorkPtr recvAnysource(std::vector<at::Tensor>& /*tensors*/, int /*tag*/) override {
    refuse("receive from any rank");
  }
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& /*tensors*/, const c10d::AllreduceOptions& /*opts*/) override {
    refuse("sparse allreduce");
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    C10_THROW_ERROR(
        NotImplementedError,
        c10::str("deadpool: ", what, " in group '", getGroupUid(), "' of ", size_, " has no answer without peers"));
  }
  WorkPtr done(c10d::OpType op, std::vector<at::Tensor> outputs) {
    ++operations_;
    return c10::make_intrusive<CompletedWork>(rank_, op, std::move(outputs));
  }
  static void same_count(size_t outputs, size_t inputs, const char* what) {
    TORCH_CHECK_VALUE(outputs == inputs, what, ": ", outputs, " outputs for ", inputs, " inputs");
  }
  // Real communicators write behind autograd's back; so does this.
  static void copy(const at::Tensor& to, const at::Tensor& from) {
    const at::AutoDispatchBelowAutograd below;
    to.copy_(from);
  }
  static void copy_to_all(std::vector<at::Tensor>& outputs, const at::Tensor& input) {
    for (auto& output : outputs) {
      copy(output, input);
    }
  }
  void fill(at::Tensor& output, const at::Tensor& input) const {
    TORCH_CHECK_VALUE(
        output.numel() == input.numel() * size_, "all-gather of ", input.numel(), " x ", size_, " into ", output.numel());
    const at::AutoDispatchBelowAutograd below;
    output.view({size_, input.numel()}).copy_(input.reshape({1, input.numel()}).expand({size_, input.numel()}));
  }
  void take_part(at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const {
    TORCH_CHECK_VALUE(
        input.numel() == output.numel() * size_, "reduce-scatter of ", input.numel(), " into ", size_, " x ", output.numel());
    {
      const at::AutoDispatchBelowAutograd below;
      output.copy_(input.reshape({size_, output.numel()}).select(0, rank_).view_as(output));
    }
    std::vector<at::Tensor> outputs{output};
    reduce_all(outputs, op);
  }
  // The reduction of `size_` equal values, in place.
  void reduce_all(std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) const {
    if (size_ == 1) {
      return;
    }
    const at::AutoDispatchBelowAutograd below;
    for (auto& tensor : tensors) {
      switch (op.op_) {
        case c10d::ReduceOp::SUM:
          if (tensor.scalar_type() != at::kBool) {
            tensor.mul_(size_);
          }
          break;
        case c10d::ReduceOp::PRODUCT:
          tensor.pow_(size_);
          break;
        case c10d::ReduceOp::AVG:
        case c10d::ReduceOp::MIN:
        case c10d::ReduceOp::MAX:
        case c10d::ReduceOp::BAND:
        case c10d::ReduceOp::BOR:
          break;
        case c10d::ReduceOp::BXOR:
          if (size_ % 2 == 0) {
            tensor.zero_();
          }
          break;
        default:
          refuse("this reduction");
      }
    }
  }
  static std::vector<at::Tensor> flat(const std::vector<std::vector<at::Tensor>>& lists) {
    std::vector<at::Tensor> all;
    for (const auto& list : lists) {
      all.insert(all.end(), list.begin(), list.end());
    }
    return all;
  }
  static int64_t sum(const std::vector<int64_t>& values, int count) {
    int64_t total = 0;
    for (int i = 0; i < count; ++i) {
      total += values[i];
    }
    return total;
  }

  std::atomic<uint64_t> operations_{0};
};

} // namespace deadpool
