// TfmemMatMul on a GPU: cuts the operands into pairs of float16 and multiplies those.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/matmul/matmul.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

class GpuMatMul {
 public:
  // Reads the attributes `programs` and `images`: three programs, or none.
  static absl::StatusOr<std::unique_ptr<GpuMatMul>> Create(tensorflow::OpKernelConstruction* ctx);

  // Enqueues on `stream`, which has to be that of TensorFlow's device. Waits for nothing, unless
  // the GPU does not run the programs: then the CPU multiplies.
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  enum { kSplit, kLarge, kSmall };

  GpuMatMul() = default;
  absl::Status Load(GpuLink* link);
  absl::Status Enqueue(tensorflow::OpKernelContext* ctx, cuda::Stream stream,
                       const MatMulCall& call) const;

  static constexpr char kOptimizeHere[] = "run tfmem.optimize on the machine with this GPU";

  std::string name_;
  bool transpose_left_ = false;
  bool transpose_right_ = false;
  bool has_programs_ = false;
  HostKernel host_{kOptimizeHere};
  std::array<KernelImage, 3> images_;
  std::mutex mutex_;
  std::array<std::unique_ptr<GpuKernel>, 3> kernels_;
};

}  // namespace tfmem
