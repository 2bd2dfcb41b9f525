// One tensor that moves: what list_layout.h is for lists of tensors.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfmem {

// Checks an attribute T, in an op that is constructed, or whose shapes are inferred: eager calls
// infer none. Types whose elements are more than their bytes are refused.
template <typename Context>
absl::Status CheckMovableType(Context* ctx) {
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype));
  if (tensorflow::DataTypeCanUseMemcpy(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tfmem moves tensors of fixed-size types, got ",
                                                 tensorflow::DataTypeString(dtype)));
}

// A shape that is known in part, from a graph; InvalidArgument if it is none.
template <typename Context>
absl::Status ReadShape(Context* ctx, tensorflow::PartialTensorShape* shape) {
  tensorflow::TensorShapeProto proto;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("shape", &proto));
  return tensorflow::PartialTensorShape::BuildPartialTensorShape(proto, shape);
}

class TensorLayout {
 public:
  // What the ops say of the tensor in their attributes.
  class Attributes {
   public:
    absl::Status Read(tensorflow::OpKernelConstruction* ctx) {
      TFMEM_RETURN_IF_ERROR(CheckMovableType(ctx));
      TFMEM_RETURN_IF_ERROR(ctx->GetAttr("T", &dtype_));
      return ctx->HasAttr("shape") ? ReadShape(ctx, &shape_) : absl::OkStatus();
    }
    // Whether a MemOpPrefetch with these can give back what was offloaded.
    absl::Status CheckPrefetch(const TensorLayout& offloaded, const std::string& label) const {
      if (offloaded.dtype_ == dtype_ && shape_.IsCompatibleWith(offloaded.shape_)) {
        return absl::OkStatus();
      }
      return absl::InvalidArgumentError(absl::StrCat(
          "'", label, "' was offloaded as ", tensorflow::DataTypeString(offloaded.dtype_),
          offloaded.shape_.DebugString(), ", but is prefetched as ",
          tensorflow::DataTypeString(dtype_), shape_.DebugString()));
    }

   private:
    tensorflow::DataType dtype_ = tensorflow::DT_INVALID;
    tensorflow::PartialTensorShape shape_;
  };

  absl::Status Read(tensorflow::OpKernelContext* ctx, std::vector<tensorflow::Tensor>* moving) {
    moving->push_back(ctx->input(0));
    dtype_ = ctx->input(0).dtype();
    shape_ = ctx->input(0).shape();
    return absl::OkStatus();
  }

  size_t size() const { return 1; }
  // Memory for the tensor, which is the op's output.
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, size_t,
                        tensorflow::Tensor* tensor) const {
    tensorflow::Tensor* output = nullptr;
    TFMEM_RETURN_IF_ERROR(ctx->allocate_output(0, shape_, &output));
    *tensor = *output;
    return absl::OkStatus();
  }
  absl::Status Write(tensorflow::OpKernelContext* ctx,
                     const std::vector<tensorflow::Tensor>& arrived) const {
    if (ctx->mutable_output(0) == nullptr) ctx->set_output(0, arrived[0]);
    return absl::OkStatus();
  }
  absl::Status Find(tensorflow::OpKernelContext* ctx, std::vector<const void*>* where) const {
    where->assign(1, ctx->input(0).data());
    return absl::OkStatus();
  }

 private:
  tensorflow::DataType dtype_ = tensorflow::DT_INVALID;
  tensorflow::TensorShape shape_;
};

}  // namespace tfmem
