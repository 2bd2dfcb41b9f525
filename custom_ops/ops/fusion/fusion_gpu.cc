// TfmemFusion on a GPU: enqueues its region. Waits for nothing.
#include <memory>

#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/fusion/fusion.h"
#include "custom_ops/ops/fusion/gpu_run.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

class GpuFusionOp : public OpKernel {
 public:
  explicit GpuFusionOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(std::unique_ptr<CompiledRegion> compiled, ctx, ReadFusionRegion(ctx));
    OP_REQUIRES_VALUE(runner_, ctx, GpuRegionRunner::Create(ctx, std::move(compiled)));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(cuda::Stream stream, ctx, ComputeStream(ctx));
    OP_REQUIRES_OK(ctx, runner_->Run(ctx, stream));
  }

 private:
  std::unique_ptr<GpuRegionRunner> runner_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemFusion").Device(DEVICE_GPU).HostMemory("variables"),
                        GpuFusionOp);

}  // namespace
}  // namespace tfmem
