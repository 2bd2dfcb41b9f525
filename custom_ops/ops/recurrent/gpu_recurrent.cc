#include "custom_ops/ops/recurrent/gpu_recurrent.h"

#include <iostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr size_t kMostParameterBytes = 4096;  // CUDA's limit
constexpr int64_t kAlignment = 256;           // of the scratch behind the status word
constexpr unsigned char kRunFallback = 1;     // any status but zero
constexpr uintptr_t kVectorBytes = 16;        // that kernels load of a matrix at a time

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRecurrent>> GpuRecurrent::Create(OpKernelConstruction* ctx) {
  TFMEM_ASSIGN_OR_RETURN(RecurrentAttributes attributes, ReadRecurrentAttributes(ctx));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<ProgramText> texts, ReadPrograms(ctx));
  std::vector<RecurrentKernels::Program> programs;
  for (const ProgramText& text : texts) {
    programs.push_back(ReadRecurrentProgram(text.header, text.code));
  }
  return std::unique_ptr<GpuRecurrent>(
      new GpuRecurrent(ctx->def().name(), std::move(attributes), std::move(programs)));
}

absl::Status GpuRecurrent::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(const RecurrentCall call, PrepareRecurrentCall(ctx, attributes_));
  if (call.batch == 0) return absl::OkStatus();
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  absl::StatusOr<std::shared_ptr<RecurrentKernel>> kernel = kernels_.Choose(link, call.batch);
  if (absl::IsFailedPrecondition(kernel.status())) {
    HostCopies copies(ctx, link, stream);
    return host_.Run(ctx, &copies, kernel.status());
  }
  if (!kernel.ok()) {
    return absl::Status(kernel.status().code(),
                        absl::StrCat("no program of '", name_, "' (TfmemRecurrent) could be ",
                                     "loaded: ", kernel.status().message()));
  }
  TFMEM_ASSIGN_OR_RETURN(const bool failed, watch_.Failed());
  bool fallback_only = failed && (*kernel)->program().image.cooperative;
  if (fallback_only) {
    Report();
    if (std::shared_ptr<RecurrentKernel> instead = kernels_.WithoutWaiting(link)) {
      kernel = std::move(instead);
      fallback_only = false;
    }
  }
  return Enqueue(ctx, stream, **kernel, call, fallback_only);
}

absl::Status GpuRecurrent::Enqueue(OpKernelContext* ctx, cuda::Stream stream,
                                   const RecurrentKernel& kernel, const RecurrentCall& call,
                                   bool fallback_only) {
  TFMEM_RETURN_IF_ERROR(CheckAlignment(call));
  const RecurrentProgram& program = kernel.program();
  const int64_t groups = program.groups(call.batch, attributes_.directions);
  TFMEM_RETURN_IF_ERROR(CheckRange("the number of groups of the batch", groups, 0, kMostOfASize));
  const Size scratch = Size(groups) * program.scratch;
  TensorShape shape;
  TFMEM_RETURN_IF_ERROR(BuildShape({(scratch + kAlignment).value()}, &shape));
  const int64_t scratch_bytes = scratch.value();
  Tensor memory;  // the status word, then the scratch
  TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_UINT8, shape, &memory));
  const auto base = reinterpret_cast<cuda::DevicePointer>(memory.data());
  KernelParameter parameter(call.time, call.batch, call.lines(), base + kAlignment, base,
                            attributes_.reverse);
  for (const RecurrentDirection& data : call.directions) {
    for (const auto* pointers :
         {&data.sequences, &data.invariants, &data.vectors, &data.matrices, &data.initials}) {
      parameter.Add(*pointers);
    }
    parameter.Add(data.outputs);
    parameter.Add(data.finals);
  }
  if (parameter.words.size() * sizeof(uint64_t) > kMostParameterBytes) {
    return absl::InvalidArgumentError(absl::StrCat("'", name_, "' has ", parameter.words.size(),
                                                   " parameters; a GPU kernel takes ",
                                                   kMostParameterBytes / sizeof(uint64_t)));
  }
  TFMEM_RETURN_IF_ERROR(Zero(kernel, stream, base, fallback_only, scratch_bytes));
  if (!fallback_only) TFMEM_RETURN_IF_ERROR(kernel.Launch(stream, &parameter, groups));
  if (!program.fallback.has_value()) return absl::OkStatus();
  TFMEM_RETURN_IF_ERROR(kernel.LaunchFallback(stream, &parameter, groups));
  // CTAs of a kernel that is not cooperative never wait for another, or are scheduled as one.
  if (fallback_only || !program.image.cooperative) return absl::OkStatus();
  return watch_.Read(kernel.link(), stream, memory.data());
}

// A load that is not aligned would end the process's use of the GPU.
absl::Status GpuRecurrent::CheckAlignment(const RecurrentCall& call) const {
  for (const RecurrentDirection& data : call.directions) {
    for (const void* matrix : data.matrices) {
      if (reinterpret_cast<uintptr_t>(matrix) % kVectorBytes != 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", name_, "' (TfmemRecurrent) was given a matrix that begins ",
            reinterpret_cast<uintptr_t>(matrix) % kVectorBytes, " bytes behind a multiple of ",
            kVectorBytes, ", where all tensors that TensorFlow allocates begin: copy it"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status GpuRecurrent::Zero(const RecurrentKernel& kernel, cuda::Stream stream,
                                cuda::DevicePointer base, bool fallback_only,
                                int64_t scratch_bytes) const {
  if (!kernel.program().fallback.has_value() && scratch_bytes == 0) return absl::OkStatus();
  const cuda::Driver& driver = kernel.link()->driver();
  cuda::ScopedContext current(driver, kernel.link()->context());
  if (!current.status().ok()) return current.status();
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuMemsetD8Async, base, 0, kAlignment + scratch_bytes, stream);
  if (fallback_only) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuMemsetD8Async, base, kRunFallback, sizeof(int32_t),
                               stream);
  }
  return absl::OkStatus();
}

// Once: the results are right either way.
void GpuRecurrent::Report() {
  if (reported_.exchange(true)) return;
  std::cerr << "tfmem: the CTAs of '" << name_
            << "' waited for each other too long, as happens when a GPU is shared; a slower kernel "
               "without such waits computed the results, and does so from now on"
            << std::endl;
}

}  // namespace tfmem
