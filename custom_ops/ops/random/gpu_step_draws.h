// TfmemStepDraws on a GPU: one kernel draws for all steps, from a table of what each step draws by.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/types.h"

namespace tfmem {

// What the kernel draws: these numbers lie in the GPU's memory. Keys, counters and unsigned numbers
// are the host's.
inline constexpr tensorflow::DataType kDrawnOnGpu[] = {
    tensorflow::DT_HALF,   tensorflow::DT_BFLOAT16, tensorflow::DT_FLOAT,
    tensorflow::DT_DOUBLE, tensorflow::DT_INT32,    tensorflow::DT_INT64};
inline constexpr tensorflow::DataType kDrawnOnHost[] = {tensorflow::DT_UINT32,
                                                        tensorflow::DT_UINT64};

// The inputs lie in host memory.
class GpuStepDraws {
 public:
  static absl::StatusOr<std::unique_ptr<GpuStepDraws>> Create(
      tensorflow::OpKernelConstruction* ctx);

  // Enqueues on `stream`, which has to be that of TensorFlow's device. The CPU draws what lies in
  // host memory, and everything if the GPU runs none of the programs.
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  struct Call;

  GpuStepDraws() = default;
  // The first program that the device runs. FailedPrecondition if it runs none.
  absl::StatusOr<const GpuKernel*> Load(GpuLink* link);
  absl::StatusOr<Call> Read(tensorflow::OpKernelContext* ctx) const;
  absl::Status ReadStep(tensorflow::OpKernelContext* ctx, int64_t step, uint64_t* row) const;
  absl::Status Check(tensorflow::OpKernelContext* ctx, int input, int64_t numbers) const;

  std::string name_;
  std::string op_;
  std::vector<bool> of_steps_;
  bool on_host_ = false;  // the outputs
  bool seeded_ = false;   // by a seed, which older ops take, in place of a key and a counter
  bool ranged_ = false;   // from a smallest number to a largest one
  HostKernel host_{kOptimizeForThisGpu};
  std::vector<KernelImage> images_;
  std::mutex mutex_;
  std::unique_ptr<GpuKernel> kernel_;
};

}  // namespace tfmem
