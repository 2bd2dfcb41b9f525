// The ops on a GPU: what describes a batch stays in host memory.
#include "custom_ops/ops/cuda/gpu_op_kernel.h"
#include "custom_ops/ops/dynamic/gpu_run.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;

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
    GpuOpKernel<GpuDynamic>);
REGISTER_KERNEL_BUILDER(Name("TfmemDynamicStep")
                            .Device(DEVICE_GPU)
                            .TypeConstraint<float>("T")
                            .HostMemory("variables")
                            .TFMEM_BATCH_IN_HOST_MEMORY.HostMemory("rates")
                            .HostMemory("number")
                            .HostMemory("done"),
                        GpuOpKernel<GpuDynamicStep>);

#undef TFMEM_BATCH_IN_HOST_MEMORY

}  // namespace
}  // namespace tfmem
