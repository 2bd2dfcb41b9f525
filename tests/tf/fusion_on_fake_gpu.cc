// TfmemFusion as it runs on a GPU.
#include "custom_ops/ops/fusion/gpu_run.h"
#include "fake_gpu_op.h"

namespace tfmem {
namespace {

REGISTER_KERNEL_BUILDER(Name("TfmemFusion").Device(tensorflow::DEVICE_CPU).Priority(1),
                        FakeGpuOp<GpuRegionRunner>);

}  // namespace
}  // namespace tfmem
