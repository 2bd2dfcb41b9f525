// The value inside a MemOp's `handle` tensor.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
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
inline absl::Status SetHandle(tensorflow::OpKernelContext* ctx, std::shared_ptr<Ticket> ticket) {
  tensorflow::Tensor* handle = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_output(0, tensorflow::TensorShape({}), &handle));
  handle->scalar<tensorflow::Variant>()() = TicketHandle{std::move(ticket)};
  return absl::OkStatus();
}

// Reads input `index` as a handle whose ticket is of type T.
template <typename T>
absl::StatusOr<T*> GetTicket(tensorflow::OpKernelContext* ctx, int index) {
  const tensorflow::Tensor& tensor = ctx->input(index);
  if (tensor.dtype() == tensorflow::DT_VARIANT && tensor.NumElements() == 1) {
    const auto* handle = tensor.flat<tensorflow::Variant>()(0).get<TicketHandle>();
    T* ticket = handle == nullptr ? nullptr : dynamic_cast<T*>(handle->ticket.get());
    if (ticket != nullptr) return ticket;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      ctx->op_kernel().type_string(), " '", ctx->op_kernel().name(), "' got ",
      tensor.SummarizeValue(1),
      " as its handle, expected the output of a MemOpOffload on the same kind of device"));
}

}  // namespace tfmem
