#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/dynamic/gpu_run.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

namespace {

constexpr int64_t kStatusBytes = 256;  // in front of the signals
constexpr size_t kMostInFlight = 3;    // batches that are sent while others run
constexpr size_t kMostStatuses = 16;
constexpr uint32_t kWaitedTooLong = 1;

cuda::DevicePointer Address(const void* pointer) {
  return reinterpret_cast<cuda::DevicePointer>(pointer);
}

absl::Status AllocateBytes(OpKernelContext* ctx, int64_t bytes, Tensor* tensor) {
  return ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), tensor);
}

// Sizes repeat, so that blocks are found again.
size_t Rounded(size_t bytes) {
  size_t size = 1 << 16;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuNet>> GpuNet::Create(OpKernelConstruction* ctx,
                                                       const DynamicSpec& spec) {
  TFMEM_ASSIGN_OR_RETURN(const std::vector<ProgramText> texts, ReadPrograms(ctx));
  std::string text;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spec", &text));
  if (texts.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", ctx->def().name(), "' (", ctx->def().op(), ") has ", texts.size(),
        " programs for a GPU, expected one: call tfmem.dynamic.specialize on the machine with this "
        "GPU, or place the op on the CPU"));
  }
  std::unique_ptr<GpuNet> net(new GpuNet(spec));
  net->name_ = ctx->def().name();
  TFMEM_ASSIGN_OR_RETURN(net->program_, ReadGpuProgram(texts[0].header, texts[0].code, spec, text));
  return net;
}

absl::StatusOr<GpuSent> GpuNet::Script(const DynamicBatch& batch, const DynamicLayout& layout,
                                       const std::vector<LookedUp>& looked_up,
                                       const GpuCall& call) const {
  TFMEM_ASSIGN_OR_RETURN(GpuSent sent,
                         BuildGpuScript(spec_, program_, batch, layout, looked_up, call));
  TFMEM_RETURN_IF_ERROR(CheckGpuScript(spec_, program_, batch, sent));
  return sent;
}

absl::StatusOr<GpuKernel*> GpuNet::Kernel(GpuLink* link) {
  for (const auto& known : kernels_) {
    if (known->link() == link) return known.get();
  }
  TFMEM_ASSIGN_OR_RETURN(std::unique_ptr<GpuKernel> kernel, GpuKernel::Load(link, program_.image));
  if (kernel->resident() < program_.processors) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", name_, "' was specialised for ", program_.processors, " processors; this GPU runs ",
        kernel->resident(),
        " of them at once: call tfmem.dynamic.specialize on the machine with this GPU"));
  }
  kernels_.push_back(std::move(kernel));
  return kernels_.back().get();
}

absl::Status GpuNet::Launch(OpKernelContext* ctx, cuda::Stream stream, const GpuSent& sent,
                            const GpuArguments& arguments, void* memory, Tensor* device_sent) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  std::lock_guard<std::mutex> lock(mutex_);
  TFMEM_RETURN_IF_ERROR(Earlier());
  TFMEM_ASSIGN_OR_RETURN(GpuKernel * kernel, Kernel(link));
  TFMEM_RETURN_IF_ERROR(AllocateBytes(ctx, sent.words.size() * sizeof(uint32_t), device_sent));
  Tensor status;
  const int64_t bytes = kStatusBytes + (sent.phases + 1) * int64_t{sizeof(uint32_t)};
  TFMEM_RETURN_IF_ERROR(AllocateBytes(ctx, bytes, &status));
  TFMEM_RETURN_IF_ERROR(Send(stream, link, sent, device_sent->data()));
  {
    cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuMemsetD8Async, Address(status.data()), 0, bytes,
                               stream);
  }
  std::vector<uint64_t> words(kPointerWords);
  words[kSentWord] = Address(device_sent->data());
  words[kMemoryWord] = Address(memory);
  words[kStatusWord] = Address(status.data());
  words[kSeedWord] = arguments.seed;
  words[kRuleWord] = arguments.rule;
  words[kLossGradientsWord] = Address(arguments.loss_gradients);
  std::memcpy(&words[kRatesWord], arguments.rates, sizeof(arguments.rates));
  words[kLossesWord] = Address(arguments.losses);
  words[kGradientTypeWord] = arguments.gradient_type + 1;
  const auto add = [&](const std::vector<const void*>& pointers, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      words.push_back(i < pointers.size() ? Address(pointers[i]) : 0);
    }
  };
  const size_t parameters = spec_.parameters.size();
  add(arguments.parameters, parameters);
  add(arguments.first, parameters);
  add(arguments.second, parameters);
  add(arguments.outputs, MostOutputs(spec_));
  add(arguments.states, MostStates(spec_));
  add(arguments.state_gradients, MostStates(spec_));
  TFMEM_RETURN_IF_ERROR(kernel->Launch(stream, {program_.processors, 1}, words.data()));
  return ReadStatus(stream, link, status.data());
}

// From pinned memory that no earlier copy still reads: what is written now goes out while the GPU
// runs the batch before (III-C1).
absl::Status GpuNet::Send(cuda::Stream stream, GpuLink* link, const GpuSent& sent, void* to) {
  const size_t bytes = sent.words.size() * sizeof(uint32_t);
  std::vector<PinnedBlock> busy;
  PinnedBlock block;
  while (block.data() == nullptr) {
    TFMEM_ASSIGN_OR_RETURN(PinnedBlock found,
                           PinnedBlock::Acquire(link, Rounded(bytes), 0, "scripts"));
    bool free = !found.last_use();
    if (!free) {
      TFMEM_ASSIGN_OR_RETURN(free, found.last_use().Passed());
    }
    if (!free && busy.size() + 1 >= kMostInFlight) {
      PinnedBlock& oldest = busy.empty() ? found : busy.front();
      cuda::ScopedContext current(link->driver(), link->context());
      if (!current.status().ok()) return current.status();
      TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuEventSynchronize, oldest.last_use().get());
      block = std::move(oldest);
    } else if (free) {
      block = std::move(found);
    } else {
      busy.push_back(std::move(found));
    }
  }
  std::memcpy(block.data(), sent.words.data(), bytes);
  cuda::ScopedContext current(link->driver(), link->context());
  if (!current.status().ok()) return current.status();
  TFMEM_ASSIGN_OR_RETURN(PooledEvent copied, link->NewEvent());
  absl::Status done =
      cuda::Check(link->driver().cuMemcpyHtoDAsync_v2(Address(to), block.data(), bytes, stream),
                  "cuMemcpyHtoDAsync");
  if (done.ok()) done = copied.Record(stream);
  if (!done.ok()) {
    if (!link->Drain(stream)) block.Abandon();
    return done;
  }
  block.set_last_use(std::move(copied));
  return absl::OkStatus();
}

absl::Status GpuNet::ReadStatus(cuda::Stream stream, GpuLink* link, const void* status) {
  if (statuses_.size() >= kMostStatuses) return absl::OkStatus();
  TFMEM_ASSIGN_OR_RETURN(PinnedBlock block,
                         PinnedBlock::Acquire(link, kStatusBytes, 0, "kernel status"));
  cuda::ScopedContext current(link->driver(), link->context());
  if (!current.status().ok()) return current.status();
  if (block.last_use()) TFMEM_RETURN_IF_ERROR(block.last_use().MakeWait(stream));
  TFMEM_ASSIGN_OR_RETURN(PooledEvent copied, link->NewEvent());
  absl::Status done = cuda::Check(
      link->driver().cuMemcpyDtoHAsync_v2(block.data(), Address(status), kStatusBytes, stream),
      "cuMemcpyDtoHAsync");
  if (done.ok()) done = copied.Record(stream);
  if (!done.ok()) {
    if (!link->Drain(stream)) block.Abandon();
    return done;
  }
  block.set_last_use(std::move(copied));
  statuses_.push_back(std::move(block));
  return absl::OkStatus();
}

absl::Status GpuNet::Earlier() {
  while (!statuses_.empty()) {
    TFMEM_ASSIGN_OR_RETURN(const bool passed, statuses_.front().last_use().Passed());
    if (!passed) break;
    const uint32_t found = *static_cast<const uint32_t*>(statuses_.front().data());
    statuses_.pop_front();
    if (found == 0) continue;
    return absl::InternalError(absl::StrCat(
        "'", name_, "': ",
        found == kWaitedTooLong
            ? "a virtual processor waited in vain for the signal of another, as may happen on a "
              "GPU that is shared or stopped by a debugger"
            : "a virtual processor found an instruction that it does not know",
        "; an earlier batch was given up, its losses and gradients are wrong, and its update was "
        "not made"));
  }
  return absl::OkStatus();
}

}  // namespace tfmem
