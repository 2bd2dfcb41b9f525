// The MemOps of lists of tensors, which loops fill for their gradients: interfaces, and kernels for
// the CPU.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/ops/memory/file_mechanism.h"
#include "custom_ops/ops/memory/list_layout.h"
#include "custom_ops/ops/memory/spill.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::shape_inference::InferenceContext;

absl::Status ScalarShapes(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("MemOpOffloadLists")
    .Input("lists: N * variant")
    .Output("handle: variant")
    .Attr("N: int >= 1")
    .Attr("mechanism: {'auto', 'copy', 'managed', 'file'} = 'auto'")
    .Attr("label: string = ''")
    .Attr("spill_key: string = ''")
    .Attr("spill_budget: int >= 0 = 0")
    .Attr("host_budget: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarShapes)
    .Doc(R"doc(
Starts moving the tensors of lists out of device memory, as MemOpOffload does of one tensor.

A tensor that several of the lists hold moves once. One that is held elsewhere, too, stays.

lists: of tensors (TensorList); they must not change before MemOpReleaseLists.
)doc");

REGISTER_OP("MemOpReleaseLists")
    .Input("lists: N * variant")
    .Input("handle: variant")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Waits until offloaded lists are out, as MemOpRelease does; the op is the last to use them.
)doc");

REGISTER_OP("MemOpPrefetchLists")
    .Input("handle: variant")
    .Output("back: N * variant")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ScalarShapes)
    .Doc(R"doc(
Allocates device memory and starts moving the tensors of lists back, as MemOpPrefetch does.

back: only MemOpAwaitLists may use them.
)doc");

REGISTER_OP("MemOpAwaitLists")
    .Input("lists: N * variant")
    .Input("handle: variant")
    .Output("back: N * variant")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ScalarShapes)
    .Doc(R"doc(
Waits until the tensors of prefetched lists are there, as MemOpAwait does.
)doc");

// A ticket of lists is one of its mechanism's, and knows what is in them.
class ListFileTicket : public FileTicket {
 public:
  ListFileTicket(std::string label, const SpillOptions& options, SpillParts parts, Owner owner,
                 ListLayout layout)
      : FileTicket(std::move(label), options, std::move(parts), std::move(owner)),
        layout(std::move(layout)) {}
  const ListLayout layout;
};

SpillParts PartsOf(const std::vector<Tensor>& tensors) {
  SpillParts parts;
  for (const Tensor& tensor : tensors) parts.push_back({tensor.data(), tensor.TotalBytes()});
  return parts;
}

Owner ShareAll(std::vector<Tensor> tensors) {
  return std::make_shared<std::vector<Tensor>>(std::move(tensors));
}

absl::Status AllocateMoved(OpKernelContext* ctx, const ListLayout& layout,
                           std::vector<Tensor>* tensors) {
  for (const ListLayout::Moved& moved : layout.moved()) {
    TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(moved.dtype, moved.shape, &tensors->emplace_back()));
  }
  return absl::OkStatus();
}

class OffloadListsOp : public OpKernel {
 public:
  explicit OffloadListsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, mechanism_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    ListLayout layout;
    std::vector<Tensor> moving;
    OP_REQUIRES_OK(ctx, layout.Read(ctx, &moving));
    SpillParts parts = PartsOf(moving);
    SetHandle(
        ctx,
        std::make_shared<ListFileTicket>(mechanism_.label(), mechanism_.options(), std::move(parts),
                                         ShareAll(std::move(moving)), std::move(layout)),
        tensorflow::DT_VARIANT, {});
  }

 private:
  FileMechanism mechanism_;
};

class ReleaseListsOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const TicketHandle* handle = nullptr;
    ListFileTicket* ticket = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, GetTicket(ctx, ctx->num_inputs() - 1, &handle, &ticket), done);
    ticket->WhenWritten(Finish(ctx, std::move(done)));
  }
};

class PrefetchListsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const TicketHandle* handle = nullptr;
    ListFileTicket* ticket = nullptr;
    std::vector<Tensor> arriving;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, 0, &handle, &ticket));
    OP_REQUIRES_OK(ctx, AllocateMoved(ctx, ticket->layout, &arriving));
    OP_REQUIRES_OK(ctx, ticket->layout.Write(ctx, arriving));
    SpillParts parts = PartsOf(arriving);
    ticket->StartRead(std::move(parts), ShareAll(std::move(arriving)));
  }
};

class AwaitListsOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const TicketHandle* handle = nullptr;
    ListFileTicket* ticket = nullptr;
    std::vector<const void*> where;
    OP_REQUIRES_OK_ASYNC(ctx, GetTicket(ctx, ctx->num_inputs() - 1, &handle, &ticket), done);
    OP_REQUIRES_OK_ASYNC(ctx, ticket->layout.Find(ctx, &where), done);
    for (int i = 0; i < ctx->num_outputs(); ++i) ctx->set_output(i, ctx->input(i));
    ticket->WhenRead(where.empty() ? nullptr : where.front(), Finish(ctx, std::move(done)));
  }
};

REGISTER_KERNEL_BUILDER(Name("MemOpOffloadLists").Device(DEVICE_CPU), OffloadListsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpReleaseLists").Device(DEVICE_CPU), ReleaseListsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpPrefetchLists").Device(DEVICE_CPU), PrefetchListsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpAwaitLists").Device(DEVICE_CPU), AwaitListsOp);
}  // namespace
}  // namespace tfmem
