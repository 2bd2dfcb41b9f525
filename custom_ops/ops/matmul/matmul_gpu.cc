// TfmemMatMul on a GPU.
#include "custom_ops/ops/cuda/gpu_op_kernel.h"
#include "custom_ops/ops/matmul/gpu_matmul.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;

REGISTER_KERNEL_BUILDER(Name("TfmemMatMul").Device(DEVICE_GPU), GpuOpKernel<GpuMatMul>);

}  // namespace
}  // namespace tfmem
