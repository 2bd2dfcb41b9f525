// TfmemRecurrent on the CPU.
#include <type_traits>
#include <utility>

#include "custom_ops/ops/cpu/phases.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/recurrent/recurrent_run.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/threadpool.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

template <typename T>
class RecurrentOp : public OpKernel {
 public:
  explicit RecurrentOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(attributes_, ctx, ReadRecurrentAttributes(ctx));
    program_ = CompileStep(attributes_.cell,
                           std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32);
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(RecurrentCall call, ctx, PrepareRecurrentCall(ctx, attributes_));
    if (call.batch == 0) return;
    const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
    RecurrentRun<T> run(attributes_, program_, call, ChosenKernels(), workers.num_threads);
    Tensor workspace;
    tensorflow::TensorShape shape;
    OP_REQUIRES_OK(ctx, BuildShape({run.workspace.bytes()}, &shape));
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_UINT8, shape, &workspace));
    run.workspace.Set(workspace.data());
    RunPhases(
        run.phases(), run.cut.shares(), run.cut.threads,
        [pool = workers.workers](std::function<void()> closure) {
          pool->Schedule(std::move(closure));
        },
        [&run](int64_t phase, int share) { run.Work(phase, share); });
  }

 private:
  RecurrentAttributes attributes_;
  StepProgram program_;
};

#define TFMEM_REGISTER(type)                                                                       \
  REGISTER_KERNEL_BUILDER(Name("TfmemRecurrent").Device(DEVICE_CPU).TypeConstraint<type>("T"),     \
                          RecurrentOp<type>);                                                      \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("TfmemRecurrent").Device(DEVICE_CPU).Label(kHostKernelLabel).TypeConstraint<type>("T"), \
      RecurrentOp<type>);
TFMEM_REGISTER(float)
TFMEM_REGISTER(double)
TFMEM_REGISTER(Eigen::half)
TFMEM_REGISTER(Eigen::bfloat16)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
