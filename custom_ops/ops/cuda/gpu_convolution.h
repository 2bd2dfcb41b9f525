// Convolutions of images and their gradients by cuDNN. Knows no TensorFlow.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/cudnn.h"
#include "custom_ops/ops/cuda/gpu_trial.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

enum class ConvolutionKind { kForward, kInputGradient, kFilterGradient };  // gives y, x, w

// y[n, p, k] = sum over r, c of x[n, stride p + dilation r - pad, c] w[r, c, k], in two dimensions,
// or one of its gradients. x and y lie with the channels last or first; w is [h, w, c / groups, k],
// as TensorFlow has it.
struct ConvolutionForm {
  ConvolutionKind kind = ConvolutionKind::kForward;
  cudnn::Type type = cudnn::kFloat;
  bool tf32 = false;  // whether float32 may be multiplied as TensorFloat-32
  bool channels_last = true;
  int64_t batch = 0;
  int64_t channels = 0;                // of x
  int64_t results = 0;                 // channels of y
  int64_t groups = 1;                  // of channels
  std::array<int64_t, 2> image = {};   // height and width of x
  std::array<int64_t, 2> result = {};  // of y
  std::array<int64_t, 2> filter = {};  // of w
  std::array<int64_t, 2> stride = {1, 1}, dilation = {1, 1};
  std::array<int64_t, 2> pad = {};  // on either side
};

class GpuConvolution {
 public:
  // `form` has no size of zero. By the deterministic algorithm that cuDNN expects to be the
  // fastest, or, if `timed`, by the fastest of several. An algorithm runs once in `trial`, if there
  // is memory for it: it may allocate at first, which no capture allows. That is done once in a
  // process for each form and device. Unimplemented if cuDNN has no algorithm for the form.
  static absl::StatusOr<std::unique_ptr<GpuConvolution>> Make(GpuLink* link,
                                                              const ConvolutionForm& form,
                                                              const GpuTrial& trial, bool timed);
  ~GpuConvolution();

  int64_t workspace_bytes() const { return filter_bytes_ + algorithm_.workspace_bytes; }

  // Addresses: x, w and y in that order without what it gives; what it gives; the workspace, a
  // multiple of kWorkspaceAlignment. Runs on `stream`, or is captured there.
  absl::Status Enqueue(cuda::Stream stream, absl::Span<const uint64_t> addresses) const;

  static constexpr uint64_t kWorkspaceAlignment = 256;

 private:
  GpuConvolution(const cudnn::Library& library, GpuLink* link, const ConvolutionForm& form)
      : library_(library), link_(link), form_(form) {}
  absl::Status Open();
  absl::Status Choose(const GpuTrial& trial, bool timed);
  // The best first: those that are deterministic and take no more workspace than is allowed.
  absl::StatusOr<std::vector<cudnn::Algorithm>> Algorithms() const;
  cudnn::Algorithm Fastest(const std::vector<cudnn::Algorithm>& algorithms, const GpuTrial& trial,
                           bool timed);
  absl::Status Run(cudnn::Handle handle, uint64_t x, uint64_t w, uint64_t y,
                   uint64_t workspace) const;
  absl::Status SetMath(int math) const;
  absl::Status SetImage(cudnn::Tensor tensor, int64_t channels,
                        const std::array<int64_t, 2>& sizes) const;
  absl::Status SetFilters();

  const cudnn::Library& library_;
  GpuLink* const link_;
  const ConvolutionForm form_;
  cudnn::Tensor x_ = nullptr, y_ = nullptr;
  // cuDNN wants all that one result is made of side by side: [k, h, w, c] or [k, c, h, w].
  cudnn::Tensor given_filter_ = nullptr, own_filter_ = nullptr;
  cudnn::Filter w_ = nullptr;
  cudnn::Convolution convolution_ = nullptr;
  cudnn::Algorithm algorithm_ = {};
  int64_t filter_bytes_ = 0;  // of the filter as cuDNN wants it, at the workspace's beginning
};

}  // namespace tfmem
