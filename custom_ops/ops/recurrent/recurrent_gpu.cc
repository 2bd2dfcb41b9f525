// TfmemRecurrent on a GPU.
#include "custom_ops/ops/cuda/gpu_op_kernel.h"
#include "custom_ops/ops/recurrent/gpu_recurrent.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;

#define TFMEM_REGISTER(type)                                                                   \
  REGISTER_KERNEL_BUILDER(Name("TfmemRecurrent").Device(DEVICE_GPU).TypeConstraint<type>("T"), \
                          GpuOpKernel<GpuRecurrent>);
TFMEM_REGISTER(float)
TFMEM_REGISTER(Eigen::half)
TFMEM_REGISTER(Eigen::bfloat16)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
