#include "custom_ops/ops/cuda/gpu_convolution.h"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/cuda/cudnn_calls.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int64_t kMostConvolutionWorkspace = 256 << 20;
constexpr int kMostTimed = 4;
constexpr int64_t kMostTrialRuns = 16;
constexpr float kOneTrialMilliseconds = 0.2;
constexpr float kTrialNoise = 1.03;
constexpr float kHopeless = 1.5;  // times the fastest: what comes behind such a plan is not tried

using Key = std::pair<cuda::Context, std::string>;  // of a form

struct ChosenConvolutions {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<const ConvolutionPlan>> plans;
  std::map<Key, int64_t> engines;  // of plans that were timed, for batches of any size
};

// `batch` stands for the form's.
std::string KeyOf(const ConvolutionForm& form, int64_t batch) {
  const auto pair = [](const std::array<int64_t, 2>& sizes) { return absl::StrJoin(sizes, ","); };
  return absl::StrJoin(
      {absl::StrCat(static_cast<int>(form.kind), ",", form.type, ",", form.tf32, ",",
                    form.channels_last),
       absl::StrCat(batch, ",", form.channels, ",", form.results, ",", form.groups),
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
  for (cudnn::Tensor tensor : {given_filter_, own_filter_}) {
    if (tensor != nullptr) library_.cudnnDestroyTensorDescriptor(tensor);
  }
}

absl::Status GpuConvolution::Open() {
  for (cudnn::Tensor* tensor : {&given_filter_, &own_filter_}) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnCreateTensorDescriptor, tensor);
  }
  const int64_t area = form_.filter[0] * form_.filter[1], k = form_.results;
  const int64_t c = form_.channels / form_.groups;
  filter_bytes_ = WorkspaceAligned(area * c * k * BytesOf(form_.type));
  if (form_.channels_last) {  // from channels last to first, of an image [area, c] of k channels
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

absl::Status GpuConvolution::Choose(const GpuTrial& trial, bool timed) {
  ChosenConvolutions& all = ProcessWide<ChosenConvolutions>();
  std::lock_guard<std::mutex> lock(all.mutex);
  const Key key(link_->context(), absl::StrCat(KeyOf(form_, form_.batch), ";", timed));
  std::shared_ptr<const ConvolutionPlan>& known = all.plans[key];
  if (known == nullptr) {
    const Key any_batch(link_->context(), KeyOf(form_, 0));
    const auto engine = all.engines.find(any_batch);
    const bool alike = timed && engine != all.engines.end();
    const std::optional<int64_t> first =
        alike ? std::optional<int64_t>(engine->second) : std::nullopt;
    TFMEM_ASSIGN_OR_RETURN(const Choice choice, Fastest(trial, timed && !alike, first));
    known = choice.plan;
    if (choice.timed) all.engines.emplace(any_batch, known->engine());
  }
  plan_ = known;
  return absl::OkStatus();
}

absl::StatusOr<GpuConvolution::Choice> GpuConvolution::Fastest(const GpuTrial& trial, bool timed,
                                                               std::optional<int64_t> engine) {
  std::optional<ConvolutionPlans> plans;
  TFMEM_RETURN_IF_ERROR(WithHandle([&](cudnn::Handle handle) -> absl::Status {
    TFMEM_ASSIGN_OR_RETURN(ConvolutionPlans made, ConvolutionPlans::Make(library_, handle, form_));
    plans.emplace(std::move(made));
    return absl::OkStatus();
  }));
  if (engine.has_value()) plans->Prefer(*engine);
  const auto next = [&]() -> absl::Status {
    return WithHandle([&](cudnn::Handle handle) {
      plan_ = plans->Next(handle, kMostConvolutionWorkspace);
      return absl::OkStatus();
    });
  };
  absl::Status failed = absl::UnimplementedError(
      absl::StrCat("cuDNN has no deterministic plan for a convolution of [", form_.batch, ", ",
                   absl::StrJoin(form_.image, ", "), ", ", form_.channels, "] and [",
                   absl::StrJoin(form_.filter, ", "), ", ", form_.channels / form_.groups, ", ",
                   form_.results, "] that takes at most ", kMostConvolutionWorkspace, " bytes"));
  std::shared_ptr<const ConvolutionPlan> fastest;
  float shortest = std::numeric_limits<float>::infinity();
  for (int tried = 0; tried < kMostTimed;) {
    TFMEM_RETURN_IF_ERROR(next());
    if (plan_ == nullptr) break;
    const absl::StatusOr<float> taken = Try(trial, timed);
    if (absl::IsResourceExhausted(taken.status())) {
      if (fastest == nullptr) return Choice{plan_, /*timed=*/false};
      break;
    }
    if (!taken.ok()) {
      failed = taken.status();
      continue;
    }
    if (*taken * kTrialNoise < shortest) fastest = plan_;
    if (!timed || *taken > kHopeless * shortest) break;
    shortest = std::min(shortest, *taken);
    ++tried;
  }
  if (fastest == nullptr) return failed;
  return Choice{fastest, timed};
}

absl::StatusOr<float> GpuConvolution::Try(const GpuTrial& trial, bool timed) const {
  const int64_t size = BytesOf(form_.type);
  const auto image = [&](int64_t channels, const std::array<int64_t, 2>& sizes) {
    return WorkspaceAligned(form_.batch * channels * sizes[0] * sizes[1] * size);
  };
  const int64_t x = image(form_.channels, form_.image), y = image(form_.results, form_.result);
  const int64_t alignment = kWorkspaceAlignment;
  const int64_t total = alignment + x + y + filter_bytes_ + workspace_bytes();
  uint64_t address = trial.allocate(total);
  if (address == 0) return absl::ResourceExhaustedError("no memory to try a convolution in");
  {
    const cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok()) return current.status();
    TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuMemsetD8Async, address, 0, total, trial.stream);
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
  {
    const cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok()) return current.status();
    TFMEM_RETURN_IF_ERROR(enqueue(trial.stream, 1));
  }
  if (!timed) return 0;
  const auto time = [&](int64_t runs) {
    return TimeOnGpu(link_, trial.stream,
                     [&](cuda::Stream stream) { return enqueue(stream, runs); });
  };
  TFMEM_ASSIGN_OR_RETURN(const float once, time(1));
  const int64_t runs =
      std::clamp<int64_t>(kOneTrialMilliseconds / std::max(once, 1e-3f), 1, kMostTrialRuns);
  TFMEM_ASSIGN_OR_RETURN(const float several, time(runs));
  return several / runs;
}

absl::Status GpuConvolution::WithHandle(absl::FunctionRef<absl::Status(cudnn::Handle)> use) const {
  const cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  return WithCudnnHandle(library_, link_, use);
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
  const uint64_t filter = workspace;
  if (form_.kind != ConvolutionKind::kFilterGradient) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnTransformTensor, handle, scale.one(), given_filter_,
                                at(w), scale.zero(), own_filter_, at(filter));
  }
  TFMEM_RETURN_IF_ERROR(plan_->Run(handle, x, filter, y, workspace + filter_bytes_));
  if (form_.kind == ConvolutionKind::kFilterGradient) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnTransformTensor, handle, scale.one(), own_filter_,
                                at(filter), scale.zero(), given_filter_, at(w));
  }
  return absl::OkStatus();
}

}  // namespace tfmem
