// The only file that includes TensorFlow headers without a stable interface (stream_executor, the
// allocator).
#include "custom_ops/ops/cuda/device_stream.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/protobuf/bfc_memory_map.pb.h"
#include "xla/stream_executor/stream.h"
#include "xla/tsl/framework/bfc_allocator.h"

namespace tfmem {

absl::StatusOr<cuda::Stream> ComputeStream(tensorflow::OpKernelContext* ctx) {
  tensorflow::DeviceContext* device = ctx->op_device_context();
  stream_executor::Stream* stream = device != nullptr ? device->stream() : nullptr;
  void* handle = stream != nullptr ? stream->platform_specific_handle().stream : nullptr;
  if (handle == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", ctx->op_kernel().name(), "' runs on ", ctx->device()->name(),
                     ", which has no CUDA stream; place it on a CUDA GPU or on the CPU"));
  }
  return static_cast<cuda::Stream>(handle);
}

std::vector<Chunk> AllocatorChunks(tensorflow::OpKernelContext* ctx) {
  auto* allocator = dynamic_cast<tsl::BFCAllocator*>(ctx->device()->GetAllocator({}));
  std::vector<Chunk> chunks;
  if (allocator == nullptr) return chunks;
  const tensorflow::MemoryDump dump = allocator->RecordMemoryMap();
  for (const tensorflow::MemChunk& chunk : dump.chunk()) {
    chunks.push_back({static_cast<int64_t>(chunk.address()), chunk.size(), chunk.in_use()});
  }
  std::sort(chunks.begin(), chunks.end(),
            [](const Chunk& a, const Chunk& b) { return a.address < b.address; });
  return chunks;
}

}  // namespace tfmem
