#include "custom_ops/ops/cuda/host_copies.h"

#include <utility>

#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::Tensor;

HostCopies::~HostCopies() {
  if (held_.empty() || link_->Drain(stream_)) return;
  // A copy may still touch them, so they are never freed.
  new std::vector<Tensor>(std::move(held_));
}

absl::StatusOr<Tensor> HostCopies::ToHost(const Tensor& tensor) {
  tensorflow::AllocatorAttributes pinned;
  pinned.set_on_host(true);
  pinned.set_gpu_compatible(true);
  Tensor host;
  TFMEM_RETURN_IF_ERROR(ctx_->allocate_temp(tensor.dtype(), tensor.shape(), &host, pinned));
  if (tensor.TotalBytes() == 0) return host;
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  held_.push_back(tensor);
  held_.push_back(host);
  TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuMemcpyDtoHAsync_v2, host.data(),
                             reinterpret_cast<cuda::DevicePointer>(tensor.data()),
                             tensor.TotalBytes(), stream_);
  return host;
}

absl::Status HostCopies::ToDevice(const Tensor& tensor, const Tensor& to) {
  if (tensor.TotalBytes() == 0) return absl::OkStatus();
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  held_.push_back(tensor);
  held_.push_back(to);
  TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuMemcpyHtoDAsync_v2,
                             reinterpret_cast<cuda::DevicePointer>(to.data()), tensor.data(),
                             tensor.TotalBytes(), stream_);
  return absl::OkStatus();
}

absl::Status HostCopies::Wait() {
  if (held_.empty()) return absl::OkStatus();
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuStreamSynchronize, stream_);
  held_.clear();
  return absl::OkStatus();
}

}  // namespace tfmem
