#include "custom_ops/ops/cuda/gpu_convolution.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/cuda/cudnn_calls.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr size_t kMostConvolutionWorkspace = 256 << 20;
constexpr int kMostAsked = 16;  // algorithms that cuDNN is asked for
constexpr size_t kMostTimed = 4;
constexpr int64_t kMostTrialRuns = 16;
constexpr float kOneTrialMilliseconds = 0.2;
constexpr float kTrialNoise = 1.03;

struct ChosenConvolutions {
  std::mutex mutex;
  std::map<std::pair<cuda::Context, std::string>, cudnn::Algorithm> algorithms;  // by form
};

std::string KeyOf(const ConvolutionForm& form) {
  const auto pair = [](const std::array<int64_t, 2>& sizes) { return absl::StrJoin(sizes, ","); };
  return absl::StrJoin(
      {absl::StrCat(static_cast<int>(form.kind), ",", form.type, ",", form.tf32, ",",
                    form.channels_last),
       absl::StrCat(form.batch, ",", form.channels, ",", form.results, ",", form.groups),
       pair(form.image), pair(form.result), pair(form.filter), pair(form.stride),
       pair(form.dilation), pair(form.pad)},
      ";");
}

int64_t WorkspaceAligned(int64_t bytes) {
  constexpr int64_t kLast = GpuConvolution::kWorkspaceAlignment - 1;
  return (bytes + kLast) & ~kLast;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuConvolution>> GpuConvolution::Make(GpuLink* link,
                                                                     const ConvolutionForm& form,
                                                                     const GpuTrial& trial,
                                                                     bool timed) {
  TFMEM_ASSIGN_OR_RETURN(const cudnn::Library* library, cudnn::Load());
  std::unique_ptr<GpuConvolution> made(new GpuConvolution(*library, link, form));
  {
    const cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    TFMEM_RETURN_IF_ERROR(made->Open());
  }
  TFMEM_RETURN_IF_ERROR(made->Choose(trial, timed));
  return made;
}

GpuConvolution::~GpuConvolution() {
  for (cudnn::Tensor tensor : {x_, y_, given_filter_, own_filter_}) {
    if (tensor != nullptr) library_.cudnnDestroyTensorDescriptor(tensor);
  }
  if (w_ != nullptr) library_.cudnnDestroyFilterDescriptor(w_);
  if (convolution_ != nullptr) library_.cudnnDestroyConvolutionDescriptor(convolution_);
}

absl::Status GpuConvolution::Open() {
  for (cudnn::Tensor* tensor : {&x_, &y_, &given_filter_, &own_filter_}) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnCreateTensorDescriptor, tensor);
  }
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnCreateFilterDescriptor, &w_);
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnCreateConvolutionDescriptor, &convolution_);
  TFMEM_RETURN_IF_ERROR(SetImage(x_, form_.channels, form_.image));
  TFMEM_RETURN_IF_ERROR(SetImage(y_, form_.results, form_.result));
  TFMEM_RETURN_IF_ERROR(SetFilters());
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetConvolution2dDescriptor, convolution_, form_.pad[0],
                              form_.pad[1], form_.stride[0], form_.stride[1], form_.dilation[0],
                              form_.dilation[1], cudnn::kCrossCorrelation,
                              form_.type == cudnn::kDouble ? cudnn::kDouble : cudnn::kFloat);
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetConvolutionGroupCount, convolution_, form_.groups);
  const bool half = form_.type == cudnn::kHalf || form_.type == cudnn::kBfloat16;
  return SetMath(half                                                 ? cudnn::kTensorOpMath
                 : form_.type == cudnn::kFloat && form_.tf32 == false ? cudnn::kFmaMath
                                                                      : cudnn::kDefaultMath);
}

absl::Status GpuConvolution::SetMath(int math) const {
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetConvolutionMathType, convolution_, math);
  return absl::OkStatus();
}

absl::Status GpuConvolution::SetImage(cudnn::Tensor tensor, int64_t channels,
                                      const std::array<int64_t, 2>& sizes) const {
  return SetImages(library_, tensor, form_.type, form_.channels_last, form_.batch, channels, sizes);
}

absl::Status GpuConvolution::SetFilters() {
  const int64_t area = form_.filter[0] * form_.filter[1], k = form_.results;
  const int64_t c = form_.channels / form_.groups;
  const bool last = form_.channels_last;
  filter_bytes_ = WorkspaceAligned(area * c * k * BytesOf(form_.type));
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetFilter4dDescriptor, w_, form_.type,
                              last ? cudnn::kChannelsLast : cudnn::kChannelsFirst, k, c,
                              form_.filter[0], form_.filter[1]);
  if (last) {  // from channels last to channels first, of an image [area, c] of k channels
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetTensor4dDescriptorEx, given_filter_, form_.type,
                                1, k, area, c, area * c * k, 1, c * k, k);
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetTensor4dDescriptorEx, own_filter_, form_.type, 1,
                                k, area, c, area * c * k, area * c, c, 1);
    return absl::OkStatus();
  }
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetTensor4dDescriptorEx, given_filter_, form_.type, k,
                              c, area, 1, 1, k, c * k, c * k);
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetTensor4dDescriptorEx, own_filter_, form_.type, k, c,
                              area, 1, c * area, area, 1, 1);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<cudnn::Algorithm>> GpuConvolution::Algorithms() const {
  std::vector<cudnn::Algorithm> found(kMostAsked);
  int count = 0;
  TFMEM_RETURN_IF_ERROR(WithCudnnHandle(library_, link_, [&](cudnn::Handle handle) -> absl::Status {
    switch (form_.kind) {
      case ConvolutionKind::kForward:
        TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnGetConvolutionForwardAlgorithm_v7, handle, x_,
                                    w_, convolution_, y_, kMostAsked, &count, found.data());
        break;
      case ConvolutionKind::kInputGradient:
        TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnGetConvolutionBackwardDataAlgorithm_v7, handle,
                                    w_, y_, convolution_, x_, kMostAsked, &count, found.data());
        break;
      case ConvolutionKind::kFilterGradient:
        TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnGetConvolutionBackwardFilterAlgorithm_v7, handle,
                                    x_, y_, convolution_, w_, kMostAsked, &count, found.data());
        break;
    }
    found.resize(std::clamp(count, 0, kMostAsked));
    const auto fails = [&](cudnn::Algorithm& each) {
      if (each.status != cudnn::kSuccess || each.determinism != cudnn::kDeterministic) return true;
      // cuDNN may only make exact products of what it was told not to round.
      if (form_.type == cudnn::kFloat && !form_.tf32) each.math = cudnn::kFmaMath;
      if (!SetMath(each.math).ok()) return true;
      const int number = each.number;
      size_t* const bytes = &each.workspace_bytes;
      cudnn::Result result = cudnn::kSuccess;
      switch (form_.kind) {
        case ConvolutionKind::kForward:
          result = library_.cudnnGetConvolutionForwardWorkspaceSize(handle, x_, w_, convolution_,
                                                                    y_, number, bytes);
          break;
        case ConvolutionKind::kInputGradient:
          result = library_.cudnnGetConvolutionBackwardDataWorkspaceSize(
              handle, w_, y_, convolution_, x_, number, bytes);
          break;
        case ConvolutionKind::kFilterGradient:
          result = library_.cudnnGetConvolutionBackwardFilterWorkspaceSize(
              handle, x_, y_, convolution_, w_, number, bytes);
          break;
      }
      return result != cudnn::kSuccess || each.workspace_bytes > kMostConvolutionWorkspace;
    };
    found.erase(std::remove_if(found.begin(), found.end(), fails), found.end());
    return absl::OkStatus();
  }));
  if (!found.empty()) return found;
  return absl::UnimplementedError(
      absl::StrCat("cuDNN has no deterministic algorithm for a convolution of [", form_.batch, ", ",
                   absl::StrJoin(form_.image, ", "), ", ", form_.channels, "] and [",
                   absl::StrJoin(form_.filter, ", "), ", ", form_.channels / form_.groups, ", ",
                   form_.results, "] that takes at most ", kMostConvolutionWorkspace, " bytes"));
}

absl::Status GpuConvolution::Choose(const GpuTrial& trial, bool timed) {
  ChosenConvolutions& all = ProcessWide<ChosenConvolutions>();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto key = std::make_pair(link_->context(), absl::StrCat(KeyOf(form_), ";", timed));
  const auto known = all.algorithms.find(key);
  if (known != all.algorithms.end()) {
    algorithm_ = known->second;
  } else {
    std::vector<cudnn::Algorithm> algorithms;
    {
      const cuda::ScopedContext current(link_->driver(), link_->context());
      if (!current.status().ok()) return current.status();
      TFMEM_ASSIGN_OR_RETURN(algorithms, Algorithms());
    }
    algorithm_ = Fastest(algorithms, trial, timed);
    all.algorithms.emplace(key, algorithm_);
  }
  const cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  return SetMath(algorithm_.math);
}

// The first of those that run, or, if `timed`, of those that are as fast as any; the first of all
// if that cannot be found out.
cudnn::Algorithm GpuConvolution::Fastest(const std::vector<cudnn::Algorithm>& algorithms,
                                         const GpuTrial& trial, bool timed) {
  const int64_t size = BytesOf(form_.type);
  const auto image = [&](int64_t channels, const std::array<int64_t, 2>& sizes) {
    return WorkspaceAligned(form_.batch * channels * sizes[0] * sizes[1] * size);
  };
  const int64_t x = image(form_.channels, form_.image), y = image(form_.results, form_.result);
  size_t workspace = 0;
  for (const auto& each : algorithms) workspace = std::max(workspace, each.workspace_bytes);
  const int64_t alignment = kWorkspaceAlignment;
  const int64_t total = alignment + x + y + 2 * filter_bytes_ + workspace;
  uint64_t address = trial.allocate(total);
  if (address == 0) return algorithms.front();
  {
    const cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok() ||
        link_->driver().cuMemsetD8Async(address, 0, total, trial.stream) != cuda::kSuccess) {
      return algorithms.front();
    }
  }
  address = WorkspaceAligned(address);
  const uint64_t w_at = address + x, y_at = w_at + filter_bytes_, scratch = y_at + y;
  const auto enqueue = [&](cuda::Stream stream, int64_t runs) -> absl::Status {
    return WithCudnnHandle(library_, link_, [&](cudnn::Handle handle) -> absl::Status {
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetStream, handle, stream);
      for (int64_t i = 0; i < runs; ++i) {
        TFMEM_RETURN_IF_ERROR(Run(handle, address, w_at, y_at, scratch));
      }
      return absl::OkStatus();
    });
  };
  std::vector<std::pair<float, const cudnn::Algorithm*>> times;
  for (const cudnn::Algorithm& each : algorithms) {
    algorithm_ = each;
    {
      const cuda::ScopedContext current(link_->driver(), link_->context());
      if (!current.status().ok() || !SetMath(each.math).ok() || !enqueue(trial.stream, 1).ok()) {
        continue;  // cuDNN says only when it runs that this GPU does not run it
      }
    }
    if (!timed) return each;
    const auto time = [&](int64_t runs) {
      return TimeOnGpu(link_, trial.stream,
                       [&](cuda::Stream stream) { return enqueue(stream, runs); });
    };
    const absl::StatusOr<float> once = time(1);
    if (!once.ok()) continue;
    const int64_t runs =
        std::clamp<int64_t>(kOneTrialMilliseconds / std::max(*once, 1e-3f), 1, kMostTrialRuns);
    const absl::StatusOr<float> several = time(runs);
    if (several.ok()) times.emplace_back(*several / runs, &each);
    if (times.size() == kMostTimed) break;
  }
  if (times.empty()) return algorithms.front();
  float shortest = std::numeric_limits<float>::infinity();
  for (const auto& [taken, each] : times) shortest = std::min(shortest, taken);
  for (const auto& [taken, each] : times) {
    if (taken <= shortest * kTrialNoise) return *each;
  }
  return algorithms.front();
}

absl::Status GpuConvolution::Enqueue(cuda::Stream stream,
                                     absl::Span<const uint64_t> addresses) const {
  const uint64_t a = addresses[0], b = addresses[1], made = addresses[2];
  return WithCudnnHandle(library_, link_, [&](cudnn::Handle handle) -> absl::Status {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetStream, handle, stream);
    switch (form_.kind) {
      case ConvolutionKind::kForward:
        return Run(handle, a, b, made, addresses[3]);
      case ConvolutionKind::kInputGradient:
        return Run(handle, made, a, b, addresses[3]);
      case ConvolutionKind::kFilterGradient:
        return Run(handle, a, made, b, addresses[3]);
    }
    return absl::OkStatus();
  });
}

absl::Status GpuConvolution::Run(cudnn::Handle handle, uint64_t x, uint64_t w, uint64_t y,
                                 uint64_t workspace) const {
  const CudnnScale scale(form_.type);
  const auto at = [](uint64_t address) { return reinterpret_cast<void*>(address); };
  void* const filter = at(workspace);
  void* const scratch = at(workspace + filter_bytes_);
  const size_t bytes = algorithm_.workspace_bytes;
  const int number = algorithm_.number;
  if (form_.kind != ConvolutionKind::kFilterGradient) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnTransformTensor, handle, scale.one(), given_filter_,
                                at(w), scale.zero(), own_filter_, filter);
  }
  switch (form_.kind) {
    case ConvolutionKind::kForward:
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnConvolutionForward, handle, scale.one(), x_, at(x),
                                  w_, filter, convolution_, number, scratch, bytes, scale.zero(),
                                  y_, at(y));
      break;
    case ConvolutionKind::kInputGradient:
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnConvolutionBackwardData, handle, scale.one(), w_,
                                  filter, y_, at(y), convolution_, number, scratch, bytes,
                                  scale.zero(), x_, at(x));
      break;
    case ConvolutionKind::kFilterGradient:
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnConvolutionBackwardFilter, handle, scale.one(), x_,
                                  at(x), y_, at(y), convolution_, number, scratch, bytes,
                                  scale.zero(), w_, filter);
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnTransformTensor, handle, scale.one(), own_filter_,
                                  filter, scale.zero(), given_filter_, at(w));
      break;
  }
  return absl::OkStatus();
}

}  // namespace tfmem
