#include "custom_ops/ops/cuda/gpu_pooling.h"

#include "custom_ops/ops/cuda/cudnn_calls.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

absl::StatusOr<std::unique_ptr<GpuPooling>> GpuPooling::Make(GpuLink* link, const PoolingForm& form,
                                                             const GpuTrial& trial) {
  TFMEM_ASSIGN_OR_RETURN(const cudnn::Library* library, cudnn::Load());
  std::unique_ptr<GpuPooling> made(new GpuPooling(*library, link, form));
  {
    const cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    TFMEM_RETURN_IF_ERROR(made->Open());
  }
  TFMEM_RETURN_IF_ERROR(made->Try(trial));
  return made;
}

GpuPooling::~GpuPooling() {
  for (cudnn::Tensor tensor : {x_, y_}) {
    if (tensor != nullptr) library_.cudnnDestroyTensorDescriptor(tensor);
  }
  if (pooling_ != nullptr) library_.cudnnDestroyPoolingDescriptor(pooling_);
}

absl::Status GpuPooling::Open() {
  for (cudnn::Tensor* tensor : {&x_, &y_}) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnCreateTensorDescriptor, tensor);
  }
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnCreatePoolingDescriptor, &pooling_);
  const auto set = [&](cudnn::Tensor tensor, const std::array<int64_t, 2>& sizes) {
    return SetImages(library_, tensor, form_.type, form_.channels_last, form_.batch, form_.channels,
                     sizes);
  };
  TFMEM_RETURN_IF_ERROR(set(x_, form_.image));
  TFMEM_RETURN_IF_ERROR(set(y_, form_.result));
  TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetPooling2dDescriptor, pooling_,
                              form_.average ? cudnn::kAverageOfImage : cudnn::kDeterministicMax,
                              form_.propagates_nan ? cudnn::kPropagateNan : cudnn::kSkipNan,
                              form_.window[0], form_.window[1], form_.pad[0], form_.pad[1],
                              form_.stride[0], form_.stride[1]);
  return absl::OkStatus();
}

absl::Status GpuPooling::Try(const GpuTrial& trial) const {
  const auto bytes = [&](const std::array<int64_t, 2>& sizes) {
    constexpr int64_t kLast = 255;
    const int64_t numbers = form_.batch * form_.channels * sizes[0] * sizes[1];
    return (numbers * BytesOf(form_.type) + kLast) & ~kLast;
  };
  const int64_t x = bytes(form_.image), y = bytes(form_.result), total = 2 * (x + y);
  const uint64_t address = trial.allocate(total);
  if (address == 0) return absl::OkStatus();
  const cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuMemsetD8Async, address, 0, total, trial.stream);
  const uint64_t y_at = address + x, dy_at = y_at + y, dx_at = dy_at + y;
  if (!form_.gradient) return Enqueue(trial.stream, {address, y_at});
  if (form_.average) return Enqueue(trial.stream, {dy_at, dx_at});
  return Enqueue(trial.stream, {address, y_at, dy_at, dx_at});
}

absl::Status GpuPooling::Enqueue(cuda::Stream stream, absl::Span<const uint64_t> addresses) const {
  const CudnnScale scale(form_.type);
  const auto at = [&](int place) { return reinterpret_cast<void*>(addresses[place]); };
  return WithCudnnHandle(library_, link_, [&](cudnn::Handle handle) -> absl::Status {
    TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnSetStream, handle, stream);
    if (form_.gradient) {
      // The gradient of an average reads neither x nor y, but takes addresses of both.
      const int x = form_.average ? 1 : 0, y = form_.average ? 0 : 1, dy = form_.average ? 0 : 2;
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnPoolingBackward, handle, pooling_, scale.one(), y_,
                                  at(y), y_, at(dy), x_, at(x), scale.zero(), x_, at(dy + 1));
    } else {
      TFMEM_CUDNN_RETURN_IF_ERROR(library_, cudnnPoolingForward, handle, pooling_, scale.one(), x_,
                                  at(0), scale.zero(), y_, at(1));
    }
    return absl::OkStatus();
  });
}

}  // namespace tfmem
