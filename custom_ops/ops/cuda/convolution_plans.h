// How cuDNN may compute a convolution: the plans of its graph API. Knows no TensorFlow.
//
// The older API, which takes an algorithm's number, lacks engines: for depthwise convolutions with
// the channels last, those that take a tenth of the time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/cudnn.h"
#include "custom_ops/ops/cuda/cudnn_graph.h"

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

// A convolution as cuDNN knows it, and the descriptors that it refers to. cuDNN wants the filter as
// [k, h, w, c] or as [k, c, h, w].
struct ConvolutionGraph {
  CudnnDescriptor x, w, y, convolution, operation, graph;
};

class ConvolutionPlan {
 public:
  int64_t workspace_bytes() const { return workspace_bytes_; }
  int64_t engine() const { return engine_; }  // its number, which means the same for all forms

  // Runs on the handle's stream; addresses of x, w, y and the workspace.
  absl::Status Run(cudnn::Handle handle, uint64_t x, uint64_t w, uint64_t y,
                   uint64_t workspace) const;

 private:
  friend class ConvolutionPlans;
  ConvolutionPlan(const cudnn::Library& library, std::shared_ptr<const ConvolutionGraph> graph,
                  CudnnDescriptor config, CudnnDescriptor plan, int64_t workspace_bytes,
                  int64_t engine)
      : library_(library),
        graph_(std::move(graph)),
        config_(std::move(config)),
        plan_(std::move(plan)),
        workspace_bytes_(workspace_bytes),
        engine_(engine) {}

  const cudnn::Library& library_;
  const std::shared_ptr<const ConvolutionGraph> graph_;
  const CudnnDescriptor config_, plan_;
  const int64_t workspace_bytes_, engine_;
};

// The plans for a form, the one first that cuDNN expects to be the fastest. All are deterministic,
// sum in float32 or wider, and round no factors that may not be rounded.
class ConvolutionPlans {
 public:
  // `handle` is used by no other thread, here and in Next.
  static absl::StatusOr<ConvolutionPlans> Make(const cudnn::Library& library, cudnn::Handle handle,
                                               const ConvolutionForm& form);

  // Puts the plans of an engine first.
  void Prefer(int64_t engine);

  // The next plan that takes at most so much workspace; null if there is none.
  std::shared_ptr<const ConvolutionPlan> Next(cudnn::Handle handle, int64_t most_workspace);

 private:
  ConvolutionPlans(const cudnn::Library& library, const ConvolutionForm& form,
                   std::shared_ptr<const ConvolutionGraph> graph)
      : library_(&library), form_(form), graph_(std::move(graph)) {}
  void Add(cudnn::HeuristicsMode mode);
  absl::StatusOr<std::shared_ptr<const ConvolutionPlan>> PlanOf(cudnn::Handle handle,
                                                                int64_t engine,
                                                                CudnnDescriptor config) const;

  const cudnn::Library* library_;
  ConvolutionForm form_;
  std::shared_ptr<const ConvolutionGraph> graph_;
  std::vector<std::pair<int64_t, CudnnDescriptor>> configs_;  // numbers of engines
  size_t next_ = 0;
};

}  // namespace tfmem
