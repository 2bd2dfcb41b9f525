#include "custom_ops/ops/cuda/convolution_plans.h"

#include <algorithm>
#include <utility>

#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

enum Number : int64_t { kX = 1, kW = 2, kY = 3 };
constexpr int64_t kAlignment = 16;  // bytes, of every tensor
constexpr int64_t kMostNotes = 10;

// [n, c, h, w] in cuDNN's order, whatever the order in memory.
absl::StatusOr<CudnnDescriptor> TensorOf(const cudnn::Library& library, const ConvolutionForm& form,
                                         int64_t number, int64_t n, int64_t c,
                                         const std::array<int64_t, 2>& image) {
  const int64_t h = image[0], w = image[1];
  const int type = form.type;
  const std::array<int64_t, 4> sizes = {n, c, h, w};
  const std::array<int64_t, 4> last = {h * w * c, 1, w * c, c}, first = {c * h * w, h * w, w, 1};
  return CudnnDescriptor::Make(
      library, cudnn::kTensor,
      {CudnnValue(cudnn::kTensorType, cudnn::kDataType, type),
       CudnnIntegers(cudnn::kTensorSizes, sizes),
       CudnnIntegers(cudnn::kTensorStrides, form.channels_last ? last : first),
       CudnnValue(cudnn::kTensorNumber, cudnn::kInt64Type, number),
       CudnnValue(cudnn::kTensorAlignment, cudnn::kInt64Type, kAlignment)});
}

absl::StatusOr<CudnnDescriptor> ConvolutionOf(const cudnn::Library& library,
                                              const ConvolutionForm& form) {
  const int compute = form.type == cudnn::kDouble ? cudnn::kDouble : cudnn::kFloat;
  const int mode = cudnn::kCrossCorrelation;
  const int64_t dimensions = 2;
  return CudnnDescriptor::Make(
      library, cudnn::kConvolution,
      {CudnnValue(cudnn::kConvolutionCompute, cudnn::kDataType, compute),
       CudnnValue(cudnn::kConvolutionMode, cudnn::kModeType, mode),
       CudnnValue(cudnn::kConvolutionDimensions, cudnn::kInt64Type, dimensions),
       CudnnIntegers(cudnn::kConvolutionDilations, form.dilation),
       CudnnIntegers(cudnn::kConvolutionStrides, form.stride),
       CudnnIntegers(cudnn::kConvolutionPrePaddings, form.pad),
       CudnnIntegers(cudnn::kConvolutionPostPaddings, form.pad)});
}

absl::StatusOr<CudnnDescriptor> OperationOf(const cudnn::Library& library,
                                            const ConvolutionForm& form, const CudnnDescriptor& x,
                                            const CudnnDescriptor& w, const CudnnDescriptor& y,
                                            const CudnnDescriptor& convolution) {
  const bool wide = form.type == cudnn::kDouble;
  const double wide_one = 1, wide_zero = 0;
  const float narrow_one = 1, narrow_zero = 0;
  const auto scale = [&](int name, const double& as_double, const float& as_float) {
    return wide ? CudnnValue(name, cudnn::kDoubleType, as_double)
                : CudnnValue(name, cudnn::kFloatType, as_float);
  };
  const auto made = [&](cudnn::Kind kind, int alpha, const CudnnDescriptor& first,
                        const CudnnDescriptor& second, const CudnnDescriptor& third) {
    return CudnnDescriptor::Make(
        library, kind,
        {scale(alpha, wide_one, narrow_one), scale(alpha + 1, wide_zero, narrow_zero),
         convolution.As(alpha + 2), first.As(alpha + 3), second.As(alpha + 4),
         third.As(alpha + 5)});
  };
  switch (form.kind) {
    case ConvolutionKind::kForward:
      return made(cudnn::kForwardConvolution, cudnn::kForwardAlpha, w, x, y);
    case ConvolutionKind::kInputGradient:
      return made(cudnn::kInputGradient, cudnn::kInputGradientAlpha, w, x, y);
    case ConvolutionKind::kFilterGradient:
      return made(cudnn::kFilterGradient, cudnn::kFilterGradientAlpha, w, x, y);
  }
  return absl::InternalError("no such kind of a convolution");
}

// Whether an engine computes a form as it may.
bool Keeps(const CudnnDescriptor& engine, const ConvolutionForm& form) {
  const absl::StatusOr<std::vector<int>> notes =
      engine.Values<int>(cudnn::kEngineNotes, cudnn::kNoteType, kMostNotes);
  if (!notes.ok()) return false;
  const bool exact = form.type == cudnn::kFloat && !form.tf32;
  return std::none_of(notes->begin(), notes->end(), [exact](int note) {
    return note == cudnn::kNondeterministic || note == cudnn::kRoundsSums ||
           (exact && (note == cudnn::kTensorCores || note == cudnn::kRoundsInputs));
  });
}

}  // namespace

absl::StatusOr<ConvolutionPlans> ConvolutionPlans::Make(const cudnn::Library& library,
                                                        cudnn::Handle handle,
                                                        const ConvolutionForm& form) {
  const int64_t batch = form.batch, channels = form.channels, results = form.results;
  TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor x,
                         TensorOf(library, form, kX, batch, channels, form.image));
  TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor w,
                         TensorOf(library, form, kW, results, channels / form.groups, form.filter));
  TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor y,
                         TensorOf(library, form, kY, batch, results, form.result));
  TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor convolution, ConvolutionOf(library, form));
  TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor operation,
                         OperationOf(library, form, x, w, y, convolution));
  TFMEM_ASSIGN_OR_RETURN(
      CudnnDescriptor graph,
      CudnnDescriptor::Make(library, cudnn::kOperationGraph,
                            {CudnnValue(cudnn::kGraphHandle, cudnn::kHandleType, handle),
                             operation.As(cudnn::kGraphOperations)}));
  ConvolutionPlans plans(library, form,
                         std::make_shared<const ConvolutionGraph>(ConvolutionGraph{
                             std::move(x), std::move(w), std::move(y), std::move(convolution),
                             std::move(operation), std::move(graph)}));
  plans.Add(cudnn::kMostAccurate);
  plans.Add(cudnn::kFallback);
  return plans;
}

// A mode that fails has no engine for the form.
void ConvolutionPlans::Add(cudnn::HeuristicsMode mode) {
  const int number = mode;
  const absl::StatusOr<CudnnDescriptor> heuristics = CudnnDescriptor::Make(
      *library_, cudnn::kHeuristics,
      {graph_->graph.As(cudnn::kHeuristicsGraph),
       CudnnValue(cudnn::kHeuristicsMode, cudnn::kHeuristicsModeType, number)});
  if (!heuristics.ok()) return;
  const absl::StatusOr<int64_t> count =
      heuristics->Count(cudnn::kHeuristicsResults, cudnn::kDescriptorType);
  if (!count.ok() || *count == 0) return;
  absl::StatusOr<std::vector<CudnnDescriptor>> configs =
      heuristics->Parts(cudnn::kHeuristicsResults, cudnn::kEngineConfig, *count);
  if (!configs.ok()) return;
  for (CudnnDescriptor& config : *configs) {
    const absl::StatusOr<std::vector<CudnnDescriptor>> engine =
        config.Parts(cudnn::kConfigEngine, cudnn::kEngine, 1);
    if (!engine.ok() || engine->empty() || !Keeps(engine->front(), form_)) continue;
    const absl::StatusOr<std::vector<int64_t>> engine_number =
        engine->front().Values<int64_t>(cudnn::kEngineNumber, cudnn::kInt64Type, 1);
    const bool known = engine_number.ok() && !engine_number->empty();
    configs_.emplace_back(known ? engine_number->front() : -1, std::move(config));
  }
}

void ConvolutionPlans::Prefer(int64_t engine) {
  std::stable_partition(configs_.begin(), configs_.end(),
                        [engine](const auto& each) { return each.first == engine; });
}

std::shared_ptr<const ConvolutionPlan> ConvolutionPlans::Next(cudnn::Handle handle,
                                                              int64_t most_workspace) {
  while (next_ < configs_.size()) {
    auto& [engine, config] = configs_[next_++];
    absl::StatusOr<std::shared_ptr<const ConvolutionPlan>> plan = PlanOf(
        handle, engine, std::move(config));  // which says only now that this GPU does not run it
    if (plan.ok() && (*plan)->workspace_bytes() <= most_workspace) return *std::move(plan);
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<const ConvolutionPlan>> ConvolutionPlans::PlanOf(
    cudnn::Handle handle, int64_t engine, CudnnDescriptor config) const {
  TFMEM_ASSIGN_OR_RETURN(
      CudnnDescriptor plan,
      CudnnDescriptor::Make(*library_, cudnn::kExecutionPlan,
                            {CudnnValue(cudnn::kPlanHandle, cudnn::kHandleType, handle),
                             config.As(cudnn::kPlanConfig)}));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes,
                         plan.Values<int64_t>(cudnn::kPlanWorkspace, cudnn::kInt64Type, 1));
  if (bytes.empty()) return absl::InternalError("cuDNN does not say what workspace a plan needs");
  return std::shared_ptr<const ConvolutionPlan>(new ConvolutionPlan(
      *library_, graph_, std::move(config), std::move(plan), bytes.front(), engine));
}

absl::Status ConvolutionPlan::Run(cudnn::Handle handle, uint64_t x, uint64_t w, uint64_t y,
                                  uint64_t workspace) const {
  const std::array<int64_t, 3> numbers = {kX, kW, kY};
  const std::array<uint64_t, 3> addresses = {x, w, y};
  TFMEM_ASSIGN_OR_RETURN(
      const CudnnDescriptor pack,
      CudnnDescriptor::Make(
          library_, cudnn::kVariantPack,
          {CudnnIntegers(cudnn::kPackNumbers, numbers),
           CudnnAttribute{cudnn::kPackPointers, cudnn::kPointerType, 3, addresses.data()},
           CudnnValue(cudnn::kPackWorkspace, cudnn::kPointerType, workspace)}));
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnBackendExecute, handle, plan_.get(), pack.get());
  return absl::OkStatus();
}

}  // namespace tfmem
