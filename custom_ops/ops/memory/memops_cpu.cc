// The MemOps on the CPU, where "device memory" is RAM and the other side is a file. They are the
// same for a tensor and for lists of tensors, whose tensors are one file.
#include <memory>
#include <utility>
#include <vector>

#include "custom_ops/ops/memory/file_mechanism.h"
#include "custom_ops/ops/memory/list_layout.h"
#include "custom_ops/ops/memory/spill.h"
#include "custom_ops/ops/memory/tensor_layout.h"
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

// A ticket that knows what it moves.
template <typename Layout>
class FileTicketOf : public FileTicket {
 public:
  FileTicketOf(const FileMechanism& mechanism, SpillParts parts, Owner owner, Layout layout)
      : FileTicket(mechanism.label(), mechanism.options(), std::move(parts), std::move(owner)),
        layout(std::move(layout)) {}
  const Layout layout;
};

SpillParts PartsOf(const std::vector<Tensor>& tensors) {
  SpillParts parts;
  for (const Tensor& tensor : tensors) parts.push_back({tensor.data(), tensor.TotalBytes()});
  return parts;
}

Owner ShareAll(std::vector<Tensor> tensors) {
  return std::make_shared<std::vector<Tensor>>(std::move(tensors));
}

template <typename Layout>
class OffloadOp : public OpKernel {
 public:
  explicit OffloadOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, typename Layout::Attributes().Read(ctx));
    OP_REQUIRES_OK(ctx, mechanism_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    Layout layout;
    std::vector<Tensor> moving;
    OP_REQUIRES_OK(ctx, layout.Read(ctx, &moving));
    SpillParts parts = PartsOf(moving);
    OP_REQUIRES_OK(ctx, SetHandle(ctx, std::make_shared<FileTicketOf<Layout>>(
                                           mechanism_, std::move(parts),
                                           ShareAll(std::move(moving)), std::move(layout))));
  }

 private:
  FileMechanism mechanism_;
};

template <typename Layout>
class ReleaseOp : public AsyncOpKernel {
 public:
  explicit ReleaseOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, typename Layout::Attributes().Read(ctx));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto ticket = GetTicket<FileTicketOf<Layout>>(ctx, ctx->num_inputs() - 1);
    OP_REQUIRES_OK_ASYNC(ctx, ticket.status(), done);
    (*ticket)->WhenWritten(Finish(ctx, std::move(done)));
  }
};

template <typename Layout>
class PrefetchOp : public OpKernel {
 public:
  explicit PrefetchOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, attributes_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(auto* ticket, ctx, GetTicket<FileTicketOf<Layout>>(ctx, 0));
    OP_REQUIRES_OK(ctx, attributes_.CheckPrefetch(ticket->layout, ticket->label()));
    std::vector<Tensor> arriving(ticket->layout.size());
    for (size_t place = 0; place < arriving.size(); ++place) {
      OP_REQUIRES_OK(ctx, ticket->layout.Allocate(ctx, place, &arriving[place]));
    }
    OP_REQUIRES_OK(ctx, ticket->layout.Write(ctx, arriving));
    SpillParts parts = PartsOf(arriving);
    ticket->StartRead(std::move(parts), ShareAll(std::move(arriving)));
  }

 private:
  typename Layout::Attributes attributes_;
};

template <typename Layout>
class AwaitOp : public AsyncOpKernel {
 public:
  explicit AwaitOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, typename Layout::Attributes().Read(ctx));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto ticket = GetTicket<FileTicketOf<Layout>>(ctx, ctx->num_inputs() - 1);
    OP_REQUIRES_OK_ASYNC(ctx, ticket.status(), done);
    std::vector<const void*> where;
    OP_REQUIRES_OK_ASYNC(ctx, (*ticket)->layout.Find(ctx, &where), done);
    for (int i = 0; i < ctx->num_outputs(); ++i) ctx->set_output(i, ctx->input(i));
    (*ticket)->WhenRead(where.empty() ? nullptr : where.front(), Finish(ctx, std::move(done)));
  }
};

#define TFMEM_REGISTER(suffix, Layout)                                                          \
  REGISTER_KERNEL_BUILDER(Name("MemOpOffload" suffix).Device(DEVICE_CPU), OffloadOp<Layout>);   \
  REGISTER_KERNEL_BUILDER(Name("MemOpRelease" suffix).Device(DEVICE_CPU), ReleaseOp<Layout>);   \
  REGISTER_KERNEL_BUILDER(Name("MemOpPrefetch" suffix).Device(DEVICE_CPU), PrefetchOp<Layout>); \
  REGISTER_KERNEL_BUILDER(Name("MemOpAwait" suffix).Device(DEVICE_CPU), AwaitOp<Layout>);
TFMEM_REGISTER("", TensorLayout)
TFMEM_REGISTER("Lists", ListLayout)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
