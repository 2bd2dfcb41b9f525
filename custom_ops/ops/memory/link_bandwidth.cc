#include "custom_ops/ops/memory/link_bandwidth.h"

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/ops/cuda/cuda_driver.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int kWarmUps = 1;
constexpr int kCopies = 5;

// One direction: a stream, a buffer on either side and the events around the copies.
class Lane {
 public:
  explicit Lane(const cuda::Driver& driver) : driver_(driver) {}
  ~Lane() { Close(); }
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

  // Frees all, in the context in which it was opened; nothing is left for the destructor.
  void Close() {
    // What was not made is null, which these refuse.
    if (stream_ != nullptr) driver_.cuStreamSynchronize(stream_);
    if (start_ != nullptr) driver_.cuEventDestroy_v2(start_);
    if (end_ != nullptr) driver_.cuEventDestroy_v2(end_);
    if (stream_ != nullptr) driver_.cuStreamDestroy_v2(stream_);
    if (host_ != nullptr) driver_.cuMemFreeHost(host_);
    if (device_ != 0) driver_.cuMemFree_v2(device_);
    stream_ = nullptr;
    start_ = end_ = nullptr;
    host_ = nullptr;
    device_ = 0;
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
  TFMEM_RETURN_IF_ERROR(out.Open(bytes));
  TFMEM_RETURN_IF_ERROR(in.Open(bytes));

  TFMEM_RETURN_IF_ERROR(out.Enqueue(/*to_host=*/true));
  TFMEM_ASSIGN_OR_RETURN(double to_host, out.BytesPerSecond());

  TFMEM_RETURN_IF_ERROR(in.Enqueue(/*to_host=*/false));
  TFMEM_ASSIGN_OR_RETURN(double to_device, in.BytesPerSecond());

  TFMEM_RETURN_IF_ERROR(out.Enqueue(/*to_host=*/true));
  TFMEM_RETURN_IF_ERROR(in.Enqueue(/*to_host=*/false));
  TFMEM_ASSIGN_OR_RETURN(double both_to_host, out.BytesPerSecond());
  TFMEM_ASSIGN_OR_RETURN(double both_to_device, in.BytesPerSecond());
  return LinkBandwidth{to_host, to_device, both_to_host, both_to_device};
}

// One of several GPUs, whose link is busy in both directions.
class BusyLink {
 public:
  BusyLink(const cuda::Driver& driver, cuda::Context context)
      : driver_(driver), context_(context), out_(driver), in_(driver) {}

  absl::Status Open(size_t bytes) {
    return InContext([&]() -> absl::Status {
      TFMEM_RETURN_IF_ERROR(out_.Open(bytes));
      return in_.Open(bytes);
    });
  }

  absl::Status Start() {
    return InContext([&]() -> absl::Status {
      TFMEM_RETURN_IF_ERROR(out_.Enqueue(/*to_host=*/true));
      return in_.Enqueue(/*to_host=*/false);
    });
  }

  absl::StatusOr<BusyBandwidth> Wait() {
    BusyBandwidth found = {};
    TFMEM_RETURN_IF_ERROR(InContext([&]() -> absl::Status {
      TFMEM_ASSIGN_OR_RETURN(found.to_host, out_.BytesPerSecond());
      TFMEM_ASSIGN_OR_RETURN(found.to_device, in_.BytesPerSecond());
      return absl::OkStatus();
    }));
    return found;
  }

  void Close() {
    cuda::ReportLostError(InContext([&] {
      out_.Close();
      in_.Close();
      return absl::OkStatus();
    }));
  }

 private:
  template <typename Function>
  absl::Status InContext(Function function) {
    cuda::ScopedContext current(driver_, context_);
    if (!current.status().ok()) return current.status();
    return function();
  }

  const cuda::Driver& driver_;
  const cuda::Context context_;
  Lane out_;
  Lane in_;
};

absl::StatusOr<std::vector<BusyBandwidth>> MeasureTogether(
    const std::vector<std::unique_ptr<BusyLink>>& links, size_t bytes) {
  // To allocate pinned memory takes longer than to copy: all is there before the first copy.
  for (const auto& link : links) TFMEM_RETURN_IF_ERROR(link->Open(bytes));
  for (const auto& link : links) TFMEM_RETURN_IF_ERROR(link->Start());
  std::vector<BusyBandwidth> found;
  for (const auto& link : links) {
    TFMEM_ASSIGN_OR_RETURN(found.emplace_back(), link->Wait());
  }
  return found;
}

}  // namespace

absl::StatusOr<LinkBandwidth> MeasureLinkBandwidth(int ordinal, size_t bytes) {
  TFMEM_ASSIGN_OR_RETURN(const cuda::Driver* loaded, cuda::LoadDriver());
  const cuda::Driver& driver = *loaded;
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

absl::StatusOr<std::vector<BusyBandwidth>> MeasureLinksTogether(absl::Span<const int> ordinals,
                                                                size_t bytes) {
  TFMEM_ASSIGN_OR_RETURN(const cuda::Driver* loaded, cuda::LoadDriver());
  const cuda::Driver& driver = *loaded;
  std::vector<cuda::Device> retained;
  std::vector<std::unique_ptr<BusyLink>> links;
  absl::StatusOr<std::vector<BusyBandwidth>> result =
      [&]() -> absl::StatusOr<std::vector<BusyBandwidth>> {
    for (const int ordinal : ordinals) {
      cuda::Device device = 0;
      cuda::Context context = nullptr;
      TFMEM_CUDA_RETURN_IF_ERROR(driver, cuDeviceGet, &device, ordinal);
      TFMEM_CUDA_RETURN_IF_ERROR(driver, cuDevicePrimaryCtxRetain, &context, device);
      retained.push_back(device);
      links.push_back(std::make_unique<BusyLink>(driver, context));
    }
    return MeasureTogether(links, bytes);
  }();
  for (const auto& link : links) link->Close();
  for (const cuda::Device device : retained) {
    cuda::ReportLostError(
        cuda::Check(driver.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease"));
  }
  return result;
}

}  // namespace tfmem
