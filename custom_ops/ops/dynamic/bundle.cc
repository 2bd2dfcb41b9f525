// TfmemBundle and TfmemUnbundle: small tensors in host memory that cross to another device as one.
// TensorFlow sends each tensor that crosses by itself, and wakes a thread for each.
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {
namespace {

using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

// For each tensor its number of axes, its sizes and its numbers, which begin at a multiple of 8.
constexpr int64_t kWord = sizeof(int64_t);

int64_t Padded(int64_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

absl::Status CheckCount(size_t shapes, int tensors) {
  if (static_cast<int>(shapes) == tensors) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "shapes has ", shapes, " shapes; expected one for each of ", tensors, " tensors"));
}

REGISTER_OP("TfmemBundle")
    .Input("tensors: T")
    .Output("bundle: uint8")
    .Attr("T: list(type) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc("Tensors of numbers, one behind the other, as TfmemUnbundle reads them.");

REGISTER_OP("TfmemUnbundle")
    .Input("bundle: uint8")
    .Output("tensors: T")
    .Attr("T: list(type) >= 1")
    .Attr("shapes: list(shape)")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TFMEM_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      TFMEM_RETURN_IF_ERROR(CheckCount(shapes.size(), c->num_outputs()));
      for (int i = 0; i < c->num_outputs(); ++i) {
        ShapeHandle shape;
        TFMEM_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        c->set_output(i, shape);
      }
      return absl::OkStatus();
    })
    .Doc("The tensors of a TfmemBundle; on a GPU, too, in host memory.");

class BundleOp : public OpKernel {
 public:
  explicit BundleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    for (const tensorflow::DataType type : ctx->input_types()) {
      OP_REQUIRES(ctx, tensorflow::DataTypeCanUseMemcpy(type),
                  absl::InvalidArgumentError(absl::StrCat("a bundle takes numbers, not ",
                                                          tensorflow::DataTypeString(type))));
    }
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  static absl::Status Run(OpKernelContext* ctx) {
    int64_t bytes = 0;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Tensor& tensor = ctx->input(i);
      bytes += (1 + tensor.dims()) * kWord + Padded(tensor.TotalBytes());
    }
    Tensor* bundle = nullptr;
    TFMEM_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({bytes}), &bundle));
    char* to = static_cast<char*>(bundle->data());
    const auto put = [&to](int64_t number) {
      std::memcpy(to, &number, kWord);
      to += kWord;
    };
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Tensor& tensor = ctx->input(i);
      put(tensor.dims());
      for (const int64_t size : tensor.shape().dim_sizes()) put(size);
      const int64_t length = tensor.TotalBytes();
      if (length > 0) std::memcpy(to, tensor.data(), length);
      std::memset(to + length, 0, Padded(length) - length);
      to += Padded(length);
    }
    return absl::OkStatus();
  }
};

class UnbundleOp : public OpKernel {
 public:
  explicit UnbundleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shapes", &shapes_));
    OP_REQUIRES_OK(ctx, CheckCount(shapes_.size(), ctx->num_outputs()));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) const {
    const Tensor& bundle = ctx->input(0);
    const char* from = static_cast<const char*>(bundle.data());
    int64_t left = bundle.TotalBytes();
    const auto damaged = [&](int output) {
      return absl::InvalidArgumentError(
          absl::StrCat("a bundle of ", bundle.TotalBytes(), " bytes does not have tensor ", output,
                       " of ", ctx->num_outputs(), "; give what TfmemBundle made"));
    };
    const auto take = [&](int64_t* number) {
      if (left < kWord) return false;
      std::memcpy(number, from, kWord);
      from += kWord;
      left -= kWord;
      return true;
    };
    for (int i = 0; i < ctx->num_outputs(); ++i) {
      int64_t axes = 0;
      if (!take(&axes) || axes < 0 || axes > TensorShape::MaxDimensions()) return damaged(i);
      std::vector<int64_t> sizes(axes);
      for (int64_t& size : sizes) {
        if (!take(&size)) return damaged(i);
      }
      TensorShape shape;
      if (!BuildShape(sizes, &shape).ok() || !shapes_[i].IsCompatibleWith(shape)) return damaged(i);
      const int64_t width = tensorflow::DataTypeSize(ctx->expected_output_dtype(i));
      if (width == 0 || shape.num_elements() > left / width) return damaged(i);
      const int64_t length = shape.num_elements() * width;
      if (Padded(length) > left) return damaged(i);
      Tensor* tensor = nullptr;
      TFMEM_RETURN_IF_ERROR(ctx->allocate_output(i, shape, &tensor));
      if (length > 0) std::memcpy(tensor->data(), from, length);
      from += Padded(length);
      left -= Padded(length);
    }
    return left == 0 ? absl::OkStatus() : damaged(ctx->num_outputs());
  }

  std::vector<tensorflow::PartialTensorShape> shapes_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemBundle").Device(tensorflow::DEVICE_CPU), BundleOp);
REGISTER_KERNEL_BUILDER(Name("TfmemUnbundle").Device(tensorflow::DEVICE_CPU), UnbundleOp);
REGISTER_KERNEL_BUILDER(
    Name("TfmemUnbundle").Device(tensorflow::DEVICE_GPU).HostMemory("bundle").HostMemory("tensors"),
    UnbundleOp);

}  // namespace
}  // namespace tfmem
