// The MemOps on a GPU: they only enqueue. See gpu_tickets.h for the order of the streams.
#include <memory>
#include <utility>

#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/memory/gpu_mechanism.h"
#include "custom_ops/ops/memory/gpu_tickets.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "custom_ops/ops/sizes.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

class GpuOffloadOp : public StreamOp {
 public:
  explicit GpuOffloadOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
    OP_REQUIRES_OK(ctx, mechanism_.Read(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const Tensor& source = ctx->input(0);
    OP_REQUIRES_VALUE(std::shared_ptr<Ticket> ticket, ctx, mechanism_.Start(source, compute));
    SetHandle(ctx, std::move(ticket), source.dtype(), source.shape());
  }

 private:
  GpuMechanism mechanism_;
};

class GpuReleaseOp : public StreamOp {
 public:
  explicit GpuReleaseOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const TicketHandle* handle = nullptr;
    GpuTicket* ticket = nullptr;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, 1, &handle, &ticket));
    OP_REQUIRES_OK(ctx, ticket->Release(compute));
  }
};

class GpuPrefetchOp : public StreamOp {
 public:
  explicit GpuPrefetchOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &dtype_));
    OP_REQUIRES_OK(ctx, CheckMovable(dtype_));
    OP_REQUIRES_OK(ctx, ReadShape(ctx, &shape_));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const TicketHandle* handle = nullptr;
    GpuTicket* ticket = nullptr;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, 0, &handle, &ticket));
    OP_REQUIRES_OK(ctx, CheckPrefetch(*handle, dtype_, shape_));
    if (Owner source = ticket->source()) {
      ctx->set_output(0, *static_cast<const Tensor*>(source.get()));
    } else {
      Tensor* allocated = nullptr;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(0, handle->shape, &allocated));
    }
    const Tensor& target = *ctx->mutable_output(0);
    OP_REQUIRES_OK(ctx, ticket->StartIn(compute, target.data(), Share(target)));
  }

 private:
  tensorflow::DataType dtype_;
  tensorflow::PartialTensorShape shape_;
};

class GpuAwaitOp : public StreamOp {
 public:
  explicit GpuAwaitOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const TicketHandle* handle = nullptr;
    GpuTicket* ticket = nullptr;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, 1, &handle, &ticket));
    OP_REQUIRES_OK(ctx, ticket->Await(compute, ctx->input(0).data()));
    ctx->set_output(0, ctx->input(0));
  }
};

class PreaccessOp : public StreamOp {
 public:
  explicit PreaccessOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bytes", &bytes_));
    OP_REQUIRES_OK(ctx, BuildShape({bytes_}, &shape_));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    Tensor block;
    OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_UINT8, shape_, &block));
    OP_REQUIRES_OK(ctx, MoveToDevice(compute, block.data(), bytes_, name()));
  }

 private:
  int64_t bytes_ = 0;
  tensorflow::TensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("MemOpOffload").Device(DEVICE_GPU).HostMemory("handle"), GpuOffloadOp);
REGISTER_KERNEL_BUILDER(Name("MemOpRelease").Device(DEVICE_GPU).HostMemory("handle"), GpuReleaseOp);
REGISTER_KERNEL_BUILDER(Name("MemOpPrefetch").Device(DEVICE_GPU).HostMemory("handle"),
                        GpuPrefetchOp);
REGISTER_KERNEL_BUILDER(Name("MemOpAwait").Device(DEVICE_GPU).HostMemory("handle"), GpuAwaitOp);
REGISTER_KERNEL_BUILDER(Name("MemOpPreaccess").Device(DEVICE_GPU), PreaccessOp);

}  // namespace
}  // namespace tfmem
