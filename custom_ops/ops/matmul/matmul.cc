// TfmemMatMul: what it is, and what it does on the CPU.
#define EIGEN_USE_THREADS

#include "custom_ops/ops/matmul/matmul.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpInputList;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

absl::Status MatMulShape(InferenceContext* ctx) {
  bool transpose_left = false;
  bool transpose_right = false;
  ShapeHandle left;
  ShapeHandle right;
  DimensionHandle depth;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("transpose_a", &transpose_left));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("transpose_b", &transpose_right));
  TFMEM_RETURN_IF_ERROR(ctx->WithRank(ctx->input(0), 2, &left));
  TFMEM_RETURN_IF_ERROR(ctx->WithRank(ctx->input(1), 2, &right));
  TFMEM_RETURN_IF_ERROR(ctx->Merge(ctx->Dim(left, transpose_left ? 0 : 1),
                                   ctx->Dim(right, transpose_right ? 1 : 0), &depth));
  ctx->set_output(0, ctx->Matrix(ctx->Dim(left, transpose_left ? 1 : 0),
                                 ctx->Dim(right, transpose_right ? 0 : 1)));
  return absl::OkStatus();
}

REGISTER_OP("TfmemMatMul")
    .Input("a: float")
    .Input("b: float")
    .Input("bias: num_args * float")
    .Output("product: float")
    .Attr("num_args: int >= 0 = 0")
    .Attr("transpose_a: bool = false")
    .Attr("transpose_b: bool = false")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .SetShapeFn(MatMulShape)
    .Doc(R"doc(
Multiplies matrices of float32, on a GPU's tensor cores too as accurately as float32.

a: [rows, depth], or [depth, rows] with transpose_a.
b: [depth, columns], or [columns, depth] with transpose_b.
bias: nothing, or one vector [columns] that is added to each row.
product: [rows, columns].
programs: GPU programs (custom_ops/matmul/kernels.py): what cuts the operands, large tiles, small ones.
images: for each program the function of the graph's library that holds its code.
)doc");

class MatMulOp : public OpKernel {
 public:
  explicit MatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_a", &transpose_left_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_b", &transpose_right_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(MatMulCall call, ctx, PrepareMatMul(ctx, transpose_left_, transpose_right_));
    if (call.rows == 0 || call.columns == 0) return;
    const auto matrix = [](auto* data, bool transposed, int64_t rows, int64_t columns) {
      if (transposed) std::swap(rows, columns);
      return Eigen::TensorMap<Eigen::Tensor<float, 2, Eigen::RowMajor>>(const_cast<float*>(data),
                                                                        rows, columns);
    };
    const auto left = matrix(call.left, transpose_left_, call.rows, call.depth);
    const auto right = matrix(call.right, transpose_right_, call.depth, call.columns);
    auto product = matrix(call.product, false, call.rows, call.columns);
    const std::array<Eigen::IndexPair<int>, 1> depth = {
        Eigen::IndexPair<int>(transpose_left_ ? 0 : 1, transpose_right_ ? 1 : 0)};
    const auto& device = ctx->eigen_device<Eigen::ThreadPoolDevice>();
    if (call.depth == 0) {
      product.setZero();  // which Eigen leaves out
    } else {
      product.device(device) = left.contract(right, depth);
    }
    if (call.bias == nullptr) return;
    const auto bias = matrix(call.bias, false, 1, call.columns);
    product.device(device) = product + bias.broadcast(std::array<int64_t, 2>{call.rows, 1});
  }

 private:
  bool transpose_left_ = false;
  bool transpose_right_ = false;
};

REGISTER_KERNEL_BUILDER(Name("TfmemMatMul").Device(DEVICE_CPU), MatMulOp);
REGISTER_KERNEL_BUILDER(Name("TfmemMatMul").Device(DEVICE_CPU).Label(kHostKernelLabel), MatMulOp);

}  // namespace

absl::StatusOr<MatMulCall> PrepareMatMul(OpKernelContext* ctx, bool transpose_left,
                                         bool transpose_right) {
  const Tensor& left = ctx->input(0);
  const Tensor& right = ctx->input(1);
  OpInputList biases;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("bias", &biases));
  const auto refused = [&](const char* what, const TensorShape& found, const std::string& wanted) {
    return absl::InvalidArgumentError(absl::StrCat(what, " of '", ctx->op_kernel().name(),
                                                   "' (TfmemMatMul) has shape ",
                                                   found.DebugString(), "; expected ", wanted));
  };
  if (left.dims() != 2) return refused("a", left.shape(), "a matrix");
  if (right.dims() != 2) return refused("b", right.shape(), "a matrix");
  MatMulCall call;
  call.rows = left.dim_size(transpose_left ? 1 : 0);
  call.depth = left.dim_size(transpose_left ? 0 : 1);
  call.columns = right.dim_size(transpose_right ? 0 : 1);
  if (right.dim_size(transpose_right ? 1 : 0) != call.depth) {
    return refused("b", right.shape(),
                   absl::StrCat(call.depth, transpose_right ? " columns" : " rows",
                                ", as a of shape ", left.shape().DebugString(), " has that depth"));
  }
  if (biases.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("'", ctx->op_kernel().name(), "' has ",
                                                   biases.size(), " biases; it takes one"));
  }
  if (biases.size() == 1) {
    if (biases[0].shape() != TensorShape({call.columns})) {
      return refused("bias", biases[0].shape(), absl::StrCat("[", call.columns, "]"));
    }
    call.bias = static_cast<const float*>(biases[0].data());
  }
  TensorShape shape;
  TFMEM_RETURN_IF_ERROR(BuildShape({call.rows, call.columns}, &shape));
  Tensor* product = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_output(0, shape, &product));
  call.left = static_cast<const float*>(left.data());
  call.right = static_cast<const float*>(right.data());
  call.product = static_cast<float*>(product->data());
  return call;
}

}  // namespace tfmem
