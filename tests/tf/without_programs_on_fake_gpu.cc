// The ops that have GPU programs, as they run on a GPU.
#include "custom_ops/ops/dynamic/gpu_run.h"
#include "custom_ops/ops/fusion/gpu_run.h"
#include "custom_ops/ops/matmul/gpu_matmul.h"
#include "custom_ops/ops/recurrent/gpu_recurrent.h"
#include "fake_gpu_op.h"

namespace tfmem {
namespace {

#define TFMEM_REGISTER(op, runner) \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_CPU).Priority(1), FakeGpuOp<runner>);
TFMEM_REGISTER("TfmemDynamic", GpuDynamic)
TFMEM_REGISTER("TfmemDynamicStep", GpuDynamicStep)
TFMEM_REGISTER("TfmemFusion", GpuRegionRunner)
TFMEM_REGISTER("TfmemMatMul", GpuMatMul)
TFMEM_REGISTER("TfmemRecurrent", GpuRecurrent)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
