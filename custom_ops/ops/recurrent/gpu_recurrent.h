// TfmemRecurrent on a GPU, on the stream that the caller gives.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/recurrent/recurrent.h"
#include "custom_ops/ops/recurrent/recurrent_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

class GpuRecurrent {
 public:
  // Reads the attributes `programs` and `images`, of which there may be none.
  static absl::StatusOr<std::unique_ptr<GpuRecurrent>> Create(
      tensorflow::OpKernelConstruction* ctx);

  // Picks a program and enqueues it on `stream`, which has to be that of TensorFlow's device. Waits
  // for nothing, unless no program fits the GPU: then the CPU computes the results.
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  GpuRecurrent(std::string name, RecurrentAttributes attributes,
               std::vector<RecurrentKernels::Program> programs)
      : name_(std::move(name)), attributes_(std::move(attributes)), kernels_(std::move(programs)) {}
  absl::Status Enqueue(tensorflow::OpKernelContext* ctx, cuda::Stream stream,
                       const RecurrentKernel& kernel, const RecurrentCall& call,
                       bool fallback_only);
  absl::Status CheckAlignment(const RecurrentCall& call) const;
  absl::Status Zero(const RecurrentKernel& kernel, cuda::Stream stream, cuda::DevicePointer base,
                    bool fallback_only, int64_t scratch_bytes) const;
  void Report();

  const std::string name_;
  const RecurrentAttributes attributes_;
  RecurrentKernels kernels_;
  HostKernel host_{kOptimizeForThisGpu};
  StatusWatch watch_;
  std::atomic<bool> reported_{false};
};

}  // namespace tfmem
