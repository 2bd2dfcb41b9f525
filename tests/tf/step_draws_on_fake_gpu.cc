// TfmemStepDraws as it runs on a GPU.
#include "custom_ops/ops/random/gpu_step_draws.h"
#include "fake_gpu_op.h"

namespace tfmem {
namespace {

REGISTER_KERNEL_BUILDER(
    Name("TfmemStepDraws").Device(tensorflow::DEVICE_CPU).HostMemory("inputs").Priority(1),
    FakeGpuOp<GpuStepDraws>);

}  // namespace
}  // namespace tfmem
