#include "custom_ops/ops/cuda/cudnn_calls.h"

#include <map>
#include <mutex>

#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

struct CudnnHandles {
  std::mutex mutex;
  std::map<cuda::Context, cudnn::Handle> handles;
};

}  // namespace

absl::Status WithCudnnHandle(const cudnn::Library& library, GpuLink* link,
                             absl::FunctionRef<absl::Status(cudnn::Handle)> use) {
  CudnnHandles& all = ProcessWide<CudnnHandles>();
  std::lock_guard<std::mutex> lock(all.mutex);
  cudnn::Handle& handle = all.handles[link->context()];
  if (handle == nullptr) TFMEM_CUDNN_RETURN_IF_ERROR(library, cudnnCreate, &handle);
  return use(handle);
}

absl::Status SetImages(const cudnn::Library& library, cudnn::Tensor tensor, cudnn::Type type,
                       bool channels_last, int64_t batch, int64_t channels,
                       const std::array<int64_t, 2>& sizes) {
  const int64_t pixels = sizes[0] * sizes[1], whole = pixels * channels;
  const bool last = channels_last;
  TFMEM_CUDNN_RETURN_IF_ERROR(library, cudnnSetTensor4dDescriptorEx, tensor, type, batch, channels,
                              sizes[0], sizes[1], whole, last ? 1 : pixels,
                              last ? sizes[1] * channels : sizes[1], last ? channels : 1);
  return absl::OkStatus();
}

int64_t BytesOf(cudnn::Type type) {
  return type == cudnn::kDouble ? 8 : type == cudnn::kFloat ? 4 : 2;
}

}  // namespace tfmem
