#include "custom_ops/ops/dynamic/gpu_sender.h"

#include <cstring>
#include <utility>

#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

namespace {

constexpr int64_t kWord = sizeof(uint32_t);

// Sizes repeat, so that places fit the next batch, too.
int64_t Rounded(int64_t bytes) {
  int64_t size = 1 << 16;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

int64_t WordsBeforeZeros(int64_t words) { return (words + 63) / 64 * 64; }

absl::StatusOr<uint32_t*> GpuSender::Send(OpKernelContext* ctx, cuda::Stream compute,
                                          const std::vector<uint32_t>& words, int64_t zeros) {
  const int64_t begin = WordsBeforeZeros(words.size()), bytes = (begin + zeros) * kWord;
  last_ = (last_ + 1) % kPlaces;
  Place& place = places_[last_];
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  if (place.copied) {  // the host is ahead by as many batches as there are places
    TFMEM_ASSIGN_OR_RETURN(const bool passed, place.copied.Passed());
    if (!passed) {
      TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuEventSynchronize, place.copied.get());
    }
  }
  TFMEM_RETURN_IF_ERROR(MakeRoom(ctx, compute, bytes, &place));
  auto* host = static_cast<uint32_t*>(place.host.data());
  std::memcpy(host, words.data(), words.size() * kWord);
  std::memset(host + words.size(), 0, bytes - words.size() * kWord);
  TFMEM_RETURN_IF_ERROR(Copy(bytes, &place));
  TFMEM_RETURN_IF_ERROR(place.copied.MakeWait(compute));
  return static_cast<uint32_t*>(place.device.data());
}

// The copy may begin when nothing reads any more what lay in its place.
absl::Status GpuSender::MakeRoom(OpKernelContext* ctx, cuda::Stream compute, int64_t bytes,
                                 Place* place) {
  if (place->device.TotalBytes() >= size_t(bytes) && place->host.data() != nullptr) {
    return place->read ? place->read.MakeWait(link_->in_stream()) : absl::OkStatus();
  }
  const int64_t size = Rounded(bytes);
  place->device = Tensor();
  place->read.Reset();
  TFMEM_RETURN_IF_ERROR(
      ctx->allocate_temp(tensorflow::DT_UINT8, tensorflow::TensorShape({size}), &place->device));
  TFMEM_ASSIGN_OR_RETURN(place->host, PinnedBlock::Acquire(link_, size, 0, "scripts"));
  if (place->host.last_use()) {
    TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuEventSynchronize, place->host.last_use().get());
  }
  // TensorFlow gives memory that earlier work of the compute stream may still use.
  TFMEM_ASSIGN_OR_RETURN(const PooledEvent now, link_->Mark(compute));
  return now.MakeWait(link_->in_stream());
}

absl::Status GpuSender::Copy(int64_t bytes, Place* place) {
  const cuda::Stream stream = link_->in_stream();
  if (!place->copied) {
    TFMEM_ASSIGN_OR_RETURN(place->copied, link_->NewEvent());
  }
  absl::Status done = cuda::Check(link_->driver().cuMemcpyHtoDAsync_v2(
                                      reinterpret_cast<cuda::DevicePointer>(place->device.data()),
                                      place->host.data(), bytes, stream),
                                  "cuMemcpyHtoDAsync");
  if (done.ok()) done = place->copied.Record(stream);
  if (!done.ok() && !link_->Drain(stream)) {
    place->host.Abandon();
    new Tensor(std::move(place->device));  // leaked: a copy without an event may still write there
    place->device = Tensor();
  }
  return done;
}

absl::Status GpuSender::End(cuda::Stream compute) {
  Place& place = places_[last_];
  if (!place.read) {
    TFMEM_ASSIGN_OR_RETURN(place.read, link_->NewEvent());
  }
  return place.read.Record(compute);
}

PooledEvent GpuSender::TakeEnd() { return std::move(places_[last_].read); }

}  // namespace tfmem
