#include "custom_ops/ops/fusion/region_run.h"

#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/cpu/costs.h"
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
using HomeKind = ValueHome::Kind;

constexpr size_t kMostIdle = 4;               // frames of one of them
constexpr int64_t kMostIdleBytes = 64 << 20;  // of an arena that outlives its run

// One run.
class CpuExecution final : public RegionExecution {
 public:
  CpuExecution(const CompiledRegion& compiled, OpKernelContext* ctx, RegionVariables* variables,
               RegionFrame* frame)
      : RegionExecution(compiled, frame->known->shapes, ctx, variables), frame_(*frame) {}

  absl::Status Run() {
    for (int i = 0; i < region_.inputs; ++i) frame_.at[i] = &ctx_->input(i);
    TFMEM_RETURN_IF_ERROR(RunSteps());
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
  absl::Status RunKernel(int at, const RegionStep& step) override {
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

  absl::Status RunCall(int at, const RegionStep& step) override {
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
      // An output that no step reads may have any shape: SelfAdjointEigV2 without vectors gives a
      // scalar for them, where its shape function has no elements.
      if (flow_.homes[value].last_use == at) continue;
      // oneDNN's convolution of no image gives the shape of its input: nothing, of another shape.
      if (outputs[i].NumElements() == 0 && shapes_.values[value].num_elements() == 0) continue;
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

  // What a kernel gave as an output, for which it was given memory. It may be its input: only this
  // run uses the arena.
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

  absl::Status RunView(const RegionStep& step) override {
    const int input = step.inputs[0], output = step.first_output;
    if (frame_.at[input] == &frame_.arena[input]) return absl::OkStatus();  // as is its view
    Tensor view;
    TFMEM_RETURN_IF_ERROR(ViewOf(*frame_.at[input], output, &view));
    Hold(output, std::move(view));
    return absl::OkStatus();
  }

  absl::Status RunRead(const RegionStep& step) override {
    const int value = step.first_output;
    const bool while_locked = !flow_.homes[value].shared && !flow_.calls_variables;
    Tensor read;
    TFMEM_RETURN_IF_ERROR(variables_.Read(step.variables[0], while_locked, &read));
    TFMEM_RETURN_IF_ERROR(CheckRead(value, read));
    Hold(value, std::move(read));
    return absl::OkStatus();
  }

  absl::Status RunAssign(int at, const RegionStep& step) override {
    Tensor value = *frame_.at[step.inputs[0]];
    ForgetGroup(at, step.inputs[0]);
    return variables_.Assign(step.variables[0], std::move(value));
  }

  // Memory for an output of a kernel or a call.
  absl::Status Give(int at, const RegionStep& step, int output) {
    const int value = step.first_output + output;
    if (LiesInArena(value)) return absl::OkStatus();
    Tensor memory;
    TFMEM_RETURN_IF_ERROR(Allocate(at, step, output, &memory));
    Hold(value, std::move(memory));
    return absl::OkStatus();
  }

  const void* DataOf(int value) const override { return frame_.at[value]->data(); }

  void Hold(int value, Tensor tensor) {
    frame_.held[value] = std::move(tensor);
    frame_.at[value] = &frame_.held[value];
  }

  void Release(int value) {
    if (frame_.at[value] != &frame_.held[value]) return;
    frame_.at[value] = &frame_.arena[value];
    frame_.held[value] = Tensor();
  }

  void Forget(int at) override {
    for (int value : flow_.dying[at]) Release(value);
  }
  void ForgetGroup(int at, int value) override {
    for (int other : flow_.dying[at]) {
      if (flow_.root[other] == flow_.root[value]) Release(other);
    }
  }

  static std::string TraceName(const RegionStep& step) {
    return step.members.empty() ? step.op : absl::StrJoin(step.members, ",");
  }

  RegionFrame& frame_;
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

int CpuSteps::UsefulThreads() const { return work_ns_ < cpu_costs::kWakingNs ? 1 : threads_; }

absl::Status RegionRunner::Run(OpKernelContext* ctx) {
  RegionVariables variables(ctx, compiled_->region.inputs, compiled_->uses, nullptr, dry_run_);
  TFMEM_RETURN_IF_ERROR(variables.Open());
  TFMEM_ASSIGN_OR_RETURN(std::unique_ptr<RegionFrame> frame, TakeFrame(ctx, variables));
  CpuExecution execution(*compiled_, ctx, &variables, frame.get());
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
  ShapesKey key = KeyOf(ctx, region.inputs, values);
  std::shared_ptr<const CpuShapes> shapes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Known* known = known_.Find(key); known != nullptr) {
      shapes = known->shapes;
      if (!known->idle.empty()) {
        std::unique_ptr<RegionFrame> frame = std::move(known->idle.back());
        known->idle.pop_back();
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
    known_.Add(std::move(key), Known{shapes, {}});
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
  if (!keep_memory_ || frame->known->shapes.arena_bytes > kMostIdleBytes) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [key, known] : known_.all()) {
    if (known.shapes != frame->known) continue;
    if (known.idle.size() < kMostIdle) known.idle.push_back(std::move(frame));
    return;
  }
}

}  // namespace tfmem
