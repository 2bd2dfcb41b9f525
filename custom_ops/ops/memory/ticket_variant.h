// The value inside a MemOp's `handle` tensor.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/memory/ticket.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace tfmem {

struct TicketHandle {
  std::shared_ptr<Ticket> ticket;
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  tensorflow::TensorShape shape;

  std::string TypeName() const { return "tfmem::TicketHandle"; }
  std::string DebugString() const {
    return absl::StrCat("offloaded tensor '", ticket ? ticket->label() : "", "'");
  }
  // A ticket means something in this process and this step only: it encodes as nothing, and what
  // is decoded is a handle without a ticket, which every MemOp refuses.
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

inline Owner Share(const tensorflow::Tensor& tensor) {
  return std::make_shared<tensorflow::Tensor>(tensor);
}

// Puts a new handle for `ticket` into output 0.
inline void SetHandle(tensorflow::OpKernelContext* ctx, std::shared_ptr<Ticket> ticket,
                      tensorflow::DataType dtype, const tensorflow::TensorShape& shape) {
  tensorflow::Tensor* handle = nullptr;
  OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({}), &handle));
  handle->scalar<tensorflow::Variant>()() = TicketHandle{std::move(ticket), dtype, shape};
}

// Reads input `index` as a handle whose ticket is of type T.
template <typename T>
absl::Status GetTicket(tensorflow::OpKernelContext* ctx, int index, const TicketHandle** handle,
                       T** ticket) {
  const tensorflow::Tensor& tensor = ctx->input(index);
  if (tensor.dtype() == tensorflow::DT_VARIANT && tensor.NumElements() == 1) {
    *handle = tensor.flat<tensorflow::Variant>()(0).get<TicketHandle>();
    if (*handle != nullptr) {
      *ticket = dynamic_cast<T*>((*handle)->ticket.get());
      if (*ticket != nullptr) return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      ctx->op_kernel().type_string(), " '", ctx->op_kernel().name(), "' got ",
      tensor.SummarizeValue(1),
      " as its handle, expected the output of a MemOpOffload on the same kind of device"));
}

// Refuses types whose elements are more than their bytes.
inline absl::Status CheckMovable(tensorflow::DataType dtype) {
  if (tensorflow::DataTypeCanUseMemcpy(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tfmem moves tensors of fixed-size types, got ",
                                                 tensorflow::DataTypeString(dtype)));
}

// Checks an attribute T, in an op that is constructed, or whose shapes are inferred: eager calls
// infer none.
template <typename Context>
absl::Status CheckMovableType(Context* ctx) {
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  absl::Status status = ctx->GetAttr("T", &dtype);
  return status.ok() ? CheckMovable(dtype) : status;
}

// A shape that is known in part, from a graph; InvalidArgument if it is none.
template <typename Context>
absl::Status ReadShape(Context* ctx, tensorflow::PartialTensorShape* shape) {
  tensorflow::TensorShapeProto proto;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("shape", &proto));
  return tensorflow::PartialTensorShape::BuildPartialTensorShape(proto, shape);
}

// Whether a MemOpPrefetch with these attributes can give back what `handle` names.
inline absl::Status CheckPrefetch(const TicketHandle& handle, tensorflow::DataType dtype,
                                  const tensorflow::PartialTensorShape& shape) {
  if (handle.dtype == dtype && shape.IsCompatibleWith(handle.shape)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "'", handle.ticket->label(), "' was offloaded as ", tensorflow::DataTypeString(handle.dtype),
      handle.shape.DebugString(), ", but is prefetched as ", tensorflow::DataTypeString(dtype),
      shape.DebugString()));
}

}  // namespace tfmem
