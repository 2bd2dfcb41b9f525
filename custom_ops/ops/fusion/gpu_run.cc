#include "custom_ops/ops/fusion/gpu_run.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/fusion/fusion.h"
#include "custom_ops/ops/fusion/host_variables.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/platform/tensor_float_32_utils.h"
#include "tensorflow/core/util/determinism.h"

namespace tfmem {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using Kind = RegionStep::Kind;
using HomeKind = ValueHome::Kind;

constexpr uintptr_t kAlignment = GpuProduct::kAlignment;

uint64_t AddressOf(const Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.data()); }

// Memory for a trial, one at a time; 0: there is none, which is no error.
uint64_t Scratch(OpKernelContext* ctx, int64_t bytes, std::vector<Tensor>* held) {
  held->clear();
  TensorShape shape;
  Tensor memory;
  tensorflow::AllocationAttributes once;
  once.retry_on_failure = false;
  if (!BuildShape({bytes}, &shape).ok() ||
      !ctx->allocate_temp(tensorflow::DT_UINT8, shape, &memory, {}, once).ok()) {
    return 0;
  }
  held->push_back(memory);
  return AddressOf(memory);
}

// One run. Memory is given back only when all is enqueued: before, another op could be given it,
// and enqueue first. So steps are gone through twice, here for their memory, then on the device.
class GpuExecution final : public RegionExecution {
 public:
  GpuExecution(const CompiledRegion& compiled, OpKernelContext* ctx, CopyBytes copy,
               RegionVariables* variables, GpuPlan* plan)
      : RegionExecution(compiled, plan->shapes, ctx, variables),
        copy_(std::move(copy)),
        plan_(*plan),
        tensors_(region_.values.size()),
        addresses_(region_.values.size()),
        assigned_(region_.variables.size()) {}

  absl::Status Run(cuda::Stream stream) {
    TFMEM_RETURN_IF_ERROR(Place());
    if (plan_.graph != nullptr) {
      TFMEM_RETURN_IF_ERROR(
          plan_.graph->Launch(stream, plan_.steps.Words(addresses_, AddressOf(memory_))));
    }
    return Finish();
  }

 private:
  absl::Status Place() {
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({shapes_.arena_bytes}, &shape));
    TFMEM_RETURN_IF_ERROR(ctx_->allocate_temp(tensorflow::DT_UINT8, shape, &memory_));
    for (int i = 0; i < region_.inputs; ++i) {
      TFMEM_RETURN_IF_ERROR(Point(i, ctx_->input(i)));
    }
    return RunSteps();
  }

  absl::Status RunKernel(int at, const RegionStep& step) override { return Give(at, step); }
  absl::Status RunCall(int at, const RegionStep& step) override { return Give(at, step); }

  absl::Status RunAssign(int /*at*/, const RegionStep& step) override {
    assigned_[step.variables[0]] = TensorOf(step.inputs[0]);
    order_.push_back(step.variables[0]);
    return absl::OkStatus();
  }

  // What a value is computed from or into: its memory, or a copy of it that is aligned.
  absl::Status Point(int value, const Tensor& tensor) {
    addresses_[value] = AddressOf(tensor);
    if (addresses_[value] % kAlignment == 0 || tensor.TotalBytes() == 0) return absl::OkStatus();
    Tensor& copy = copies_.emplace_back();
    TFMEM_RETURN_IF_ERROR(ctx_->allocate_temp(tensor.dtype(), tensor.shape(), &copy));
    addresses_[value] = AddressOf(copy);
    return copy_(copy.data(), tensor.data(), tensor.TotalBytes());
  }

  // Memory for the outputs of a kernel or a product.
  absl::Status Give(int at, const RegionStep& step) {
    for (int i = 0; i < step.outputs; ++i) {
      const int value = step.first_output + i;
      if (LiesInArena(value)) {
        addresses_[value] = AddressOf(memory_) + shapes_.offsets[value];
        continue;
      }
      TFMEM_RETURN_IF_ERROR(Allocate(at, step, i, &tensors_[value]));
      addresses_[value] = AddressOf(tensors_[value]);
    }
    return absl::OkStatus();
  }

  const void* DataOf(int value) const override {
    return reinterpret_cast<const void*>(addresses_[value]);
  }

  // What variables had and is not needed after a step: they hold it still, under their locks.
  void Forget(int at) override {
    for (int value : flow_.dying[at]) {
      const ValueHome& home = flow_.homes[flow_.root[value]];
      if (home.kind != HomeKind::kVariable) continue;
      const Tensor* now = variables_.Now(home.number);
      if (now != nullptr && now->SharesBufferWith(tensors_[value])) tensors_[value] = Tensor();
    }
  }

  void ForgetGroup(int at, int) override { Forget(at); }

  absl::Status RunView(const RegionStep& step) override {
    const int input = step.inputs[0], output = step.first_output;
    const ValueHome& home = flow_.homes[flow_.root[input]];
    addresses_[output] = addresses_[input];
    // These are never read as tensors, and another reference would prevent buffer forwarding.
    if (home.kind == HomeKind::kArena || (home.kind == HomeKind::kInput && !home.shared)) {
      return absl::OkStatus();
    }
    return ViewOf(TensorOf(input), output, &tensors_[output]);
  }

  // A variable that was assigned has what it was assigned.
  absl::Status RunRead(const RegionStep& step) override {
    const int value = step.first_output;
    Tensor& read = tensors_[value];
    const int variable = step.variables[0];
    if (assigned_[variable].has_value()) {
      read = *assigned_[variable];
    } else {
      TFMEM_RETURN_IF_ERROR(variables_.Read(variable, !flow_.homes[value].shared, &read));
    }
    TFMEM_RETURN_IF_ERROR(CheckRead(value, read));
    return Point(value, read);
  }

  const Tensor& TensorOf(int value) const {
    return value < region_.inputs ? ctx_->input(value) : tensors_[value];
  }

  // All is enqueued.
  absl::Status Finish() {
    for (size_t i = 0; i < region_.outputs.size(); ++i) {
      ctx_->set_output(i, TensorOf(region_.outputs[i]));
    }
    tensors_.clear();
    for (int variable : order_) {
      std::optional<Tensor> value = std::exchange(assigned_[variable], std::nullopt);
      if (!value.has_value()) continue;  // it was assigned twice
      TFMEM_RETURN_IF_ERROR(variables_.Assign(variable, *std::move(value)));
    }
    return absl::OkStatus();
  }

  const CopyBytes copy_;
  GpuPlan& plan_;
  Tensor memory_;                    // the arena
  std::vector<Tensor> tensors_;      // of values that do not lie there
  std::vector<uint64_t> addresses_;  // of all values
  std::vector<Tensor> copies_;
  std::vector<std::optional<Tensor>> assigned_;  // of each variable: its next value
  std::vector<int> order_;                       // of the variables that are assigned
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuRegionRunner>> GpuRegionRunner::Create(
    tensorflow::OpKernelConstruction* ctx) {
  TFMEM_ASSIGN_OR_RETURN(Region region, ReadFusionRegion(ctx));
  std::unique_ptr<GpuRegionRunner> runner(new GpuRegionRunner(ctx->def().name()));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("time_products", &runner->time_products_));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("dry_run", &runner->dry_run_));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<ProgramText> texts, ReadPrograms(ctx));
  runner->inputs_ = region.inputs;
  runner->uses_ = UsesOf(region);
  for (VariableUse& use : runner->uses_) use.assigned |= use.called;
  const auto is_kernel = [](const RegionStep& step) { return step.kind == Kind::kKernel; };
  // Without code for any GPU it was planned for the CPU, and what it calls may have no GPU kernel.
  const bool for_gpus =
      !texts.empty() || std::none_of(region.steps.begin(), region.steps.end(), is_kernel);
  if (for_gpus) TFMEM_RETURN_IF_ERROR(runner->ReadKernels(ctx, std::move(region), texts));
  return runner;
}

absl::Status GpuRegionRunner::ReadKernels(tensorflow::OpKernelConstruction* ctx, Region given,
                                          const std::vector<ProgramText>& texts) {
  TFMEM_ASSIGN_OR_RETURN(compiled_, CompiledRegion::Create(ctx, std::move(given)));
  const Region& region = compiled_->region;
  std::vector<const Expression*> programs;  // of the steps that are kernels
  for (const RegionStep& step : region.steps) {
    if (step.kind == Kind::kCall && !step.variables.empty()) {
      return absl::UnimplementedError(absl::StrCat(
          "call of ", step.op, ": a region on a GPU calls nothing that takes variables"));
    }
    if (step.kind == Kind::kKernel) programs.push_back(&region.programs[step.program]);
  }
  const size_t count = programs.size();
  for (size_t i = 0; i < texts.size() && count > 0; ++i) {
    if (i % count == 0) kernels_.emplace_back();
    TFMEM_ASSIGN_OR_RETURN(FusionKernel kernel, FusionKernel::Read(texts[i].header, texts[i].code,
                                                                   *programs[i % count]));
    kernels_.back().push_back(std::move(kernel));
  }
  if (count == 0) kernels_.emplace_back();
  const bool whole = count == 0 ? texts.empty() : texts.size() % count == 0;
  if (whole) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "'", name_, "' (TfmemFusion) has ", texts.size(), " programs for a GPU, expected ", count,
      ": run tfmem.optimize on the machine with this GPU, or place the op on ", "the CPU"));
}

absl::Status GpuRegionRunner::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  const absl::Status loaded = compiled_ == nullptr ? NoProgram(link) : Load(link);
  if (absl::IsFailedPrecondition(loaded)) {
    return RunOnHost(&host_, ctx, link, stream, {inputs_, uses_, dry_run_}, loaded);
  }
  TFMEM_RETURN_IF_ERROR(loaded);
  const CopyBytes copy = CopyOn(link, stream);
  RegionVariables variables(ctx, compiled_->region.inputs, compiled_->uses, copy, dry_run_);
  TFMEM_RETURN_IF_ERROR(variables.Open());
  TFMEM_ASSIGN_OR_RETURN(const std::shared_ptr<GpuPlan> plan,
                         PlanFor(ctx, link, stream, variables));
  return GpuExecution(*compiled_, ctx, copy, &variables, plan.get()).Run(stream);
}

// Once: an op stays on its device. FailedPrecondition says what each set of kernels is for.
absl::Status GpuRegionRunner::Load(GpuLink* link) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!loaded_.empty()) return absl::OkStatus();
  std::string reasons;
  for (const std::vector<FusionKernel>& kernels : kernels_) {
    absl::StatusOr<std::vector<LoadedKernel>> loaded = Loaded(link, kernels);
    if (loaded.ok()) {
      loaded_ = *std::move(loaded);
      return absl::OkStatus();
    }
    if (!absl::IsFailedPrecondition(loaded.status())) return loaded.status();
    absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", loaded.status().message());
  }
  return absl::FailedPreconditionError(reasons);
}

// What is for another GPU fails its precondition.
absl::StatusOr<std::vector<LoadedKernel>> GpuRegionRunner::Loaded(
    GpuLink* link, const std::vector<FusionKernel>& kernels) const {
  std::vector<LoadedKernel> loaded;
  auto description = kernels.begin();
  for (const RegionStep& step : compiled_->region.steps) {
    LoadedKernel& made = loaded.emplace_back();
    if (step.kind != Kind::kKernel) continue;
    TFMEM_ASSIGN_OR_RETURN(std::unique_ptr<GpuKernel> kernel,
                           GpuKernel::Load(link, description->image));
    made = {&*description++, std::move(kernel)};
  }
  return loaded;
}

absl::StatusOr<std::shared_ptr<GpuPlan>> GpuRegionRunner::PlanFor(
    OpKernelContext* ctx, GpuLink* link, cuda::Stream stream, const RegionVariables& variables) {
  const Region& region = compiled_->region;
  const bool tf32 = tensorflow::tensor_float_32_execution_enabled();
  const std::vector<const Tensor*> values = ValuesOf(variables, region.variables.size());
  ShapesKey key = KeyOf(ctx, region.inputs, values);
  key.push_back(tf32);
  // Plans are made one at a time: what two threads would make is the same, and takes memory.
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto* known = known_.Find(key); known != nullptr) return *known;
  std::vector<TensorShape> inputs;
  for (int i = 0; i < region.inputs; ++i) inputs.push_back(ctx->input(i).shape());
  std::vector<Tensor> scratch;  // until the plan is made
  const GpuTrial trial = {stream, [&](int64_t bytes) { return Scratch(ctx, bytes, &scratch); }};
  const bool timed = time_products_ && !tensorflow::OpDeterminismRequired();
  auto plan = std::make_shared<GpuPlan>(
      GpuPlan{{}, {link, *compiled_, loaded_, tf32, &trial, timed}, nullptr});
  absl::StatusOr<RegionShapes> shapes = ShapesOf(*compiled_, inputs, values, &plan->steps);
  if (!shapes.ok()) {
    return absl::Status(shapes.status().code(),
                        absl::StrCat("'", name_, "' (TfmemFusion): ", shapes.status().message()));
  }
  plan->shapes = *std::move(shapes);
  std::vector<GraphStep> steps = plan->steps.GraphSteps(&plan->shapes);
  if (!steps.empty()) plan->graph = std::make_unique<GpuGraph>(link, std::move(steps));
  known_.Add(std::move(key), plan);
  return plan;
}

}  // namespace tfmem
