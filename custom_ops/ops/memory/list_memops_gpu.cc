// The MemOps of lists of tensors on a GPU: they only enqueue. See gpu_tickets.h for the order of
// the streams.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/ops/memory/gpu_mechanism.h"
#include "custom_ops/ops/memory/gpu_tickets.h"
#include "custom_ops/ops/memory/list_layout.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

// One ticket for each tensor that moved.
class ListGpuTicket : public Ticket {
 public:
  ListGpuTicket(std::string label, ListLayout layout)
      : Ticket(std::move(label)), layout(std::move(layout)) {}
  const ListLayout layout;
  std::vector<std::shared_ptr<GpuTicket>> tensors;
};

class GpuOffloadListsOp : public StreamOp {
 public:
  explicit GpuOffloadListsOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, mechanism_.Read(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    ListLayout layout;
    std::vector<Tensor> moving;
    OP_REQUIRES_OK(ctx, layout.Read(ctx, &moving));
    auto ticket = std::make_shared<ListGpuTicket>(name(), std::move(layout));
    for (const Tensor& tensor : moving) {
      OP_REQUIRES_VALUE(std::shared_ptr<GpuTicket> one, ctx, mechanism_.Start(tensor, compute));
      ticket->tensors.push_back(std::move(one));
    }
    SetHandle(ctx, std::move(ticket), tensorflow::DT_VARIANT, {});
  }

 private:
  GpuMechanism mechanism_;
};

class GpuReleaseListsOp : public StreamOp {
 public:
  using StreamOp::StreamOp;

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const TicketHandle* handle = nullptr;
    ListGpuTicket* ticket = nullptr;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, ctx->num_inputs() - 1, &handle, &ticket));
    for (const auto& one : ticket->tensors) OP_REQUIRES_OK(ctx, one->Release(compute));
  }
};

class GpuPrefetchListsOp : public StreamOp {
 public:
  using StreamOp::StreamOp;

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const TicketHandle* handle = nullptr;
    ListGpuTicket* ticket = nullptr;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, 0, &handle, &ticket));
    std::vector<Tensor> arriving;
    for (size_t place = 0; place < ticket->tensors.size(); ++place) {
      Tensor& tensor = arriving.emplace_back();
      if (Owner source = ticket->tensors[place]->source()) {
        tensor = *static_cast<const Tensor*>(source.get());
      } else {
        const ListLayout::Moved& moved = ticket->layout.moved()[place];
        OP_REQUIRES_OK(ctx, ctx->allocate_temp(moved.dtype, moved.shape, &tensor));
      }
    }
    OP_REQUIRES_OK(ctx, ticket->layout.Write(ctx, arriving));
    for (size_t place = 0; place < arriving.size(); ++place) {
      const Tensor& target = arriving[place];
      OP_REQUIRES_OK(ctx, ticket->tensors[place]->StartIn(compute, target.data(), Share(target)));
    }
  }
};

class GpuAwaitListsOp : public StreamOp {
 public:
  using StreamOp::StreamOp;

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    const TicketHandle* handle = nullptr;
    ListGpuTicket* ticket = nullptr;
    std::vector<const void*> where;
    OP_REQUIRES_OK(ctx, GetTicket(ctx, ctx->num_inputs() - 1, &handle, &ticket));
    OP_REQUIRES_OK(ctx, ticket->layout.Find(ctx, &where));
    for (size_t place = 0; place < where.size(); ++place) {
      OP_REQUIRES_OK(ctx, ticket->tensors[place]->Await(compute, where[place]));
    }
    for (int i = 0; i < ctx->num_outputs(); ++i) ctx->set_output(i, ctx->input(i));
  }
};

// As TensorFlow's own ops do, these leave lists where variants are by default, and allocate them on
// the host.
REGISTER_KERNEL_BUILDER(Name("MemOpOffloadLists").Device(DEVICE_GPU).HostMemory("handle"),
                        GpuOffloadListsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpReleaseLists").Device(DEVICE_GPU).HostMemory("handle"),
                        GpuReleaseListsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpPrefetchLists").Device(DEVICE_GPU).HostMemory("handle"),
                        GpuPrefetchListsOp);
REGISTER_KERNEL_BUILDER(Name("MemOpAwaitLists").Device(DEVICE_GPU).HostMemory("handle"),
                        GpuAwaitListsOp);

}  // namespace
}  // namespace tfmem
