#include "custom_ops/ops/matmul/gpu_matmul.h"

#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/matmul/matmul_tiling.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

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

}  // namespace

absl::StatusOr<std::unique_ptr<GpuMatMul>> GpuMatMul::Create(OpKernelConstruction* ctx) {
  std::unique_ptr<GpuMatMul> made(new GpuMatMul);
  made->name_ = ctx->def().name();
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("transpose_a", &made->transpose_left_));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("transpose_b", &made->transpose_right_));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<ProgramText> texts, ReadPrograms(ctx));
  made->has_programs_ = !texts.empty();
  if (!made->has_programs_) return made;
  if (texts.size() != made->images_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", made->name_, "' (TfmemMatMul) has ", texts.size(), " programs for a GPU, expected ",
        made->images_.size(), " or none: ", kOptimizeHere));
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    TFMEM_ASSIGN_OR_RETURN(KernelHeader header, KernelHeader::Parse(texts[i].header));
    TFMEM_ASSIGN_OR_RETURN(made->images_[i], ReadImage(&header, texts[i].code));
  }
  return made;
}

absl::Status GpuMatMul::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(const MatMulCall call,
                         PrepareMatMul(ctx, transpose_left_, transpose_right_));
  if (call.rows == 0 || call.columns == 0) return absl::OkStatus();
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  const absl::Status loaded = Load(link);
  if (absl::IsFailedPrecondition(loaded)) {
    HostCopies copies(ctx, link, stream);
    return host_.Run(ctx, &copies, loaded);
  }
  TFMEM_RETURN_IF_ERROR(loaded);
  return Enqueue(ctx, stream, call);
}

// Once: an op stays on its device. FailedPrecondition if that runs none of the programs.
absl::Status GpuMatMul::Load(GpuLink* link) {
  if (!has_programs_) return NoProgram(link);
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < kernels_.size(); ++i) {
    if (kernels_[i] != nullptr) continue;
    TFMEM_ASSIGN_OR_RETURN(kernels_[i], GpuKernel::Load(link, images_[i]));
  }
  return absl::OkStatus();
}

absl::Status GpuMatMul::Enqueue(OpKernelContext* ctx, cuda::Stream stream,
                                const MatMulCall& call) const {
  for (int64_t size : {call.rows, call.columns, call.depth}) {
    if (size > std::numeric_limits<int32_t>::max() - kLargeTile) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", name_, "' (TfmemMatMul) multiplies [", call.rows, ", ", call.depth,
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
  TFMEM_RETURN_IF_ERROR(CheckRange("the number of tiles", tiles * tiling.split_k, 0, kMostOfASize));
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

}  // namespace tfmem
