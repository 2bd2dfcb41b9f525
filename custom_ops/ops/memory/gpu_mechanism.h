// How MemOps move tensors on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/memory/gpu_tickets.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tfmem {

// A kernel that needs its compute stream.
class StreamOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) final {
    OP_REQUIRES_VALUE(cuda::Stream compute, ctx, ComputeStream(ctx));
    Enqueue(ctx, compute);
  }

 protected:
  virtual void Enqueue(tensorflow::OpKernelContext* ctx, cuda::Stream compute) = 0;
};

// How an op moves tensors out, by its attributes.
class GpuMechanism {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);
  const std::string& label() const { return label_; }

  // Starts to move a tensor out.
  absl::StatusOr<std::shared_ptr<GpuTicket>> Start(const tensorflow::Tensor& source,
                                                   cuda::Stream compute) const;

 private:
  std::string label_;
  int64_t host_budget_ = 0;
  bool managed_ = false;
};

}  // namespace tfmem
