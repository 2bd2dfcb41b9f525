// TfmemRecurrent on a GPU: picks one of its programs and enqueues it. Waits for nothing.
#include <atomic>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/device_stream.h"
#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/recurrent/recurrent.h"
#include "custom_ops/ops/recurrent/recurrent_kernel.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_GPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr size_t kMostParameterBytes = 4096;  // CUDA's limit
constexpr int64_t kAlignment = 256;           // of the scratch behind the status word
constexpr unsigned char kRunFallback = 1;     // any status but zero
constexpr uintptr_t kVectorBytes = 16;        // that kernels load of a matrix at a time

class GpuRecurrentOp : public OpKernel {
 public:
  explicit GpuRecurrentOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(attributes_, ctx, ReadRecurrentAttributes(ctx));
    OP_REQUIRES_VALUE(std::vector<ProgramText> texts, ctx, ReadPrograms(ctx));
    OP_REQUIRES(ctx, !texts.empty(),
                absl::InvalidArgumentError(absl::StrCat(
                    "'", name(), "' (TfmemRecurrent) has no program for a GPU: run ",
                    "tfmem.optimize on the machine with this GPU, or place the op on the CPU")));
    std::vector<RecurrentKernels::Program> programs;
    for (const ProgramText& text : texts) {
      programs.push_back(ReadRecurrentProgram(text.header, text.code));
    }
    kernels_ = std::make_unique<RecurrentKernels>(std::move(programs));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_VALUE(cuda::Stream stream, ctx, ComputeStream(ctx));
    OP_REQUIRES_VALUE(RecurrentCall call, ctx, PrepareRecurrentCall(ctx, attributes_));
    if (call.batch == 0) return;
    OP_REQUIRES_VALUE(GpuLink * link, ctx, GpuLink::For(stream));
    absl::StatusOr<std::shared_ptr<RecurrentKernel>> kernel = kernels_->Choose(link, call.batch);
    OP_REQUIRES(ctx, !absl::IsResourceExhausted(kernel.status()),
                absl::ResourceExhaustedError(absl::StrCat(
                    "no program of '", name(),
                    "' (TfmemRecurrent) could be loaded: ", kernel.status().message())));
    OP_REQUIRES(ctx, kernel.ok(),
                absl::InvalidArgumentError(absl::StrCat(
                    "'", name(), "' (TfmemRecurrent) has no program that runs on this GPU (",
                    kernel.status().message(), "): run tfmem.optimize on the machine with this ",
                    "GPU, or name its compute capability in architectures, or place the op on ",
                    "the CPU")));
    OP_REQUIRES_VALUE(bool failed, ctx, watch_.Failed());
    bool fallback_only = failed && (*kernel)->program().image.cooperative;
    if (fallback_only) {
      Report();
      if (std::shared_ptr<RecurrentKernel> instead = kernels_->WithoutWaiting(link)) {
        kernel = std::move(instead);
        fallback_only = false;
      }
    }
    OP_REQUIRES_OK(ctx, Enqueue(ctx, stream, **kernel, call, fallback_only));
  }

 private:
  absl::Status Enqueue(OpKernelContext* ctx, cuda::Stream stream, const RecurrentKernel& kernel,
                       const RecurrentCall& call, bool fallback_only) {
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
      return absl::InvalidArgumentError(absl::StrCat("'", name(), "' has ", parameter.words.size(),
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
  absl::Status CheckAlignment(const RecurrentCall& call) const {
    for (const RecurrentDirection& data : call.directions) {
      for (const void* matrix : data.matrices) {
        if (reinterpret_cast<uintptr_t>(matrix) % kVectorBytes != 0) {
          return absl::InvalidArgumentError(absl::StrCat(
              "'", name(), "' (TfmemRecurrent) was given a matrix that begins ",
              reinterpret_cast<uintptr_t>(matrix) % kVectorBytes, " bytes behind a multiple of ",
              kVectorBytes, ", where all tensors that TensorFlow allocates begin: copy it"));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status Zero(const RecurrentKernel& kernel, cuda::Stream stream, cuda::DevicePointer base,
                    bool fallback_only, int64_t scratch_bytes) const {
    if (!kernel.program().fallback.has_value() && scratch_bytes == 0) return absl::OkStatus();
    const cuda::Driver& driver = kernel.link()->driver();
    cuda::ScopedContext current(driver, kernel.link()->context());
    if (!current.status().ok()) return current.status();
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuMemsetD8Async, base, 0, kAlignment + scratch_bytes,
                               stream);
    if (fallback_only) {
      TFMEM_CUDA_RETURN_IF_ERROR(driver, cuMemsetD8Async, base, kRunFallback, sizeof(int32_t),
                                 stream);
    }
    return absl::OkStatus();
  }

  // Once: the results are right either way.
  void Report() {
    if (reported_.exchange(true)) return;
    std::cerr
        << "tfmem: the CTAs of '" << name()
        << "' waited for each other too long, as happens when a GPU is shared; a slower kernel "
           "without such waits computed the results, and does so from now on"
        << std::endl;
  }

  RecurrentAttributes attributes_;
  std::unique_ptr<RecurrentKernels> kernels_;
  StatusWatch watch_;
  std::atomic<bool> reported_{false};
};

#define TFMEM_REGISTER(type)                                                                   \
  REGISTER_KERNEL_BUILDER(Name("TfmemRecurrent").Device(DEVICE_GPU).TypeConstraint<type>("T"), \
                          GpuRecurrentOp);
TFMEM_REGISTER(float)
TFMEM_REGISTER(Eigen::half)
TFMEM_REGISTER(Eigen::bfloat16)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
