// The kernel of an op on a GPU whose work is done by a class that is given the stream.
#pragma once

#include <memory>

#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// `Runner` has Create(OpKernelConstruction*) and Run(OpKernelContext*, cuda::Stream).
template <class Runner>
class GpuOpKernel : public tensorflow::OpKernel {
 public:
  explicit GpuOpKernel(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(runner_, ctx, Runner::Create(ctx));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(cuda::Stream stream, ctx, ComputeStream(ctx));
    OP_REQUIRES_OK(ctx, runner_->Run(ctx, stream));
  }

 private:
  std::unique_ptr<Runner> runner_;
};

}  // namespace tfmem
