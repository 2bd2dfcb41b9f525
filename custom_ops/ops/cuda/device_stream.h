// What a kernel learns from TensorFlow's unstable parts: its CUDA stream, its allocator's chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/cuda_driver.h"

namespace tensorflow {
class OpKernelContext;
}

namespace tfmem {

// The stream on which TensorFlow runs the kernels of ctx's device.
absl::StatusOr<cuda::Stream> ComputeStream(tensorflow::OpKernelContext* ctx);

// A contiguous piece of a device's memory, free or given out as one.
struct Chunk {
  int64_t address;
  int64_t bytes;
  bool in_use;
};

// All chunks of the allocator of ctx's device, by address; none if it is not TensorFlow's own for
// GPUs.
std::vector<Chunk> AllocatorChunks(tensorflow::OpKernelContext* ctx);

}  // namespace tfmem
