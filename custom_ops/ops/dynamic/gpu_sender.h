// The way of a batch's scripts to a GPU (VPPS, section III-C1): from pinned memory, on a separate
// stream, so that they are there when the batch before is done.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

class GpuSender {
 public:
  explicit GpuSender(GpuLink* link) : link_(link) {}

  // Where the words are for what `compute` is given from now on; behind them, at a multiple of 256
  // bytes, are as many zeros. Waits only if as many batches as there are places are on their way.
  absl::StatusOr<uint32_t*> Send(tensorflow::OpKernelContext* ctx, cuda::Stream compute,
                                 const std::vector<uint32_t>& words, int64_t zeros);

  // All that reads what was sent last is enqueued on `compute`.
  absl::Status End(cuda::Stream compute);

  // Passed once nothing that was sent is read any more; none if nothing was sent.
  PooledEvent TakeEnd();

 private:
  static constexpr int kPlaces = 3;

  struct Place {
    tensorflow::Tensor device;
    PinnedBlock host;
    PooledEvent copied, read;
  };
  absl::Status MakeRoom(tensorflow::OpKernelContext* ctx, cuda::Stream compute, int64_t bytes,
                        Place* place);
  absl::Status Copy(int64_t bytes, Place* place);

  GpuLink* const link_;
  Place places_[kPlaces];
  int last_ = 0;
};

// Where zeros begin, in words.
int64_t WordsBeforeZeros(int64_t words);

}  // namespace tfmem
