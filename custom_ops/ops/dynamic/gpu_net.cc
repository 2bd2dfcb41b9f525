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

namespace {

constexpr int64_t kStatusWords = 64;  // in front of the signals
constexpr uint32_t kWaitedTooLong = 1;

cuda::DevicePointer Address(const void* pointer) {
  return reinterpret_cast<cuda::DevicePointer>(pointer);
}

}  // namespace

absl::Status CopyOnDevice(cuda::Stream stream, void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  cuda::ScopedContext current(link->driver(), link->context());
  if (!current.status().ok()) return current.status();
  TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuMemcpyDtoDAsync_v2, Address(to), Address(from),
                             bytes, stream);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GpuNet>> GpuNet::Create(OpKernelConstruction* ctx,
                                                       const DynamicSpec& spec) {
  TFMEM_ASSIGN_OR_RETURN(const std::vector<ProgramText> texts, ReadPrograms(ctx));
  std::string text;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spec", &text));
  if (texts.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", ctx->def().name(), "' (", ctx->def().op(), ") has ", texts.size(),
                     " programs for a GPU, expected one or none: ", kSpecializeForThisGpu));
  }
  std::unique_ptr<GpuNet> net(new GpuNet(spec));
  net->name_ = ctx->def().name();
  net->has_program_ = !texts.empty();
  if (!net->has_program_) return net;
  TFMEM_ASSIGN_OR_RETURN(net->program_, ReadGpuProgram(texts[0].header, texts[0].code, spec, text));
  return net;
}

absl::StatusOr<GpuSent> GpuNet::Script(const DynamicBatch& batch, const DynamicLayout& layout,
                                       const std::vector<LookedUp>& looked_up,
                                       const GpuCall& call) const {
  TFMEM_ASSIGN_OR_RETURN(GpuSent sent,
                         BuildGpuScript(spec_, program_, batch, layout, looked_up, call));
  TFMEM_RETURN_IF_ERROR(CheckGpuScript(spec_, program_, batch, looked_up, sent));
  return sent;
}

absl::Status GpuNet::Fits(GpuLink* link) {
  if (!has_program_) return NoProgram(link);
  std::lock_guard<std::mutex> lock(mutex_);
  return Load(link).status();
}

absl::StatusOr<GpuNet::OnGpu*> GpuNet::Load(GpuLink* link) {
  for (const auto& known : gpus_) {
    if (known->kernel->link() == link) return known.get();
  }
  auto made = std::make_unique<OnGpu>(link);
  TFMEM_ASSIGN_OR_RETURN(made->kernel, GpuKernel::Load(link, program_.image));
  if (made->kernel->resident() < program_.processors) {
    return absl::FailedPreconditionError(
        absl::StrCat("it was specialised for ", program_.processors, " processors; this GPU runs ",
                     made->kernel->resident(), " of them at once"));
  }
  TFMEM_ASSIGN_OR_RETURN(made->failure,
                         PinnedBlock::Acquire(link, kStatusWords * 4, 0, "kernel status"));
  if (made->failure.last_use()) {
    cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuEventSynchronize, made->failure.last_use().get());
  }
  *static_cast<volatile uint32_t*>(made->failure.data()) = 0;
  gpus_.push_back(std::move(made));
  return gpus_.back().get();
}

absl::Status GpuNet::Launch(OpKernelContext* ctx, cuda::Stream stream, const GpuSent& sent,
                            const GpuArguments& arguments, void* memory,
                            const std::vector<Tensor*>& rows) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  std::lock_guard<std::mutex> lock(mutex_);
  TFMEM_ASSIGN_OR_RETURN(OnGpu * on_gpu, Load(link));
  TFMEM_RETURN_IF_ERROR(Earlier(*on_gpu));
  TFMEM_ASSIGN_OR_RETURN(
      const uint32_t* there,
      on_gpu->sender.Send(ctx, stream, sent.words, kStatusWords + sent.phases + 1));
  std::vector<uint64_t> words = Words(arguments);
  words[kSentWord] = Address(there);
  words[kMemoryWord] = Address(memory);
  words[kStatusWord] = Address(there + WordsBeforeZeros(sent.words.size()));
  words[kFailureWord] = Address(on_gpu->failure.data());
  absl::Status done = on_gpu->kernel->Launch(stream, {program_.processors, 1}, words.data());
  size_t next = 0;
  for (size_t i = 0; i < spec_.parameters.size() && done.ok() && next < rows.size(); ++i) {
    if (!spec_.parameters[i].sparse) continue;
    Tensor* of_table = rows[next++];
    done =
        CopyOnDevice(stream, of_table->data(), there + sent.looked_up[i], of_table->TotalBytes());
  }
  const absl::Status ended = on_gpu->sender.End(stream);
  return done.ok() ? ended : done;
}

std::vector<uint64_t> GpuNet::Words(const GpuArguments& arguments) const {
  std::vector<uint64_t> words(kPointerWords);
  words[kSeedWord] = arguments.seed;
  words[kRuleWord] = arguments.rule;
  words[kLossGradientsWord] = Address(arguments.loss_gradients);
  std::memcpy(&words[kRatesWord], arguments.rates.data(), sizeof(arguments.rates));
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
  return words;
}

absl::Status GpuNet::Earlier(const OnGpu& on_gpu) const {
  auto* word = static_cast<volatile uint32_t*>(on_gpu.failure.data());
  const uint32_t found = *word;
  if (found == 0) return absl::OkStatus();
  *word = 0;
  return absl::InternalError(absl::StrCat(
      "'", name_, "': ",
      found == kWaitedTooLong
          ? "a virtual processor waited in vain for the signal of another, as may happen on a "
            "GPU that is shared or stopped by a debugger"
          : "a virtual processor found an instruction that it does not know",
      "; an earlier batch was given up, its losses and gradients are wrong, and its update was "
      "not made"));
}

}  // namespace tfmem
