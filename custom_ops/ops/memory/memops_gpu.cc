// The MemOps on a GPU: they only enqueue. See gpu_tickets.h for the order of the streams. They are
// the same for a tensor and for lists of tensors.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/memory/gpu_mechanism.h"
#include "custom_ops/ops/memory/gpu_tickets.h"
#include "custom_ops/ops/memory/list_layout.h"
#include "custom_ops/ops/memory/tensor_layout.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "custom_ops/ops/sizes.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

// What moves as one: a ticket for each tensor.
template <typename Layout>
class GpuTickets : public Ticket {
 public:
  GpuTickets(const std::string& label, Layout layout) : Ticket(label), layout(std::move(layout)) {}
  const Layout layout;
  std::vector<std::shared_ptr<GpuTicket>> tensors;
};

template <typename Layout>
class GpuOffloadOp : public StreamOp {
 public:
  explicit GpuOffloadOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, typename Layout::Attributes().Read(ctx));
    OP_REQUIRES_OK(ctx, mechanism_.Read(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    Layout layout;
    std::vector<Tensor> moving;
    OP_REQUIRES_OK(ctx, layout.Read(ctx, &moving));
    auto ticket = std::make_shared<GpuTickets<Layout>>(mechanism_.label(), std::move(layout));
    for (const Tensor& tensor : moving) {
      OP_REQUIRES_VALUE(std::shared_ptr<GpuTicket> one, ctx, mechanism_.Start(tensor, compute));
      ticket->tensors.push_back(std::move(one));
    }
    OP_REQUIRES_OK(ctx, SetHandle(ctx, std::move(ticket)));
  }

 private:
  GpuMechanism mechanism_;
};

template <typename Layout>
class GpuReleaseOp : public StreamOp {
 public:
  explicit GpuReleaseOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, typename Layout::Attributes().Read(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    OP_REQUIRES_VALUE(auto* ticket, ctx, GetTicket<GpuTickets<Layout>>(ctx, ctx->num_inputs() - 1));
    for (const auto& one : ticket->tensors) OP_REQUIRES_OK(ctx, one->Release(compute));
  }
};

template <typename Layout>
class GpuPrefetchOp : public StreamOp {
 public:
  explicit GpuPrefetchOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, attributes_.Read(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    OP_REQUIRES_VALUE(auto* ticket, ctx, GetTicket<GpuTickets<Layout>>(ctx, 0));
    OP_REQUIRES_OK(ctx, attributes_.CheckPrefetch(ticket->layout, ticket->label()));
    std::vector<Tensor> arriving(ticket->tensors.size());
    for (size_t place = 0; place < arriving.size(); ++place) {
      if (Owner source = ticket->tensors[place]->source()) {
        arriving[place] = *static_cast<const Tensor*>(source.get());
      } else {
        OP_REQUIRES_OK(ctx, ticket->layout.Allocate(ctx, place, &arriving[place]));
      }
    }
    OP_REQUIRES_OK(ctx, ticket->layout.Write(ctx, arriving));
    for (size_t place = 0; place < arriving.size(); ++place) {
      const Tensor& target = arriving[place];
      OP_REQUIRES_OK(ctx, ticket->tensors[place]->StartIn(compute, target.data(), Share(target)));
    }
  }

 private:
  typename Layout::Attributes attributes_;
};

template <typename Layout>
class GpuAwaitOp : public StreamOp {
 public:
  explicit GpuAwaitOp(OpKernelConstruction* ctx) : StreamOp(ctx) {
    OP_REQUIRES_OK(ctx, typename Layout::Attributes().Read(ctx));
  }

 protected:
  void Enqueue(OpKernelContext* ctx, cuda::Stream compute) override {
    OP_REQUIRES_VALUE(auto* ticket, ctx, GetTicket<GpuTickets<Layout>>(ctx, ctx->num_inputs() - 1));
    std::vector<const void*> where;
    OP_REQUIRES_OK(ctx, ticket->layout.Find(ctx, &where));
    for (size_t place = 0; place < where.size(); ++place) {
      OP_REQUIRES_OK(ctx, ticket->tensors[place]->Await(compute, where[place]));
    }
    for (int i = 0; i < ctx->num_outputs(); ++i) ctx->set_output(i, ctx->input(i));
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

// As TensorFlow's own ops do, those of lists leave lists where variants are by default, and
// allocate them on the host.
#define TFMEM_REGISTER(suffix, Layout)                                                          \
  REGISTER_KERNEL_BUILDER(Name("MemOpOffload" suffix).Device(DEVICE_GPU).HostMemory("handle"),  \
                          GpuOffloadOp<Layout>);                                                \
  REGISTER_KERNEL_BUILDER(Name("MemOpRelease" suffix).Device(DEVICE_GPU).HostMemory("handle"),  \
                          GpuReleaseOp<Layout>);                                                \
  REGISTER_KERNEL_BUILDER(Name("MemOpPrefetch" suffix).Device(DEVICE_GPU).HostMemory("handle"), \
                          GpuPrefetchOp<Layout>);                                               \
  REGISTER_KERNEL_BUILDER(Name("MemOpAwait" suffix).Device(DEVICE_GPU).HostMemory("handle"),    \
                          GpuAwaitOp<Layout>);
TFMEM_REGISTER("", TensorLayout)
TFMEM_REGISTER("Lists", ListLayout)
#undef TFMEM_REGISTER
REGISTER_KERNEL_BUILDER(Name("MemOpPreaccess").Device(DEVICE_GPU), PreaccessOp);

}  // namespace
}  // namespace tfmem
