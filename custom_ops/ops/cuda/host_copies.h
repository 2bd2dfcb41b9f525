// Tensors of a GPU copied to host memory and back, in the order of a stream.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/memory/gpu_link.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// One kernel's copies. Both ends of a copy stay until it is done.
class HostCopies {
 public:
  HostCopies(tensorflow::OpKernelContext* ctx, GpuLink* link, cuda::Stream stream)
      : ctx_(ctx), link_(link), stream_(stream) {}
  // Waits for copies that `Wait` has not waited for.
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Enqueues a copy into new host memory, which has the values once `Wait` has returned.
  absl::StatusOr<tensorflow::Tensor> ToHost(const tensorflow::Tensor& tensor);
  // Enqueues a copy to a tensor of the GPU that has the same size.
  absl::Status ToDevice(const tensorflow::Tensor& tensor, const tensorflow::Tensor& to);
  // The host waits until the stream is through.
  absl::Status Wait();

 private:
  tensorflow::OpKernelContext* const ctx_;
  GpuLink* const link_;
  const cuda::Stream stream_;
  std::vector<tensorflow::Tensor> held_;
};

}  // namespace tfmem
