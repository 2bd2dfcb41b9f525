// TfmemStepDraws on a GPU.
#include "custom_ops/ops/cuda/gpu_op_kernel.h"
#include "custom_ops/ops/random/gpu_step_draws.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;

REGISTER_KERNEL_BUILDER(Name("TfmemStepDraws")
                            .Device(DEVICE_GPU)
                            .HostMemory("inputs")
                            .TypeConstraint("Tout", kDrawnOnGpu),
                        GpuOpKernel<GpuStepDraws>);
REGISTER_KERNEL_BUILDER(Name("TfmemStepDraws")
                            .Device(DEVICE_GPU)
                            .HostMemory("inputs")
                            .HostMemory("outputs")
                            .TypeConstraint("Tout", kDrawnOnHost),
                        GpuOpKernel<GpuStepDraws>);

}  // namespace
}  // namespace tfmem
