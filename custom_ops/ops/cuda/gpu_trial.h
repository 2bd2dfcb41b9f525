// How long work takes on a GPU, when it is timed where it will run. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

// Where something may be timed.
struct GpuTrial {
  cuda::Stream stream;
  // The address of so many bytes that nothing uses before the work enqueued on the stream from now
  // on; 0: there is no such memory. It stays as long as the trial.
  std::function<uint64_t(int64_t bytes)> allocate;
};

// Milliseconds that what `enqueue` captures takes in one launch of a graph, so that it is not the
// host that is timed; the shorter of two. The host waits for them, and for all that the stream
// had to do before.
absl::StatusOr<float> TimeOnGpu(GpuLink* link, cuda::Stream stream,
                                const std::function<absl::Status(cuda::Stream)>& enqueue);

}  // namespace tfmem
