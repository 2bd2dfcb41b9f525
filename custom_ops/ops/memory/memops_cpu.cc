// The MemOps on the CPU, where "device memory" is RAM and the other side is a file.
#include <memory>
#include <utility>

#include "custom_ops/ops/memory/file_mechanism.h"
#include "custom_ops/ops/memory/spill.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

class OffloadOp : public OpKernel {
 public:
  explicit OffloadOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
    OP_REQUIRES_OK(ctx, mechanism_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& source = ctx->input(0);
    SpillParts parts{{source.data(), source.TotalBytes()}};
    SetHandle(ctx,
              std::make_shared<FileTicket>(mechanism_.label(), mechanism_.options(),
                                           std::move(parts), Share(source)),
              source.dtype(), source.shape());
  }

 private:
  FileMechanism mechanism_;
};

class ReleaseOp : public AsyncOpKernel {
 public:
  explicit ReleaseOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const TicketHandle* handle = nullptr;
    FileTicket* ticket = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, GetTicket(ctx, 1, &handle, &ticket), done);
    ticket->WhenWritten(Finish(ctx, std::move(done)));
  }
};

class PrefetchOp : public OpKernel {
 public:
  explicit PrefetchOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, CheckMovable(dtype_));
    OP_REQUIRES_OK(ctx, ReadShape(ctx, &shape_));
  }

  void Compute(OpKernelContext* ctx) override {
    const TicketHandle* handle = nullptr;
    FileTicket* ticket = nullptr;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, 0, &handle, &ticket));
    OP_REQUIRES_OK(ctx, CheckPrefetch(*handle, dtype_, shape_));
    Tensor* target = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, handle->shape, &target));
    ticket->StartRead({{target->data(), target->TotalBytes()}}, Share(*target));
  }

 private:
  tensorflow::DataType dtype_;
  tensorflow::PartialTensorShape shape_;
};

class AwaitOp : public AsyncOpKernel {
 public:
  explicit AwaitOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const TicketHandle* handle = nullptr;
    FileTicket* ticket = nullptr;
    OP_REQUIRES_OK_ASYNC(ctx, GetTicket(ctx, 1, &handle, &ticket), done);
    ctx->set_output(0, ctx->input(0));
    ticket->WhenRead(ctx->input(0).data(), Finish(ctx, std::move(done)));
  }
};

REGISTER_KERNEL_BUILDER(Name("MemOpOffload").Device(DEVICE_CPU), OffloadOp);
REGISTER_KERNEL_BUILDER(Name("MemOpRelease").Device(DEVICE_CPU), ReleaseOp);
REGISTER_KERNEL_BUILDER(Name("MemOpPrefetch").Device(DEVICE_CPU), PrefetchOp);
REGISTER_KERNEL_BUILDER(Name("MemOpAwait").Device(DEVICE_CPU), AwaitOp);

}  // namespace
}  // namespace tfmem
