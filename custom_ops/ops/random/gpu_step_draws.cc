#include "custom_ops/ops/random/gpu_step_draws.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
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

// As custom_ops/kernels/step_draws.cuh has them.
enum Column { kKey, kCounter, kCounterHigh, kLow, kRange, kColumns };
struct Arguments {
  const void* table;
  void* to;
  int64_t steps, numbers, seeded;
};

constexpr int kPhilox = 1, kAnyAlgorithm = 3;  // of TensorFlow's enumeration
constexpr int64_t kTurns = 4;                  // of CTAs that the device runs at once

// Number `at` of a tensor in host memory, as 64 bits.
absl::StatusOr<int64_t> NumberAt(const Tensor& tensor, int64_t at) {
  switch (tensor.dtype()) {
    case tensorflow::DT_INT32:
      return static_cast<const int32_t*>(tensor.data())[at];
    case tensorflow::DT_INT64:
    case tensorflow::DT_UINT64:
      return static_cast<const int64_t*>(tensor.data())[at];
    default:
      return absl::InvalidArgumentError(absl::StrCat("an input of TfmemStepDraws has type ",
                                                     tensorflow::DataTypeString(tensor.dtype()),
                                                     "; expected whole numbers"));
  }
}

}  // namespace

struct GpuStepDraws::Call {
  int64_t steps = 0;
  int64_t numbers = 0;  // of a step
  TensorShape shape;    // of all
  std::vector<uint64_t> table;
};

absl::StatusOr<std::unique_ptr<GpuStepDraws>> GpuStepDraws::Create(OpKernelConstruction* ctx) {
  std::unique_ptr<GpuStepDraws> made(new GpuStepDraws);
  made->name_ = ctx->def().name();
  tensorflow::DataTypeVector outputs;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("op", &made->op_));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("of_steps", &made->of_steps_));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("Tout", &outputs));
  made->on_host_ =
      absl::c_any_of(outputs, [](auto type) { return absl::c_linear_search(kDrawnOnHost, type); });
  made->seeded_ = !absl::EndsWith(made->op_, "V2");
  made->ranged_ = absl::StrContains(made->op_, "UniformInt");
  TFMEM_ASSIGN_OR_RETURN(const std::vector<ProgramText> texts, ReadPrograms(ctx));
  for (const ProgramText& text : texts) {
    TFMEM_ASSIGN_OR_RETURN(KernelHeader header, KernelHeader::Parse(text.header));
    TFMEM_ASSIGN_OR_RETURN(KernelImage image, ReadImage(&header, text.code));
    made->images_.push_back(std::move(image));
  }
  const size_t inputs = (made->seeded_ ? 2 : 4) + (made->ranged_ ? 2 : 0);
  if (!made->images_.empty() && (outputs.size() != 1 || made->of_steps_.size() != inputs ||
                                 static_cast<size_t>(ctx->num_inputs()) != inputs)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", made->name_, "' (TfmemStepDraws) has a program for a GPU, but ", ctx->num_inputs(),
        " inputs, ", made->of_steps_.size(), " entries of of_steps and ", outputs.size(),
        " outputs; expected ", inputs, " and one output of ", made->op_));
  }
  return made;
}

absl::Status GpuStepDraws::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  const absl::StatusOr<const GpuKernel*> kernel =
      on_host_ ? absl::StatusOr<const GpuKernel*>(nullptr) : Load(link);
  if (on_host_ || absl::IsFailedPrecondition(kernel.status())) {
    HostCopies copies(ctx, link, stream);
    return host_.Run(ctx, &copies, kernel.status());
  }
  TFMEM_RETURN_IF_ERROR(kernel.status());
  TFMEM_ASSIGN_OR_RETURN(const Call call, Read(ctx));
  Tensor* output = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_output(0, call.shape, &output));
  if (output->NumElements() == 0) return absl::OkStatus();
  const int64_t bytes = call.table.size() * sizeof(uint64_t);
  Tensor table;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({bytes}), &table));
  {
    cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    // The driver has read host memory that is not pinned when the call returns.
    TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuMemcpyHtoDAsync_v2,
                               reinterpret_cast<cuda::DevicePointer>(table.data()),
                               call.table.data(), bytes, stream);
  }
  const Arguments arguments{table.data(), output->data(), call.steps, call.numbers, seeded_};
  const int64_t threads = images_.front().threads;
  const int64_t ctas = (output->NumElements() - 1) / threads + 1;
  const Grid grid{std::min(ctas, kTurns * std::max<int64_t>((*kernel)->resident(), 1))};
  return (*kernel)->Launch(stream, grid, &arguments);
}

absl::StatusOr<const GpuKernel*> GpuStepDraws::Load(GpuLink* link) {
  if (images_.empty()) return NoProgram(link);
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status why;
  for (const KernelImage& image : images_) {
    if (kernel_ != nullptr) break;
    absl::StatusOr<std::unique_ptr<GpuKernel>> made = GpuKernel::Load(link, image);
    if (made.ok()) {
      kernel_ = *std::move(made);
    } else if (why.ok() || absl::IsFailedPrecondition(why)) {
      why = made.status();  // another failure is worth more than that a program does not fit
    }
  }
  if (kernel_ == nullptr) return why;
  return kernel_.get();
}

absl::StatusOr<GpuStepDraws::Call> GpuStepDraws::Read(OpKernelContext* ctx) const {
  Call call;
  call.steps = -1;
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    const Tensor& input = ctx->input(i);
    if (!of_steps_[i]) continue;
    if (input.dims() < 1 || (call.steps >= 0 && input.dim_size(0) != call.steps)) {
      return absl::InvalidArgumentError(
          absl::StrCat("input ", i, " of '", name_, "' (TfmemStepDraws) has shape ",
                       input.shape().DebugString(), "; expected an item for each of ",
                       call.steps < 0 ? "the" : absl::StrCat(call.steps), " steps"));
    }
    call.steps = input.dim_size(0);
  }
  const Tensor& sizes = ctx->input(0);
  if (call.steps < 0 || of_steps_[0] || sizes.dims() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name_, "' (TfmemStepDraws) has a shape ", sizes.shape().DebugString(),
                     of_steps_[0] ? " for each step" : "", " and ",
                     call.steps < 0 ? "no input that differs" : "inputs that differ",
                     " between steps; expected one shape, and other inputs that differ"));
  }
  std::vector<int64_t> dimensions{call.steps};
  Size numbers = 1;
  for (int64_t i = 0; i < sizes.NumElements(); ++i) {
    TFMEM_ASSIGN_OR_RETURN(const int64_t size, NumberAt(sizes, i));
    dimensions.push_back(size);
    numbers = numbers * size;
  }
  TFMEM_RETURN_IF_ERROR(BuildShape(dimensions, &call.shape));
  call.numbers = numbers.value();
  const Size words = Size(call.steps) * kColumns * sizeof(uint64_t);
  if (!numbers.ok() || !words.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name_, "' (TfmemStepDraws) draws more numbers than 64 bits count"));
  }
  TFMEM_RETURN_IF_ERROR(Check(ctx, 1, seeded_ ? 2 : 1));
  if (!seeded_) {
    TFMEM_RETURN_IF_ERROR(Check(ctx, 2, 2));
    TFMEM_RETURN_IF_ERROR(Check(ctx, 3, 1));
  }
  for (int i = ctx->num_inputs() - (ranged_ ? 2 : 0); i < ctx->num_inputs(); ++i) {
    TFMEM_RETURN_IF_ERROR(Check(ctx, i, 1));
  }
  call.table.resize(call.steps * kColumns);
  for (int64_t step = 0; step < call.steps; ++step) {
    TFMEM_RETURN_IF_ERROR(ReadStep(ctx, step, &call.table[step * kColumns]));
  }
  return call;
}

// Whether an input has so many numbers, for each step if it differs between steps.
absl::Status GpuStepDraws::Check(OpKernelContext* ctx, int input, int64_t numbers) const {
  const Tensor& tensor = ctx->input(input);
  const int64_t items = of_steps_[input] ? tensor.dim_size(0) : 1;
  if (tensor.NumElements() == items * numbers) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "input ", input, " of '", name_, "' (TfmemStepDraws) has shape ",
      tensor.shape().DebugString(), "; expected ", numbers, of_steps_[input] ? " a step" : ""));
}

absl::Status GpuStepDraws::ReadStep(OpKernelContext* ctx, int64_t step, uint64_t* row) const {
  const auto number = [&](int input, int64_t count, int64_t at) {
    return NumberAt(ctx->input(input), (of_steps_[input] ? step * count : 0) + at);
  };
  if (seeded_) {
    TFMEM_ASSIGN_OR_RETURN(row[kKey], number(1, 2, 0));
    TFMEM_ASSIGN_OR_RETURN(row[kCounter], number(1, 2, 1));
  } else {
    TFMEM_ASSIGN_OR_RETURN(row[kKey], number(1, 1, 0));
    TFMEM_ASSIGN_OR_RETURN(row[kCounter], number(2, 2, 0));
    TFMEM_ASSIGN_OR_RETURN(row[kCounterHigh], number(2, 2, 1));
    TFMEM_ASSIGN_OR_RETURN(const int64_t algorithm, number(3, 1, 0));
    if (algorithm != kPhilox && algorithm != kAnyAlgorithm) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", name_, "' (TfmemStepDraws) is to draw by algorithm ", algorithm,
                       "; expected 1, Philox, which is all that TensorFlow's kernels know"));
    }
  }
  if (!ranged_) return absl::OkStatus();
  const int smallest = ctx->num_inputs() - 2;
  TFMEM_ASSIGN_OR_RETURN(const int64_t low, number(smallest, 1, 0));
  TFMEM_ASSIGN_OR_RETURN(const int64_t high, number(smallest + 1, 1, 0));
  if (low >= high) {
    return absl::InvalidArgumentError(absl::StrCat("Need minval < maxval, got ", low, " >= ", high,
                                                   " in step ", step, " of '", name_,
                                                   "' (TfmemStepDraws)"));
  }
  row[kLow] = low;
  row[kRange] = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  return absl::OkStatus();
}

}  // namespace tfmem
