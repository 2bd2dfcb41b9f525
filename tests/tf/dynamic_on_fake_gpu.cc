// TfmemDynamic and TfmemDynamicStep as they run on a GPU.
#include "custom_ops/ops/dynamic/gpu_run.h"
#include "fake_gpu_op.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_CPU;

REGISTER_KERNEL_BUILDER(Name("TfmemDynamic").Device(DEVICE_CPU).Priority(1), FakeGpuOp<GpuDynamic>);
REGISTER_KERNEL_BUILDER(Name("TfmemDynamicStep").Device(DEVICE_CPU).Priority(1),
                        FakeGpuOp<GpuDynamicStep>);

}  // namespace
}  // namespace tfmem
