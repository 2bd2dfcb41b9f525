// TfmemMatMul on a GPU: cuts the operands into pairs of float16 and multiplies those. Waits for
// nothing.
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/matmul/matmul.h"
#include "custom_ops/ops/matmul/matmul_tiling.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

// As custom_ops/kernels/matmul_split.cuh and matmul.cuh have them.
constexpr int64_t kLineBytes = 128;
constexpr int64_t kSplitRows = 8;
constexpr int64_t kLargeTile = 128;

// The kernels' parameter: `Arguments` of matmul_split.cuh.
struct Arguments {
  int32_t rows, columns, depth, lines;
  void *left, *right, *unscale_rows, *unscale_columns;
  const float* bias;
  float* result;
  const float *left_floats, *right_floats;
  int32_t left_row, left_depth, right_column, right_depth;
  int32_t tiles, split_k;
  void *sums, *arrived;
};

class GpuMatMulOp : public OpKernel {
 public:
  explicit GpuMatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_a", &transpose_left_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_b", &transpose_right_));
    OP_REQUIRES_VALUE(std::vector<ProgramText> texts, ctx, ReadPrograms(ctx));
    OP_REQUIRES(ctx, texts.size() == images_.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "'", name(), "' (TfmemMatMul) has ", texts.size(), " programs for a GPU, ",
                    "expected ", images_.size(), ": run tfmem.optimize on the machine with this ",
                    "GPU, or place the op on the CPU")));
    for (size_t i = 0; i < images_.size(); ++i) {
      OP_REQUIRES_VALUE(KernelHeader header, ctx, KernelHeader::Parse(texts[i].header));
      OP_REQUIRES_VALUE(images_[i], ctx, ReadImage(&header, texts[i].code));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(cuda::Stream stream, ctx, ComputeStream(ctx));
    OP_REQUIRES_VALUE(MatMulCall call, ctx, PrepareMatMul(ctx, transpose_left_, transpose_right_));
    if (call.rows == 0 || call.columns == 0) return;
    OP_REQUIRES_VALUE(GpuLink * link, ctx, GpuLink::For(stream));
    OP_REQUIRES_OK(ctx, Load(link));
    OP_REQUIRES_OK(ctx, Enqueue(ctx, stream, call));
  }

 private:
  enum { kSplit, kLarge, kSmall };

  // Once: an op stays on its device.
  absl::Status Load(GpuLink* link) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < kernels_.size(); ++i) {
      if (kernels_[i] != nullptr) continue;
      absl::StatusOr<std::unique_ptr<GpuKernel>> kernel = GpuKernel::Load(link, images_[i]);
      if (absl::IsResourceExhausted(kernel.status())) return kernel.status();
      if (!kernel.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", name(), "' (TfmemMatMul) has no program that runs on this GPU (",
            kernel.status().message(), "): run tfmem.optimize on the machine with this GPU, or ",
            "place the op on the CPU"));
      }
      kernels_[i] = *std::move(kernel);
    }
    return absl::OkStatus();
  }

  absl::Status Enqueue(OpKernelContext* ctx, cuda::Stream stream, const MatMulCall& call) const {
    for (int64_t size : {call.rows, call.columns, call.depth}) {
      if (size > std::numeric_limits<int32_t>::max() - kLargeTile) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", name(), "' (TfmemMatMul) multiplies [", call.rows, ", ", call.depth,
                         "] by [", call.depth, ", ", call.columns, "]; its kernels count to 2^31"));
      }
    }
    const MatMulSizes shape{call.rows, call.depth, call.columns};
    const MatMulTiling tiling = BestTiling(shape, kernels_[kLarge]->processors());
    const int64_t lines = shape.lines(), tiles = shape.tiles(tiling.tile());
    // The pairs of both operands, the sums of parts, operands' inverse scales, counts.
    const Size left = Size(call.rows) * lines * kLineBytes;
    const Size right = Size(call.columns) * lines * kLineBytes;
    const int64_t sums_bytes = tiling.SumsBytes(shape);
    const Size words = Size(call.rows) + call.columns + tiles;
    TensorShape bytes;
    TFMEM_RETURN_IF_ERROR(
        CheckRange("the number of tiles", tiles * tiling.split_k, 0, kMostOfASize));
    TFMEM_RETURN_IF_ERROR(
        BuildShape({(left + right + sums_bytes + words * sizeof(float)).value()}, &bytes));
    const int64_t left_bytes = left.value(), right_bytes = right.value();
    Tensor memory;
    TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_UINT8, bytes, &memory));
    char* const base = static_cast<char*>(memory.data());
    char* const sums = base + left_bytes + right_bytes;
    float* const scales = reinterpret_cast<float*>(sums + sums_bytes);
    Arguments arguments{};
    arguments.rows = call.rows;
    arguments.columns = call.columns;
    arguments.depth = call.depth;
    arguments.lines = lines;
    arguments.left = base;
    arguments.right = base + left_bytes;
    arguments.unscale_rows = scales;
    arguments.unscale_columns = scales + call.rows;
    arguments.bias = call.bias;
    arguments.result = call.product;
    arguments.left_floats = call.left;
    arguments.right_floats = call.right;
    arguments.left_row = transpose_left_ ? 1 : call.depth;
    arguments.left_depth = transpose_left_ ? call.rows : 1;
    arguments.right_column = transpose_right_ ? call.depth : 1;
    arguments.right_depth = transpose_right_ ? 1 : call.columns;
    arguments.tiles = tiles;
    arguments.split_k = tiling.split_k;
    arguments.sums = sums;
    arguments.arrived = scales + call.rows + call.columns;
    const int64_t splits = Ceiling(call.rows, kSplitRows) + Ceiling(call.columns, kSplitRows);
    TFMEM_RETURN_IF_ERROR(kernels_[kSplit]->Launch(stream, {splits}, &arguments));
    return kernels_[tiling.small ? kSmall : kLarge]->Launch(stream, {tiles * tiling.split_k},
                                                            &arguments);
  }

  bool transpose_left_ = false;
  bool transpose_right_ = false;
  std::array<KernelImage, 3> images_;
  std::mutex mutex_;
  std::array<std::unique_ptr<GpuKernel>, 3> kernels_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemMatMul").Device(DEVICE_GPU), GpuMatMulOp);

}  // namespace
}  // namespace tfmem
