// The MemOps on the CPU, where "device memory" is RAM and the other side is a file.
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/spill.h"
#include "custom_ops/ops/memory/spill_directories.h"
#include "custom_ops/ops/memory/ticket_variant.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/logging.h"

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
    std::string mechanism;
    int64_t budget = 0;
    OP_REQUIRES_OK(ctx, CheckMovableType(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mechanism", &mechanism));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("label", &label_));
    OP_REQUIRES_OK(ctx, FindDirectory(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("spill_budget", &budget));
    options_.budget = budget;
    if (label_.empty()) label_ = name();
    OP_REQUIRES(ctx, mechanism == "auto" || mechanism == "file",
                absl::InvalidArgumentError(
                    absl::StrCat("mechanism \"", mechanism, "\" of '", name(),
                                 "' needs a GPU; on the CPU use \"file\" or \"auto\"")));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& source = ctx->input(0);
    SetHandle(ctx,
              std::make_shared<FileTicket>(label_, options_, source.data(), source.TotalBytes(),
                                           Share(source)),
              source);
  }

 private:
  absl::Status FindDirectory(OpKernelConstruction* ctx) {
    std::string key;
    TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spill_key", &key));
    static std::atomic<bool> said_unknown{false};
    const std::optional<std::string> directory = FindSpillDirectory(key);
    if (!directory && !said_unknown.exchange(true)) {
      LOG(WARNING) << "the spill directory of '" << name() << "' (MemOpOffload) was chosen in "
                   << "another process; here its files go to the system's directory for temporary "
                   << "files (TMPDIR)";
    }
    options_.directory = directory.value_or("");
    return absl::OkStatus();
  }

  std::string label_;
  SpillOptions options_;
};

// Finishes an asynchronous kernel when the I/O thread says so, and counts what it waited.
class Finish {
 public:
  Finish(OpKernelContext* ctx, AsyncOpKernel::DoneCallback done)
      : ctx_(ctx), done_(std::move(done)), start_(std::chrono::steady_clock::now()) {}

  void operator()(const absl::Status& status) const {
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start_;
    counters().stall_ns += waited.count();
    if (!status.ok()) ctx_->SetStatus(status);
    done_();
  }

 private:
  OpKernelContext* const ctx_;
  const AsyncOpKernel::DoneCallback done_;
  const std::chrono::steady_clock::time_point start_;
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
    ticket->StartRead(target->data(), Share(*target));
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
