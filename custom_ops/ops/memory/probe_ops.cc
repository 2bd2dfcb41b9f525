// What the device's allocator says, on the CPU and on a GPU, and where it is made to put tensors.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/memory/gpu_link.h"
#include "custom_ops/ops/memory/probe.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::AllocatorStats;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;

// Whether the CPU's allocator counts bytes. The one that TensorFlow uses with oneDNN does, for
// blocks of 256 KiB and more; the plain one (oneDNN off, or not built in) claims zeroes for ever,
// also after EnableCPUAllocatorStats, because it cannot ask malloc for sizes.
bool CpuAllocatorCounts(tensorflow::Allocator* allocator) {
  constexpr size_t kAlignment = 64;
  constexpr size_t kBytes = 1 << 20;
  const std::optional<AllocatorStats> before = allocator->GetStats();
  void* block = allocator->AllocateRaw(kAlignment, kBytes);
  const std::optional<AllocatorStats> after = allocator->GetStats();
  allocator->DeallocateRaw(block);
  return before && after && before->bytes_in_use != after->bytes_in_use;
}

// Reads the statistics of ctx's device and, if `reset`, makes the bytes in use the new peak.
// Nothing where the device's allocator keeps none.
std::optional<AllocatorStats> ReadStats(OpKernelContext* ctx, bool reset) {
  tensorflow::Allocator* allocator = ctx->device()->GetAllocator({});
  if (ctx->device()->device_type() == tensorflow::DEVICE_CPU) {
    static const bool counts = CpuAllocatorCounts(allocator);  // one allocator serves all CPUs
    if (!counts) return std::nullopt;
  }
  std::optional<AllocatorStats> stats = allocator->GetStats();
  if (stats.has_value() && reset && !allocator->ClearStats()) return std::nullopt;
  return stats;
}

class ProbeOp : public OpKernel {
 public:
  explicit ProbeOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("run", &run_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("index", &index_));
    gpu_ = ctx->device_type() == tensorflow::DeviceType(DEVICE_GPU);
  }

  void Compute(OpKernelContext* ctx) override {
    absl::StatusOr<PooledEvent> reached = PooledEvent();
    if (gpu_) reached = MarkCompute(ctx);
    OP_REQUIRES_OK(ctx, reached.status());
    const std::optional<AllocatorStats> stats = ReadStats(ctx, /*reset=*/true);
    RecordProbe(run_, index_, stats ? stats->bytes_in_use : -1,
                stats ? stats->peak_bytes_in_use : -1, *std::move(reached));
  }

 private:
  static absl::StatusOr<PooledEvent> MarkCompute(OpKernelContext* ctx) {
    TFMEM_ASSIGN_OR_RETURN(cuda::Stream compute, ComputeStream(ctx));
    TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(compute));
    cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    return link->Mark(compute, /*timing=*/true);
  }

  int64_t run_ = 0;
  int64_t index_ = 0;
  bool gpu_ = false;
};

class StatsOp : public OpKernel {
 public:
  explicit StatsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("reset", &reset_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({3}), &output));
    auto values = output->flat<int64_t>();
    const std::optional<AllocatorStats> stats = ReadStats(ctx, reset_);
    values(0) = stats ? stats->bytes_in_use : -1;
    values(1) = stats ? stats->peak_bytes_in_use : -1;
    values(2) = stats ? stats->bytes_limit.value_or(-1) : -1;
  }

 private:
  bool reset_ = false;
};

class ChunksOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const std::vector<Chunk> chunks = AllocatorChunks(ctx);
    tensorflow::Tensor* output = nullptr;
    const tensorflow::TensorShape shape({static_cast<int64_t>(chunks.size()), 3});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &output));
    auto rows = output->matrix<int64_t>();
    for (size_t row = 0; row < chunks.size(); ++row) {
      rows(row, 0) =
          chunks[row].address - chunks[0].address;  // where it is, is no graph's business
      rows(row, 1) = chunks[row].bytes;
      rows(row, 2) = chunks[row].in_use;
    }
    OP_REQUIRES_VALUE(int64_t growth, ctx, Growth(ctx, chunks));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, tensorflow::TensorShape({}), &output));
    output->scalar<int64_t>()() = growth;
  }

 private:
  // An allocator that TensorFlow lets grow has few chunks at first.
  static absl::StatusOr<int64_t> Growth(OpKernelContext* ctx, const std::vector<Chunk>& chunks) {
    const std::optional<AllocatorStats> stats = ReadStats(ctx, /*reset=*/false);
    if (chunks.empty() || !stats || !stats->bytes_limit) return 0;
    int64_t growth = *stats->bytes_limit;
    for (const Chunk& chunk : chunks) growth -= chunk.bytes;
    if (ctx->device()->device_type() == DEVICE_GPU) {
      TFMEM_ASSIGN_OR_RETURN(int64_t free, FreeBytes(ctx));
      growth = std::min(growth, free);
    }
    return std::max<int64_t>(growth, 0);
  }

  // Free memory of the GPU; other processes may use the rest.
  static absl::StatusOr<int64_t> FreeBytes(OpKernelContext* ctx) {
    TFMEM_ASSIGN_OR_RETURN(cuda::Stream compute, ComputeStream(ctx));
    TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(compute));
    const cuda::Driver& driver = link->driver();
    cuda::ScopedContext current(driver, link->context());
    if (!current.status().ok()) return current.status();
    size_t free = 0, total = 0;
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuMemGetInfo_v2, &free, &total);
    return static_cast<int64_t>(free);
  }
};

class SharingOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, tensorflow::TensorShape({ctx->num_inputs()}), &output));
    auto first = output->flat<int64_t>();
    std::map<const void*, int64_t> firsts;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      first(i) = firsts.try_emplace(ctx->input(i).data(), i).first->second;
    }
  }
};

class ReserveOp : public OpKernel {
 public:
  explicit ReserveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> sizes;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sizes", &sizes));
    OP_REQUIRES(ctx, sizes.size() == static_cast<size_t>(num_outputs()),
                absl::InvalidArgumentError("count is not the number of sizes"));
    for (int64_t size : sizes) OP_REQUIRES_OK(ctx, BuildShape({size}, &shapes_.emplace_back()));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<tensorflow::Tensor> chunks(
        shapes_.size());  // freed at once when all guards are there
    for (size_t i = 0; i < shapes_.size(); ++i) {
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_UINT8, shapes_[i], &chunks[i]));
      tensorflow::Tensor* guard = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, tensorflow::TensorShape({1}), &guard));
    }
  }

 private:
  std::vector<tensorflow::TensorShape> shapes_;
};

class FillOp : public OpKernel {
 public:
  explicit FillOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t bytes = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bytes", &bytes));
    OP_REQUIRES_OK(ctx, BuildShape({bytes}, &shape_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::Tensor* filling = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape_, &filling));
  }

 private:
  tensorflow::TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("MemOpProbe").Device(DEVICE_CPU), ProbeOp);
REGISTER_KERNEL_BUILDER(Name("MemOpProbe").Device(DEVICE_GPU), ProbeOp);
REGISTER_KERNEL_BUILDER(Name("MemOpStats").Device(DEVICE_CPU), StatsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpStats").Device(DEVICE_GPU).HostMemory("stats"), StatsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpChunks").Device(DEVICE_CPU), ChunksOp);
REGISTER_KERNEL_BUILDER(Name("MemOpSharing").Device(DEVICE_CPU), SharingOp);
REGISTER_KERNEL_BUILDER(Name("MemOpSharing").Device(DEVICE_GPU).HostMemory("first"), SharingOp);
REGISTER_KERNEL_BUILDER(Name("MemOpReserve").Device(DEVICE_CPU), ReserveOp);
REGISTER_KERNEL_BUILDER(Name("MemOpReserve").Device(DEVICE_GPU), ReserveOp);
REGISTER_KERNEL_BUILDER(Name("MemOpFill").Device(DEVICE_CPU), FillOp);
REGISTER_KERNEL_BUILDER(Name("MemOpFill").Device(DEVICE_GPU), FillOp);
REGISTER_KERNEL_BUILDER(
    Name("MemOpChunks").Device(DEVICE_GPU).HostMemory("chunks").HostMemory("growth"), ChunksOp);

}  // namespace
}  // namespace tfmem
