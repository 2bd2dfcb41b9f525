// The maximum or the average of windows of images, and its gradient, by cuDNN. Knows no TensorFlow.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/cudnn.h"
#include "custom_ops/ops/cuda/gpu_trial.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

// y[n, p, c] = max over r of x[n, stride p + r - pad, c], in two dimensions, or the average of
// those that lie in the image; or the gradient, which gives what y has of it to the element of x
// that is the maximum, or to all of the window. x and y lie with the channels last or first. A
// window may end behind the image.
struct PoolingForm {
  bool average = false;
  bool gradient = false;
  bool propagates_nan = false;
  cudnn::Type type = cudnn::kFloat;
  bool channels_last = true;
  int64_t batch = 0;
  int64_t channels = 0;
  std::array<int64_t, 2> image = {};   // height and width of x
  std::array<int64_t, 2> result = {};  // of y
  std::array<int64_t, 2> window = {1, 1}, stride = {1, 1};
  std::array<int64_t, 2> pad = {};  // before the image
};

class GpuPooling {
 public:
  // `form` has no size of zero. It runs once in `trial`, if there is memory for it: cuDNN may
  // allocate at first, which no capture allows.
  static absl::StatusOr<std::unique_ptr<GpuPooling>> Make(GpuLink* link, const PoolingForm& form,
                                                          const GpuTrial& trial);
  ~GpuPooling();

  // Addresses: x and y, or, of a gradient, x, y, what y has of it, and what x gets, without x and y
  // of an average. Runs on `stream`, or is captured there. Equal from run to run.
  absl::Status Enqueue(cuda::Stream stream, absl::Span<const uint64_t> addresses) const;

 private:
  GpuPooling(const cudnn::Library& library, GpuLink* link, const PoolingForm& form)
      : library_(library), link_(link), form_(form) {}
  absl::Status Open();
  absl::Status Try(const GpuTrial& trial) const;

  const cudnn::Library& library_;
  GpuLink* const link_;
  const PoolingForm form_;
  cudnn::Tensor x_ = nullptr, y_ = nullptr;
  cudnn::Pooling pooling_ = nullptr;
};

}  // namespace tfmem
