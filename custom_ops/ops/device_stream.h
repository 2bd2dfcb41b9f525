// The way from a kernel to its CUDA stream.
#ifndef TFMEM_CUSTOM_OPS_OPS_DEVICE_STREAM_H_
#define TFMEM_CUSTOM_OPS_OPS_DEVICE_STREAM_H_

#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda_driver.h"

namespace tensorflow {
class OpKernelContext;
}

namespace tfmem {

// The stream on which TensorFlow runs the kernels of ctx's device.
absl::StatusOr<cuda::Stream> ComputeStream(tensorflow::OpKernelContext* ctx);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_DEVICE_STREAM_H_
