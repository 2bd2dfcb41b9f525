#include "custom_ops/ops/fusion/gpu_steps.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/fusion/call_convolution.h"
#include "custom_ops/ops/fusion/call_pooling.h"
#include "custom_ops/ops/fusion/region_memory.h"
#include "custom_ops/ops/fusion/step_schedule.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/node_def_util.h"

namespace tfmem {
namespace {

using ::tensorflow::TensorShape;

constexpr int64_t kBufferAlignment = 64;
constexpr int64_t kBarrierBytes = 4;

Size Aligned(int64_t bytes) { return Size(bytes) + (-bytes & (kBufferAlignment - 1)); }

// The workspace of a call, aligned within memory that may begin anywhere.
uint64_t WorkspaceOf(uint64_t address) {
  constexpr uint64_t kLast = GpuProduct::kWorkspaceAlignment - 1;
  return (address + kLast) & ~kLast;
}

absl::StatusOr<cublas::Type> TypeOf(ValueDType dtype) {
  switch (dtype) {
    case ValueDType::kFloat32:
      return cublas::kR32F;
    case ValueDType::kFloat64:
      return cublas::kR64F;
    case ValueDType::kFloat16:
      return cublas::kR16F;
    case ValueDType::kBfloat16:
      return cublas::kR16BF;
    default:
      return absl::UnimplementedError(
          absl::StrCat("cuBLASLt multiplies no ", NameOf(dtype), " here"));
  }
}

// For each matrix of a result with these leading dimensions the one of an operand.
std::vector<int64_t> Batches(const TensorShape& result, const TensorShape& operand) {
  const int dims = result.dims() - 2, offset = result.dims() - operand.dims();
  int64_t count = 1;
  for (int i = 0; i < dims; ++i) count *= result.dim_size(i);
  std::vector<int64_t> found(count);
  for (int64_t matrix = 0; matrix < count; ++matrix) {
    int64_t rest = matrix, step = 1;
    for (int i = dims - 1; i >= offset; --i) {
      const int64_t size = operand.dim_size(i - offset);
      found[matrix] += size == 1 ? 0 : rest % result.dim_size(i) * step;
      rest /= result.dim_size(i);
      step *= size;
    }
  }
  return found;
}

absl::Status ReadFused(const tensorflow::NodeDef& node, ProductForm* form) {
  std::vector<std::string> fused;
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "fused_ops", &fused));
  form->bias = !fused.empty() && fused[0] == "BiasAdd";
  form->relu = fused.size() == 2 && fused[1] == "Relu";
  if (form->bias && (form->relu || fused.size() == 1)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("call of ", node.op(), ": it fuses what no region on a GPU computes"));
}

}  // namespace

absl::StatusOr<ProductForm> ProductOf(const CompiledRegion& compiled, int number, bool tf32,
                                      const std::vector<TensorShape>& values) {
  const RegionStep& step = compiled.region.steps[number];
  const tensorflow::NodeDef& node = compiled.calls[number]->node();
  ProductForm form;
  form.tf32 = tf32;
  if (step.op == "MatMul" || step.op == "_FusedMatMul") {
    TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "transpose_a", &form.transpose_left));
    TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "transpose_b", &form.transpose_right));
    if (step.op == "_FusedMatMul") TFMEM_RETURN_IF_ERROR(ReadFused(node, &form));
  } else if (step.op == "BatchMatMul" || step.op == "BatchMatMulV2") {
    TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "adj_x", &form.transpose_left));
    TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "adj_y", &form.transpose_right));
  } else {
    return absl::UnimplementedError(absl::StrCat(
        "call of ", step.op, ": a region on a GPU calls products, convolutions and pooling alone"));
  }
  TFMEM_ASSIGN_OR_RETURN(form.type, TypeOf(compiled.region.values[step.inputs[0]].dtype));
  const TensorShape& left = values[step.inputs[0]];
  const TensorShape& right = values[step.inputs[1]];
  const TensorShape& result = values[step.first_output];
  const auto wrong = [&] {
    return absl::InvalidArgumentError(absl::StrCat("region: a call of ", step.op, " multiplies ",
                                                   left.DebugString(), " by ", right.DebugString(),
                                                   " and gives ", result.DebugString()));
  };
  const int rank = result.dims();
  if (left.dims() < 2 || right.dims() < 2 || rank != std::max(left.dims(), right.dims())) {
    return wrong();
  }
  const auto size = [](const TensorShape& shape, bool last) {
    return shape.dim_size(shape.dims() - 2 + last);
  };
  form.rows = size(left, form.transpose_left);
  form.depth = size(left, !form.transpose_left);
  form.columns = size(right, !form.transpose_right);
  bool fits = size(right, form.transpose_right) == form.depth && size(result, false) == form.rows &&
              size(result, true) == form.columns;
  for (int i = 0; i < rank - 2; ++i) {
    const int in_left = i - (rank - left.dims()), in_right = i - (rank - right.dims());
    const int64_t a = in_left < 0 ? 1 : left.dim_size(in_left);
    const int64_t b = in_right < 0 ? 1 : right.dim_size(in_right);
    fits = fits && (a == b || a == 1 || b == 1) && result.dim_size(i) == (a == 1 ? b : a);
  }
  if (form.bias) fits = fits && values[step.inputs[2]] == TensorShape({form.columns});
  if (!fits) return wrong();
  if (result.num_elements() == 0) return form;
  for (int64_t each : {form.rows, form.depth, form.columns}) {
    if (each > kMostOfASize) return wrong();
  }
  form.left_batch = Batches(result, left);
  form.right_batch = Batches(result, right);
  if (form.left_batch.size() > static_cast<size_t>(kMostOfASize)) return wrong();
  return form;
}

absl::StatusOr<std::vector<Shape>> GpuSteps::PrepareKernel(int number, const Expression& program,
                                                           const std::vector<Shape>& inputs) {
  TFMEM_ASSIGN_OR_RETURN(const std::vector<int64_t> axes, AxisSizes(program, inputs));
  TFMEM_RETURN_IF_ERROR(
      SizeExpression(program, axes, inputs).status());  // no index leaves a tensor
  const LoadedKernel& loaded = kernels_[number];
  Step& step = steps_[number];
  TFMEM_ASSIGN_OR_RETURN(step.launch,
                         loaded.description->Launch(inputs, loaded.kernel->resident()));
  Size end = 0;
  for (int64_t bytes : step.launch.buffers) {
    step.buffers.push_back(end.value());
    end = end + Aligned(bytes);
  }
  if (!end.ok())
    return absl::InvalidArgumentError("region: buffers of more bytes than 64 bits count");
  step.workspace = end.value();
  if (loaded.description->image.cooperative) step.barrier = barriers_++;
  std::vector<Shape> outputs;
  for (const ExpressionOutput& output : program.outputs) {
    Shape& shape = outputs.emplace_back();
    for (int axis : output.axes) shape.push_back(axes[axis]);
  }
  return outputs;
}

absl::Status GpuSteps::PrepareCall(int number, const std::vector<TensorShape>& values) {
  const RegionStep& called = compiled_.region.steps[number];
  if (IsConvolution(called.op)) return PrepareConvolution(number, values);
  if (IsPooling(called.op)) return PreparePooling(number, values);
  TFMEM_ASSIGN_OR_RETURN(const ProductForm form, ProductOf(compiled_, number, tf32_, values));
  const int64_t numbers = values[called.first_output].num_elements();
  if (numbers == 0) return absl::OkStatus();
  if (form.depth > 0) return PrepareProduct(number, form);
  SetZeros(number, numbers);  // as TensorFlow's kernels have it, which add no bias then
  return absl::OkStatus();
}

absl::Status GpuSteps::PrepareProduct(int number, const ProductForm& form) {
  Step& step = steps_[number];
  TFMEM_ASSIGN_OR_RETURN(step.product, GpuProduct::Make(link_, form, timed_ ? trial_ : nullptr));
  SetWorkspace(number, step.product->workspace_bytes());
  return absl::OkStatus();
}

absl::Status GpuSteps::PrepareConvolution(int number, const std::vector<TensorShape>& values) {
  TFMEM_ASSIGN_OR_RETURN(const ConvolutionForm form,
                         ConvolutionOf(compiled_, number, tf32_, values));
  const RegionStep& called = compiled_.region.steps[number];
  const int64_t numbers = values[called.first_output].num_elements();
  if (numbers == 0) return absl::OkStatus();
  for (int input : called.inputs) {
    if (values[input].num_elements() > 0) continue;
    SetZeros(number, numbers);
    return absl::OkStatus();
  }
  Step& step = steps_[number];
  if (const std::optional<ProductForm> product = ProductOf(form)) {
    step.swapped = form.kind == ConvolutionKind::kInputGradient;
    return PrepareProduct(number, *product);
  }
  TFMEM_ASSIGN_OR_RETURN(std::shared_ptr<GpuConvolution> convolution,
                         GpuConvolution::Make(link_, form, *trial_, timed_));
  SetWorkspace(number, convolution->workspace_bytes());
  step.cudnn = [convolution](cuda::Stream stream, auto addresses) {
    return convolution->Enqueue(stream, addresses);
  };
  return absl::OkStatus();
}

absl::Status GpuSteps::PreparePooling(int number, const std::vector<TensorShape>& values) {
  TFMEM_ASSIGN_OR_RETURN(const PoolingForm form, PoolingOf(compiled_, number, values));
  const RegionStep& called = compiled_.region.steps[number];
  const int64_t numbers = values[called.first_output].num_elements();
  if (numbers == 0) return absl::OkStatus();
  if (form.gradient && values[called.inputs.back()].num_elements() == 0) {
    SetZeros(number, numbers);
    return absl::OkStatus();
  }
  TFMEM_ASSIGN_OR_RETURN(std::shared_ptr<GpuPooling> pooling,
                         GpuPooling::Make(link_, form, *trial_));
  steps_[number].cudnn = [pooling](cuda::Stream stream, auto addresses) {
    return pooling->Enqueue(stream, addresses);
  };
  return absl::OkStatus();
}

void GpuSteps::SetWorkspace(int number, int64_t bytes) {
  static_assert(GpuProduct::kWorkspaceAlignment == GpuConvolution::kWorkspaceAlignment);
  if (bytes == 0) return;
  steps_[number].workspace = Aligned(bytes + GpuProduct::kWorkspaceAlignment).value();
}

void GpuSteps::SetZeros(int number, int64_t numbers) {
  const int value = compiled_.region.steps[number].first_output;
  steps_[number].zeros = numbers * BytesOf(compiled_.region.values[value].dtype);
}

bool GpuSteps::MayShare(int step, int input, int output) const {
  return kernels_[step].description->MayShare(input, output);
}

std::vector<GraphStep> GpuSteps::GraphSteps(RegionShapes* shapes) {
  trial_ = nullptr;  // all is prepared
  RegionMemory memory(compiled_, *shapes);
  std::vector<GraphStep> found;
  std::vector<std::vector<MemoryUse>> uses;
  // Kernels whose CTAs wait for each other use it all, so that they run one after the other: each
  // is launched as a whole once all of its CTAs have a place, and of two at a time neither might.
  // What runs beside one of them only delays it, for it waits for nothing.
  const int barriers = memory.Add(barriers_ * kBarrierBytes);
  if (barriers_ > 0) {
    found.emplace_back().zeros = barriers_ * kBarrierBytes;
    uses.push_back({{barriers, true}});
  }
  // cuDNN's handle has memory, too, so its calls run one after the other, and may have the
  // same workspace.
  const int handle = memory.Add(0);
  std::vector<int> workspaces(steps_.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (!Runs(i)) continue;
    found.push_back(GraphStepOf(i));
    std::vector<MemoryUse>& used = uses.emplace_back(memory.UsesOf(i));
    if (steps_[i].barrier >= 0) used.push_back({barriers, true});
    if (steps_[i].cudnn != nullptr) used.push_back({handle, true});
    if (steps_[i].workspace == 0) continue;
    workspaces[i] = memory.Add(steps_[i].workspace);
    used.push_back({workspaces[i], true});
  }
  StepSchedule schedule = ScheduleSteps(uses, memory.memories());
  for (size_t i = 0; i < found.size(); ++i) found[i].after = std::move(schedule.after[i]);
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i].workspace > 0) steps_[i].workspace_offset = schedule.offsets[workspaces[i]];
  }
  barriers_offset_ = schedule.offsets[barriers];
  shapes->arena_bytes = schedule.bytes;
  schedule.offsets.resize(shapes->offsets.size());
  shapes->offsets = std::move(schedule.offsets);
  return found;
}

GraphStep GpuSteps::GraphStepOf(int number) const {
  const Step& step = steps_[number];
  GraphStep made;
  if (IsKernel(number)) {
    made.kernel = kernels_[number].kernel;
    made.grid = {step.launch.ctas};
  } else if (step.product != nullptr) {
    made.enqueue = [product = step.product](cuda::Stream stream, auto addresses) {
      return product->Enqueue(stream, addresses);
    };
  } else if (step.cudnn != nullptr) {
    made.enqueue = step.cudnn;
  } else {
    made.zeros = step.zeros;
  }
  return made;
}

std::vector<GraphWords> GpuSteps::Words(const std::vector<uint64_t>& values, uint64_t arena) const {
  std::vector<GraphWords> found;
  if (barriers_ > 0) found.push_back({arena + barriers_offset_});
  for (size_t i = 0; i < steps_.size(); ++i) {
    const RegionStep& step = compiled_.region.steps[i];
    if (IsKernel(i)) {
      found.push_back(KernelWords(i, values, arena));
    } else if (steps_[i].product != nullptr) {
      const uint64_t bias = step.inputs.size() > 2 ? values[step.inputs[2]] : 0;
      const bool swapped = steps_[i].swapped;
      found.push_back({values[step.inputs[swapped]], values[step.inputs[!swapped]], bias,
                       values[step.first_output], WorkspaceOf(arena + steps_[i].workspace_offset)});
    } else if (steps_[i].cudnn != nullptr) {
      GraphWords& words = found.emplace_back();
      for (int input : step.inputs) words.push_back(values[input]);
      words.push_back(values[step.first_output]);
      words.push_back(WorkspaceOf(arena + steps_[i].workspace_offset));
    } else if (steps_[i].zeros > 0) {
      found.push_back({values[step.first_output]});
    }
  }
  return found;
}

GraphWords GpuSteps::KernelWords(int number, const std::vector<uint64_t>& values,
                                 uint64_t arena) const {
  const RegionStep& step = compiled_.region.steps[number];
  const Step& prepared = steps_[number];
  const std::vector<KernelWord>& words = kernels_[number].description->words;
  GraphWords found;
  for (size_t i = 0; i < words.size(); ++i) {
    using Kind = KernelWord::Kind;
    const int which = words[i].number;
    switch (words[i].kind) {
      case Kind::kTensor:
        found.push_back(values[step.inputs[which]]);
        break;
      case Kind::kOutput:
        found.push_back(values[step.first_output + which]);
        break;
      case Kind::kBuffer:
        found.push_back(arena + prepared.workspace_offset + prepared.buffers[which]);
        break;
      case Kind::kBarrier:
        found.push_back(arena + barriers_offset_ + prepared.barrier * kBarrierBytes);
        break;
      case Kind::kTf32:
        found.push_back(tf32_);
        break;
      case Kind::kExtent:
      case Kind::kFirst:
      case Kind::kCtas:
        found.push_back(prepared.launch.numbers[i]);
        break;
    }
  }
  if (found.empty()) found.push_back(0);  // no kernel takes nothing
  return found;
}

}  // namespace tfmem
