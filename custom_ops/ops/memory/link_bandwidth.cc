#include "custom_ops/ops/memory/link_bandwidth.h"

#include "absl/status/status.h"
#include "custom_ops/ops/cuda/cuda_driver.h"

namespace tfmem {
namespace {

constexpr int kWarmUps = 1;
constexpr int kCopies = 5;

// One direction: a stream, a buffer on either side and the events around the copies.
class Lane {
 public:
  explicit Lane(const cuda::Driver& driver) : driver_(driver) {}
  ~Lane() {
    // What was not made is null, which these refuse.
    if (stream_ != nullptr) driver_.cuStreamSynchronize(stream_);
    if (start_ != nullptr) driver_.cuEventDestroy_v2(start_);
    if (end_ != nullptr) driver_.cuEventDestroy_v2(end_);
    if (stream_ != nullptr) driver_.cuStreamDestroy_v2(stream_);
    if (host_ != nullptr) driver_.cuMemFreeHost(host_);
    if (device_ != 0) driver_.cuMemFree_v2(device_);
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  absl::Status Open(size_t bytes) {
    bytes_ = bytes;
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuStreamCreate, &stream_, cuda::kStreamNonBlocking);
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventCreate, &start_, cuda::kEventDefault);
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventCreate, &end_, cuda::kEventDefault);
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuMemHostAlloc, &host_, bytes, 0);
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuMemAlloc_v2, &device_, bytes);
    return absl::OkStatus();
  }

  absl::Status Enqueue(bool to_host) {
    for (int i = 0; i < kWarmUps + kCopies; ++i) {
      if (i == kWarmUps) TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventRecord, start_, stream_);
      if (to_host) {
        TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuMemcpyDtoHAsync_v2, host_, device_, bytes_, stream_);
      } else {
        TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuMemcpyHtoDAsync_v2, device_, host_, bytes_, stream_);
      }
    }
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventRecord, end_, stream_);
    return absl::OkStatus();
  }

  absl::StatusOr<double> BytesPerSecond() {
    float milliseconds = 0;
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventSynchronize, end_);
    TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventElapsedTime, &milliseconds, start_, end_);
    return 1e3 * kCopies * bytes_ / milliseconds;
  }

 private:
  const cuda::Driver& driver_;
  size_t bytes_ = 0;
  cuda::Stream stream_ = nullptr;
  cuda::Event start_ = nullptr;
  cuda::Event end_ = nullptr;
  void* host_ = nullptr;
  cuda::DevicePointer device_ = 0;
};

absl::StatusOr<LinkBandwidth> Measure(const cuda::Driver& driver, cuda::Context context,
                                      size_t bytes) {
  cuda::ScopedContext current(driver, context);
  if (!current.status().ok()) return current.status();
  Lane out(driver);
  Lane in(driver);
  absl::Status status = out.Open(bytes);
  if (status.ok()) status = in.Open(bytes);
  if (!status.ok()) return status;

  if (status = out.Enqueue(/*to_host=*/true); !status.ok()) return status;
  absl::StatusOr<double> to_host = out.BytesPerSecond();
  if (!to_host.ok()) return to_host.status();

  if (status = in.Enqueue(/*to_host=*/false); !status.ok()) return status;
  absl::StatusOr<double> to_device = in.BytesPerSecond();
  if (!to_device.ok()) return to_device.status();

  status = out.Enqueue(/*to_host=*/true);
  if (status.ok()) status = in.Enqueue(/*to_host=*/false);
  if (!status.ok()) return status;
  absl::StatusOr<double> both_to_host = out.BytesPerSecond();
  if (!both_to_host.ok()) return both_to_host.status();
  absl::StatusOr<double> both_to_device = in.BytesPerSecond();
  if (!both_to_device.ok()) return both_to_device.status();
  return LinkBandwidth{*to_host, *to_device, *both_to_host, *both_to_device};
}

}  // namespace

absl::StatusOr<LinkBandwidth> MeasureLinkBandwidth(int ordinal, size_t bytes) {
  absl::StatusOr<const cuda::Driver*> loaded = cuda::LoadDriver();
  if (!loaded.ok()) return loaded.status();
  const cuda::Driver& driver = **loaded;
  cuda::Device device = 0;
  cuda::Context context = nullptr;
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuDeviceGet, &device, ordinal);
  // The context that TensorFlow uses as well; retained, so that it is not ours to end.
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuDevicePrimaryCtxRetain, &context, device);
  absl::StatusOr<LinkBandwidth> result = Measure(driver, context, bytes);
  cuda::ReportLostError(
      cuda::Check(driver.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease"));
  return result;
}

}  // namespace tfmem
