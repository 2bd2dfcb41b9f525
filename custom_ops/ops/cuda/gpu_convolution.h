// Convolutions of images and their gradients by cuDNN. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/convolution_plans.h"
#include "custom_ops/ops/cuda/cudnn.h"
#include "custom_ops/ops/cuda/gpu_trial.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

class GpuConvolution {
 public:
  // `form` has no size of zero. By the deterministic plan that cuDNN expects to be the fastest, or,
  // if `timed`, by the fastest of several. A plan runs once in `trial`, if there is memory for it:
  // it may allocate at first, which no capture allows. That is done once in a process for each form
  // and device; batches of other sizes run by the engine that was the fastest for the first.
  // Unimplemented if cuDNN has no plan for the form.
  static absl::StatusOr<std::unique_ptr<GpuConvolution>> Make(GpuLink* link,
                                                              const ConvolutionForm& form,
                                                              const GpuTrial& trial, bool timed);
  ~GpuConvolution();

  int64_t workspace_bytes() const { return filter_bytes_ + plan_->workspace_bytes(); }

  // Addresses: x, w and y in that order without what it gives; what it gives; the workspace, a
  // multiple of kWorkspaceAlignment. Runs on `stream`, or is captured there.
  absl::Status Enqueue(cuda::Stream stream, absl::Span<const uint64_t> addresses) const;

  static constexpr uint64_t kWorkspaceAlignment = 256;

 private:
  GpuConvolution(const cudnn::Library& library, GpuLink* link, const ConvolutionForm& form)
      : library_(library), link_(link), form_(form) {}
  struct Choice {
    std::shared_ptr<const ConvolutionPlan> plan;
    bool timed;
  };
  absl::Status Open();
  absl::Status Choose(const GpuTrial& trial, bool timed);
  // The first plan that runs, those of `engine` first, or, if `timed`, the fastest of those that
  // were timed; an untried one if there is no memory to try it.
  absl::StatusOr<Choice> Fastest(const GpuTrial& trial, bool timed, std::optional<int64_t> engine);
  // Milliseconds of `plan_`, 0 if it is not `timed`. ResourceExhausted if there is no memory.
  absl::StatusOr<float> Try(const GpuTrial& trial, bool timed) const;
  absl::Status WithHandle(absl::FunctionRef<absl::Status(cudnn::Handle)> use) const;
  absl::Status Run(cudnn::Handle handle, uint64_t x, uint64_t w, uint64_t y,
                   uint64_t workspace) const;

  const cudnn::Library& library_;
  GpuLink* const link_;
  const ConvolutionForm form_;
  // cuDNN wants all that one result is made of side by side: [k, h, w, c] or [k, c, h, w].
  cudnn::Tensor given_filter_ = nullptr, own_filter_ = nullptr;
  std::shared_ptr<const ConvolutionPlan> plan_;
  int64_t filter_bytes_ = 0;  // of the filter as cuDNN wants it, at the workspace's beginning
};

}  // namespace tfmem
