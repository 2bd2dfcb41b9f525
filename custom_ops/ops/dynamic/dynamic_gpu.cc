// The ops on a GPU: what describes a batch stays in host memory.
#include <memory>

#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/dynamic/gpu_run.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

template <class Runner>
class GpuDynamicOp : public OpKernel {
 public:
  explicit GpuDynamicOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(runner_, ctx, Runner::Create(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(cuda::Stream stream, ctx, ComputeStream(ctx));
    OP_REQUIRES_OK(ctx, runner_->Run(ctx, stream));
  }

 private:
  std::unique_ptr<Runner> runner_;
};

#define TFMEM_BATCH_IN_HOST_MEMORY   \
  HostMemory("kinds")                \
      .HostMemory("kind_splits")     \
      .HostMemory("children")        \
      .HostMemory("child_splits")    \
      .HostMemory("arguments")       \
      .HostMemory("argument_splits") \
      .HostMemory("seed")

REGISTER_KERNEL_BUILDER(
    Name("TfmemDynamic").Device(DEVICE_GPU).TypeConstraint<float>("T").TFMEM_BATCH_IN_HOST_MEMORY,
    GpuDynamicOp<GpuDynamic>);
REGISTER_KERNEL_BUILDER(Name("TfmemDynamicStep")
                            .Device(DEVICE_GPU)
                            .TypeConstraint<float>("T")
                            .HostMemory("variables")
                            .TFMEM_BATCH_IN_HOST_MEMORY.HostMemory("rates")
                            .HostMemory("number")
                            .HostMemory("done"),
                        GpuDynamicOp<GpuDynamicStep>);

#undef TFMEM_BATCH_IN_HOST_MEMORY

}  // namespace
}  // namespace tfmem
