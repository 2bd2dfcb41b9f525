// TfmemFusion on a GPU.
#include "custom_ops/ops/cuda/gpu_op_kernel.h"
#include "custom_ops/ops/fusion/gpu_run.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;

REGISTER_KERNEL_BUILDER(Name("TfmemFusion").Device(DEVICE_GPU).HostMemory("variables"),
                        GpuOpKernel<GpuRegionRunner>);

}  // namespace
}  // namespace tfmem
