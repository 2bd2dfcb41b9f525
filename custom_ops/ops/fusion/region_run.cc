#include "custom_ops/ops/fusion/region_run.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/threadpool.h"
#include "tsl/profiler/lib/traceme.h"

namespace tfmem {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::TensorValue;
using Kind = RegionStep::Kind;
using HomeKind = ValueHome::Kind;

constexpr size_t kMostShapes = 16;            // that are known at a time
constexpr size_t kMostIdle = 4;               // frames of one of them
constexpr int64_t kMostIdleBytes = 64 << 20;  // of an arena that outlives its run
constexpr double kWakingNs = 2e5;             // of a region's work that are worth waking threads

// One run.
class Execution {
 public:
  Execution(const CompiledRegion& compiled, OpKernelContext* ctx, RegionVariables* variables,
            RegionFrame* frame)
      : compiled_(compiled),
        region_(compiled.region),
        flow_(compiled.flow),
        ctx_(ctx),
        variables_(*variables),
        frame_(*frame),
        shapes_(frame->known->shapes) {}

  absl::Status Run() {
    for (int i = 0; i < region_.inputs; ++i) frame_.at[i] = &ctx_->input(i);
    for (size_t at = 0; at < region_.steps.size(); ++at) {
      TFMEM_RETURN_IF_ERROR(RunStep(at));
      for (int value : flow_.dying[at]) Release(value);
    }
    for (size_t i = 0; i < region_.outputs.size(); ++i) {
      ctx_->set_output(i, *frame_.at[region_.outputs[i]]);
    }
    return absl::OkStatus();
  }

  // Nothing of this run is held any more.
  void Clear() {
    for (size_t value = 0; value < frame_.held.size(); ++value) Release(value);
    for (int i = 0; i < region_.inputs; ++i) frame_.at[i] = nullptr;
  }

 private:
  absl::Status RunStep(int at) {
    const RegionStep& step = region_.steps[at];
    switch (step.kind) {
      case Kind::kKernel:
        return RunKernel(at, step);
      case Kind::kCall:
        return RunCall(at, step);
      case Kind::kView:
        return RunView(step);
      case Kind::kRead:
        return RunRead(step);
      case Kind::kAssign:
        return RunAssign(at, step);
    }
    return absl::OkStatus();
  }

  absl::Status RunKernel(int at, const RegionStep& step) {
    tsl::profiler::TraceMe trace([&] { return TraceName(step); });
    absl::InlinedVector<const void*, 16> inputs;
    absl::InlinedVector<void*, 8> outputs;
    for (int input : step.inputs) inputs.push_back(DataOf(input));
    for (int i = 0; i < step.outputs; ++i) {
      TFMEM_RETURN_IF_ERROR(Give(at, step, i));
      outputs.push_back(const_cast<void*>(DataOf(step.first_output + i)));
    }
    return frame_.known->steps.kernel(at).Run(inputs, outputs, Threads(), Workspace());
  }

  char* Workspace() const { return static_cast<char*>(frame_.memory.data()) + shapes_.workspace; }

  absl::Status RunProduct(int at, const RegionStep& step, const CallProduct& product) {
    TFMEM_RETURN_IF_ERROR(Give(at, step, 0));
    const void* bias = step.inputs.size() > 2 ? DataOf(step.inputs[2]) : nullptr;
    product.Run(DataOf(step.inputs[0]), DataOf(step.inputs[1]), bias,
                const_cast<void*>(DataOf(step.first_output)), Threads(), Workspace());
    return absl::OkStatus();
  }

  absl::Status RunCall(int at, const RegionStep& step) {
    tsl::profiler::TraceMe trace([&] { return TraceName(step); });
    const CallProduct* product = frame_.known->steps.product(at);
    if (product != nullptr) return RunProduct(at, step, *product);
    absl::InlinedVector<TensorValue, 8> inputs;
    for (int variable : step.variables) {
      inputs.emplace_back(const_cast<Tensor*>(&ctx_->input(region_.inputs + variable)));
    }
    for (int input : step.inputs) inputs.emplace_back(const_cast<Tensor*>(frame_.at[input]));
    absl::InlinedVector<Tensor, 4> outputs;
    for (int i = 0; i < step.outputs; ++i) {
      TFMEM_RETURN_IF_ERROR(Give(at, step, i));
      outputs.push_back(*frame_.at[step.first_output + i]);
    }
    // The kernel takes the locks of its variables.
    if (!step.variables.empty()) variables_.Unlock();
    const absl::Status status = compiled_.calls[at]->Run(ctx_, inputs, absl::MakeSpan(outputs));
    if (!step.variables.empty()) variables_.Lock();
    TFMEM_RETURN_IF_ERROR(status);
    for (int i = 0; i < step.outputs; ++i) {
      const int value = step.first_output + i;
      // What nobody reads may be of any shape: SelfAdjointEigV2 without vectors gives a scalar for
      // them, where its shape function has no elements.
      if (flow_.homes[value].last_use == at) continue;
      if (outputs[i].shape() != shapes_.values[value]) {
        return absl::InternalError(absl::StrCat(compiled_.calls[at]->name(), ": output ", i,
                                                " has shape ", outputs[i].shape().DebugString(),
                                                "; expected ", shapes_.values[value].DebugString(),
                                                ", as its op says"));
      }
      Take(value, std::move(outputs[i]));
    }
    return absl::OkStatus();
  }

  // What a kernel gave as an output, for which it was given memory. It may be its input: the arena
  // is nobody's but this run's.
  void Take(int value, Tensor output) {
    const Tensor& given = *frame_.at[value];
    if (output.data() == given.data()) return;
    if (output.SharesBufferWith(frame_.memory)) {
      std::memcpy(given.data(), output.data(), output.TotalBytes());
    } else {
      Hold(value, std::move(output));
    }
  }

  TileThreads Threads() const {
    const auto& workers = *ctx_->device()->tensorflow_cpu_worker_threads();
    return {frame_.known->steps.UsefulThreads(),
            [pool = workers.workers](std::function<void()> closure) {
              pool->Schedule(std::move(closure));
            }};
  }

  absl::Status RunView(const RegionStep& step) {
    const int input = step.inputs[0], output = step.first_output;
    if (frame_.at[input] == &frame_.arena[input]) return absl::OkStatus();  // as is its view
    Tensor view;
    if (!view.CopyFrom(*frame_.at[input], shapes_.values[output])) {
      return absl::InternalError("region: a view of another size than its value");
    }
    Hold(output, std::move(view));
    return absl::OkStatus();
  }

  absl::Status RunRead(const RegionStep& step) {
    const int value = step.first_output;
    const bool while_locked = !flow_.homes[value].shared && !flow_.calls_variables;
    Tensor read;
    TFMEM_RETURN_IF_ERROR(variables_.Read(step.variables[0], while_locked, &read));
    if (read.shape() != shapes_.values[value]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "region: a variable has shape ", read.shape().DebugString(), " when it is read, and had ",
          shapes_.values[value].DebugString(), " when the region began"));
    }
    Hold(value, std::move(read));
    return absl::OkStatus();
  }

  absl::Status RunAssign(int at, const RegionStep& step) {
    Tensor value = *frame_.at[step.inputs[0]];
    ReleaseGroup(at, step.inputs[0]);
    return variables_.Assign(step.variables[0], std::move(value));
  }

  // Memory for an output of a kernel or a call.
  absl::Status Give(int at, const RegionStep& step, int output) {
    const int value = step.first_output + output;
    const ValueHome& home = flow_.homes[value];
    if (home.kind == HomeKind::kArena) return absl::OkStatus();
    const int reused = shapes_.reused[at][output];
    const int input = reused < 0 ? -1 : step.inputs[reused];
    const TensorShape& shape = shapes_.values[value];
    const tensorflow::DataType dtype = DataTypeOf(region_.values[value].dtype);
    tensorflow::AllocatorAttributes attributes;
    if (home.kind == HomeKind::kOutput) {
      attributes = ctx_->output_alloc_attr(home.number);
      if (input >= 0) {
        const int number = flow_.homes[flow_.root[input]].number;
        std::unique_ptr<Tensor> forwarded = ctx_->forward_input(
            number, home.number, dtype, shape, ctx_->output_memory_type(home.number), attributes);
        if (forwarded != nullptr) {
          Hold(value, std::move(*forwarded));
          return absl::OkStatus();
        }
      }
    }
    Tensor memory;
    if (home.kind != HomeKind::kAssigned || input < 0 ||
        !TakeVariable(at, input, home.number, shape, &memory)) {
      TFMEM_RETURN_IF_ERROR(ctx_->allocate_temp(dtype, shape, &memory, attributes));
    }
    Hold(value, std::move(memory));
    return absl::OkStatus();
  }

  // The memory of a variable whose value `input` is not needed after this step, if nobody else
  // holds it.
  bool TakeVariable(int at, int input, int variable, const TensorShape& shape, Tensor* memory) {
    const Tensor* now = variables_.Now(variable);
    if (now == nullptr || now->data() != DataOf(input)) return false;  // it has a copy
    ReleaseGroup(at, input);
    return variables_.MayWrite(variable) && memory->CopyFrom(*now, shape);
  }

  const void* DataOf(int value) const { return frame_.at[value]->data(); }

  void Hold(int value, Tensor tensor) {
    frame_.held[value] = std::move(tensor);
    frame_.at[value] = &frame_.held[value];
  }

  void Release(int value) {
    if (frame_.at[value] != &frame_.held[value]) return;
    frame_.at[value] = &frame_.arena[value];
    frame_.held[value] = Tensor();
  }

  // A value and its views, if they die at this step.
  void ReleaseGroup(int at, int value) {
    for (int other : flow_.dying[at]) {
      if (flow_.root[other] == flow_.root[value]) Release(other);
    }
  }

  static std::string TraceName(const RegionStep& step) {
    return step.members.empty() ? step.op : absl::StrJoin(step.members, ",");
  }

  const CompiledRegion& compiled_;
  const Region& region_;
  const RegionFlow& flow_;
  OpKernelContext* const ctx_;
  RegionVariables& variables_;
  RegionFrame& frame_;
  const RegionShapes& shapes_;
};

}  // namespace

absl::StatusOr<std::vector<Shape>> CpuSteps::PrepareKernel(int step, const Expression& program,
                                                           const std::vector<Shape>& inputs) {
  TFMEM_ASSIGN_OR_RETURN(const std::vector<int64_t> axes, AxisSizes(program, inputs));
  TFMEM_ASSIGN_OR_RETURN(kernels_[step],
                         PreparedExpression::Prepare(program, axes, inputs, ChosenKernels()));
  work_ns_ += kernels_[step]->work_ns();
  return kernels_[step]->output_shapes();
}

absl::Status CpuSteps::PrepareCall(int step, const std::vector<TensorShape>& values) {
  const RegionStep& call = compiled_->region.steps[step];
  if (call.outputs != 1 || !call.variables.empty()) return absl::OkStatus();
  std::vector<TensorShape> inputs;
  for (int input : call.inputs) inputs.push_back(values[input]);
  products_[step] =
      ProductOf(compiled_->calls[step]->node(), inputs, values[call.first_output], ChosenKernels());
  if (products_[step] != nullptr) work_ns_ += products_[step]->work_ns();
  return absl::OkStatus();
}

int CpuSteps::UsefulThreads() const { return work_ns_ < kWakingNs ? 1 : threads_; }

absl::Status RegionRunner::Run(OpKernelContext* ctx) {
  RegionVariables variables(ctx, compiled_->region.inputs, compiled_->uses);
  TFMEM_RETURN_IF_ERROR(variables.Open());
  TFMEM_ASSIGN_OR_RETURN(std::unique_ptr<RegionFrame> frame, TakeFrame(ctx, variables));
  Execution execution(*compiled_, ctx, &variables, frame.get());
  const absl::Status status = execution.Run();
  execution.Clear();
  variables.Unlock();
  GiveBack(std::move(frame));
  return status;
}

absl::StatusOr<std::unique_ptr<RegionFrame>> RegionRunner::TakeFrame(
    OpKernelContext* ctx, const RegionVariables& variables) {
  const Region& region = compiled_->region;
  const std::vector<const Tensor*> values = ValuesOf(variables, region.variables.size());
  Key key = KeyOf(ctx, region.inputs, values);
  std::shared_ptr<const CpuShapes> shapes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(known_.begin(), known_.end(),
                                    [&](const Known& known) { return known.key == key; });
    if (found != known_.end()) {
      known_.splice(known_.begin(), known_, found);
      shapes = found->shapes;
      if (!found->idle.empty()) {
        std::unique_ptr<RegionFrame> frame = std::move(found->idle.back());
        found->idle.pop_back();
        return frame;
      }
    }
  }
  if (shapes == nullptr) {
    std::vector<TensorShape> inputs;
    for (int i = 0; i < region.inputs; ++i) inputs.push_back(ctx->input(i).shape());
    const int threads = ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
    CpuSteps steps(*compiled_, threads);
    TFMEM_ASSIGN_OR_RETURN(RegionShapes made, ShapesOf(*compiled_, inputs, values, &steps));
    shapes = std::make_shared<const CpuShapes>(CpuShapes{std::move(made), std::move(steps)});
    std::lock_guard<std::mutex> lock(mutex_);
    known_.push_front({std::move(key), shapes, {}});
    if (known_.size() > kMostShapes) known_.pop_back();
  }
  return MakeFrame(ctx, std::move(shapes));
}

absl::StatusOr<std::unique_ptr<RegionFrame>> RegionRunner::MakeFrame(
    OpKernelContext* ctx, std::shared_ptr<const CpuShapes> known) const {
  const RegionShapes& shapes = known->shapes;
  const Region& region = compiled_->region;
  const RegionFlow& flow = compiled_->flow;
  auto frame = std::make_unique<RegionFrame>();
  frame->known = known;
  frame->arena.resize(region.values.size());
  frame->held.resize(region.values.size());
  for (const Tensor& value : frame->arena) frame->at.push_back(&value);
  TFMEM_RETURN_IF_ERROR(
      ctx->allocate_temp(tensorflow::DT_UINT8, TensorShape({shapes.arena_bytes}), &frame->memory));
  for (size_t value = 0; value < region.values.size(); ++value) {
    const int root = flow.root[value];
    if (flow.homes[root].kind != HomeKind::kArena) continue;
    const tensorflow::DataType dtype = DataTypeOf(region.values[value].dtype);
    const TensorShape& shape = shapes.values[value];
    const int64_t bytes = shape.num_elements() * BytesOf(region.values[value].dtype);
    if (bytes == 0) {
      frame->arena[value] = Tensor(dtype, shape);
      continue;
    }
    const int64_t offset = shapes.offsets[root];
    TFMEM_RETURN_IF_ERROR(
        frame->arena[value].BitcastFrom(frame->memory.Slice(offset, offset + bytes), dtype, shape));
  }
  return frame;
}

void RegionRunner::GiveBack(std::unique_ptr<RegionFrame> frame) {
  if (frame->known->shapes.arena_bytes > kMostIdleBytes) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (Known& known : known_) {
    if (known.shapes != frame->known) continue;
    if (known.idle.size() < kMostIdle) known.idle.push_back(std::move(frame));
    return;
  }
}

}  // namespace tfmem
