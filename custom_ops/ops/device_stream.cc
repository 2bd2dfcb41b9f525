// The only file that includes TensorFlow headers without a stable interface (stream_executor).
#include "custom_ops/ops/device_stream.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xla/stream_executor/stream.h"

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

}  // namespace tfmem
