// What calls of cuDNN share: its handle, and how images lie.
#pragma once

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "custom_ops/ops/cuda/cudnn.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

// Calls `use` with the handle of the link's context, which is current. A handle serves one thread
// at a time.
absl::Status WithCudnnHandle(const cudnn::Library& library, GpuLink* link,
                             absl::FunctionRef<absl::Status(cudnn::Handle)> use);

// Sets a descriptor to images [batch, h, w, channels], or to [batch, channels, h, w].
absl::Status SetImages(const cudnn::Library& library, cudnn::Tensor tensor, cudnn::Type type,
                       bool channels_last, int64_t batch, int64_t channels,
                       const std::array<int64_t, 2>& sizes);

int64_t BytesOf(cudnn::Type type);

// One and zero, as cuDNN reads them for a type.
struct CudnnScale {
  explicit CudnnScale(cudnn::Type type) : wide(type == cudnn::kDouble) {}
  const void* one() const { return wide ? static_cast<const void*>(&wide_one) : &narrow_one; }
  const void* zero() const { return wide ? static_cast<const void*>(&wide_zero) : &narrow_zero; }

  const bool wide;
  const double wide_one = 1, wide_zero = 0;
  const float narrow_one = 1, narrow_zero = 0;
};

}  // namespace tfmem
