// TfmemStepDraws: what a stateless random op makes in each step of a loop, from a seed of each.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tfmem {
namespace {

using ::tensorflow::AllocatorAttributes;
using ::tensorflow::DataTypeVector;
using ::tensorflow::NodeDef;
using ::tensorflow::OpDef;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::PartialTensorShape;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::TensorValue;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kNumberCost = 8;  // cycles for each number that is drawn

// Ops of numbers alone, without effects.
bool IsDraw(const std::string& op) {
  return absl::StartsWith(op, "StatelessRandom") || absl::StartsWith(op, "StatelessTruncated");
}

absl::Status StepDrawsShape(InferenceContext* ctx) {
  std::vector<bool> of_steps;
  std::vector<PartialTensorShape> shapes;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("of_steps", &of_steps));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("shapes", &shapes));
  if (static_cast<int>(of_steps.size()) != ctx->num_inputs() ||
      static_cast<int>(shapes.size()) != ctx->num_outputs()) {
    return absl::InvalidArgumentError("of_steps or shapes has not one entry for each tensor");
  }
  int64_t known = -1;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("steps", &known));
  DimensionHandle steps = known < 0 ? ctx->UnknownDim() : ctx->MakeDim(known);
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    ShapeHandle input;
    if (!of_steps[i]) continue;
    TFMEM_RETURN_IF_ERROR(ctx->WithRankAtLeast(ctx->input(i), 1, &input));
    TFMEM_RETURN_IF_ERROR(ctx->Merge(steps, ctx->Dim(input, 0), &steps));
  }
  for (int i = 0; i < ctx->num_outputs(); ++i) {
    ShapeHandle rest, whole;
    TFMEM_RETURN_IF_ERROR(ctx->MakeShapeFromPartialTensorShape(shapes[i], &rest));
    TFMEM_RETURN_IF_ERROR(ctx->Concatenate(ctx->Vector(steps), rest, &whole));
    ctx->set_output(i, whole);
  }
  return absl::OkStatus();
}

REGISTER_OP("TfmemStepDraws")
    .Input("inputs: Tin")
    .Output("outputs: Tout")
    .Attr("op: string")
    .Attr("Tin: list(type)")
    .Attr("Tout: list(type)")
    .Attr("of_steps: list(bool)")
    .Attr("shapes: list(shape)")
    .Attr("steps: int >= -1 = -1")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .SetShapeFn(StepDrawsShape)
    .Doc(R"doc(
Makes what a stateless random op makes in each step: on a CPU TensorFlow's kernel runs once for each.

inputs: those of the op; one that differs between steps has one more dimension in front, [steps, ...].
outputs: those of the op for each step, [steps, ...].
op: a stateless random op, "StatelessRandomNormalV2".
of_steps: for each input whether it differs between steps; one does at least.
shapes: of the outputs in one step, as far as they are known.
steps: how many steps there are, if that is known before they run.
programs: GPU programs (custom_ops/random/draw_kernels.py) that draw for all steps; the first that loads runs.
images: for each program the function of the graph's library that holds its code.
)doc");

// The op that runs in each step; its attributes follow from the types of its tensors.
absl::StatusOr<NodeDef> Original(const std::string& name, const std::string& op,
                                 const DataTypeVector& inputs, const DataTypeVector& outputs) {
  const OpDef* definition = nullptr;
  TFMEM_RETURN_IF_ERROR(tensorflow::OpRegistry::Global()->LookUpOpDef(op, &definition));
  if (!IsDraw(op) || definition->is_stateful() ||
      definition->input_arg_size() != static_cast<int>(inputs.size()) ||
      definition->output_arg_size() != static_cast<int>(outputs.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' (TfmemStepDraws) was given ", op, " with ", inputs.size(),
                     " inputs; expected a stateless random op with its inputs and outputs"));
  }
  tensorflow::NodeDefBuilder builder(name, definition);
  for (size_t i = 0; i < inputs.size(); ++i) {
    builder.Input(absl::StrCat("input", i), 0, inputs[i]);
  }
  for (int i = 0; i < definition->output_arg_size(); ++i) {
    const std::string& attribute = definition->output_arg(i).type_attr();
    if (!attribute.empty()) builder.Attr(attribute, outputs[i]);
  }
  NodeDef node;
  TFMEM_RETURN_IF_ERROR(builder.Finalize(&node, /*consume=*/true));
  return node;
}

class StepDrawsOp : public OpKernel {
 public:
  explicit StepDrawsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string op;
    DataTypeVector inputs, outputs;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("op", &op));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tin", &inputs));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tout", &outputs));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("of_steps", &of_steps_));
    OP_REQUIRES(ctx, of_steps_.size() == inputs.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    "of_steps of '", name(), "' (TfmemStepDraws) has ", of_steps_.size(),
                    " entries; expected one for each of ", inputs.size(), " inputs")));
    absl::StatusOr<NodeDef> node = Original(name(), op, inputs, outputs);
    OP_REQUIRES_OK(ctx, node.status());
    absl::Status status;
    kernel_ = tensorflow::CreateOpKernel(ctx->device_type(), ctx->device(),
                                         ctx->device()->GetAllocator(AllocatorAttributes()), *node,
                                         ctx->graph_def_version(), &status);
    OP_REQUIRES_OK(ctx, status);
    OP_REQUIRES(ctx, kernel_->AsAsync() == nullptr,
                absl::UnimplementedError(absl::StrCat(op, " is asynchronous: no step can run it")));
  }

  void Compute(OpKernelContext* ctx) override {
    absl::StatusOr<int64_t> steps = Steps(ctx);
    OP_REQUIRES_OK(ctx, steps.status());
    std::vector<Tensor*> whole(num_outputs(), nullptr);
    std::vector<Tensor> given = Given(ctx);
    // Without a step one is run on zeros: it says what shape the numbers would have.
    if (*steps > 0) CopyItems(ctx, 0, &given);
    OP_REQUIRES_OK(ctx, RunStep(ctx, 0, *steps, &given, &whole));
    if (*steps <= 1) return;
    int64_t cost = 0;
    for (const Tensor* made : whole) cost += kNumberCost * made->NumElements() / *steps;
    absl::Mutex mutex;
    absl::Status status;
    const auto run = [&](int64_t first, int64_t end) {
      tensorflow::ScopedPerThreadMaxParallelism alone(
          1);  // the kernel would wait for these threads
      std::vector<Tensor> items = Given(ctx);
      for (int64_t step = first + 1; step < end + 1; ++step) {
        CopyItems(ctx, step, &items);
        const absl::Status ran = RunStep(ctx, step, *steps, &items, &whole);
        if (ran.ok()) continue;
        absl::MutexLock lock(&mutex);
        status.Update(ran);
        return;
      }
    };
    const auto* threads = ctx->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(threads->num_threads, threads->workers, *steps - 1, cost, run);
    OP_REQUIRES_OK(ctx, status);
  }

 private:
  // How many steps there are.
  absl::StatusOr<int64_t> Steps(OpKernelContext* ctx) const {
    int64_t steps = -1;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (!of_steps_[i]) continue;
      const Tensor& input = ctx->input(i);
      if (input.dims() < 1 || (steps >= 0 && input.dim_size(0) != steps)) {
        return absl::InvalidArgumentError(
            absl::StrCat("input ", i, " of '", name(), "' (TfmemStepDraws) has shape ",
                         input.shape().DebugString(), "; expected an item for each of ",
                         steps < 0 ? "the" : absl::StrCat(steps), " steps"));
      }
      steps = input.dim_size(0);
    }
    if (steps >= 0) return steps;
    return absl::InvalidArgumentError(
        absl::StrCat("no input of '", name(), "' (TfmemStepDraws) differs between steps"));
  }

  // What a step reads: tensors as they are, and room for items, since a part of a tensor need not
  // begin where kernels want it.
  std::vector<Tensor> Given(OpKernelContext* ctx) const {
    std::vector<Tensor> given(ctx->num_inputs());
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      given[i] = ctx->input(i);
      if (!of_steps_[i]) continue;
      TensorShape shape = ctx->input(i).shape();
      shape.RemoveDim(0);
      given[i] = Tensor(ctx->input(i).dtype(), shape);
      std::memset(given[i].data(), 0, given[i].TotalBytes());
    }
    return given;
  }

  void CopyItems(OpKernelContext* ctx, int64_t step, std::vector<Tensor>* given) const {
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (!of_steps_[i]) continue;
      const size_t size = (*given)[i].TotalBytes();
      std::memcpy((*given)[i].data(), static_cast<char*>(ctx->input(i).data()) + step * size, size);
    }
  }

  // Runs the kernel on `given` and puts what it makes in its place of `whole`.
  absl::Status RunStep(OpKernelContext* ctx, int64_t step, int64_t steps,
                       std::vector<Tensor>* given, std::vector<Tensor*>* whole) const {
    std::vector<TensorValue> values;
    for (Tensor& tensor : *given) values.emplace_back(&tensor);
    const std::vector<AllocatorAttributes> outputs(num_outputs());
    OpKernelContext::Params params;
    params.step_id = ctx->step_id();
    params.op_kernel = kernel_.get();
    params.device = ctx->device();
    params.output_attr_array = outputs.data();
    params.resource_manager = ctx->resource_manager();
    params.cancellation_manager = ctx->cancellation_manager();
    params.inputs = values;
    params.op_device_context = ctx->op_device_context();
    params.function_library = ctx->function_library();
    params.runner = ctx->runner();
    OpKernelContext inner(&params, num_outputs());
    kernel_->Compute(&inner);
    TFMEM_RETURN_IF_ERROR(inner.status());
    for (int i = 0; i < num_outputs(); ++i) {
      const Tensor& made = *inner.mutable_output(i);
      if (step == 0) {
        TensorShape shape = made.shape();
        TFMEM_RETURN_IF_ERROR(shape.InsertDimWithStatus(0, steps));
        TFMEM_RETURN_IF_ERROR(ctx->allocate_output(i, shape, &(*whole)[i]));
      }
      TensorShape first = (*whole)[i]->shape();
      TFMEM_RETURN_IF_ERROR(first.RemoveDimWithStatus(0));
      if (made.shape() != first) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", name(), "' (TfmemStepDraws) draws ", made.shape().DebugString(),
                         " in step ", step, "; expected ", first.DebugString(), ", as in step 0"));
      }
      if (steps == 0 || made.TotalBytes() == 0) continue;
      std::memcpy(static_cast<char*>((*whole)[i]->data()) + step * made.TotalBytes(), made.data(),
                  made.TotalBytes());
    }
    return absl::OkStatus();
  }

  std::vector<bool> of_steps_;
  std::unique_ptr<OpKernel> kernel_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemStepDraws").Device(tensorflow::DEVICE_CPU), StepDrawsOp);
REGISTER_KERNEL_BUILDER(
    Name("TfmemStepDraws").Device(tensorflow::DEVICE_CPU).Label(kHostKernelLabel), StepDrawsOp);

}  // namespace
}  // namespace tfmem
