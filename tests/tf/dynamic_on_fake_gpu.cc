// TfmemDynamic and TfmemDynamicStep as they run on a GPU, for nodes on the CPU: device memory is
// the host's, and the device is the fake driver's. Its stream runs before anybody can look.
#include <memory>
#include <mutex>

#include "custom_ops/ops/dynamic/gpu_run.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

template <class Runner>
class FakeGpuOp : public OpKernel {
 public:
  explicit FakeGpuOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(runner_, ctx, Runner::Create(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    absl::StatusOr<const cuda::Driver*> driver = cuda::LoadDriver();
    OP_REQUIRES_OK(ctx, driver.status());
    cuda::Context context = nullptr;
    static std::mutex* mutex = new std::mutex;
    static cuda::Stream stream = nullptr;
    {
      std::lock_guard<std::mutex> lock(*mutex);
      OP_REQUIRES_OK(ctx, cuda::Check((*driver)->cuDevicePrimaryCtxRetain(&context, 0), "retain"));
      if (stream == nullptr) (*driver)->cuStreamCreate(&stream, 0);
    }
    const absl::Status status = runner_->Run(ctx, stream);
    OP_REQUIRES_OK(ctx, cuda::Check((*driver)->cuStreamSynchronize(stream), "synchronize"));
    OP_REQUIRES_OK(ctx, status);
  }

 private:
  std::unique_ptr<Runner> runner_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemDynamic").Device(DEVICE_CPU).Priority(1), FakeGpuOp<GpuDynamic>);
REGISTER_KERNEL_BUILDER(Name("TfmemDynamicStep").Device(DEVICE_CPU).Priority(1),
                        FakeGpuOp<GpuDynamicStep>);

}  // namespace
}  // namespace tfmem
