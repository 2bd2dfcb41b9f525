// TfmemDynamic: a batch of graphs forward, backward, or both; gradients are tensors.
#include <cstring>
#include <vector>

#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/dynamic/execute.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op.h"

namespace tfmem {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

REGISTER_OP("TfmemDynamic")
    .Input("parameters: N * T")
    .Input("kinds: int32")
    .Input("kind_splits: int64")
    .Input("children: int32")
    .Input("child_splits: int64")
    .Input("arguments: int32")
    .Input("argument_splits: int64")
    .Input("seed: int64")
    .Input("kept: Nk * T")
    .Input("loss_gradients: Nl * T")
    .Input("state_gradients: Ng * T")
    .Output("losses: T")
    .Output("outputs: No * T")
    .Output("states: Ns * T")
    .Output("keep: T")
    .Output("gradients: Nd * T")
    .Output("rows: Nr * int32")
    .Output("row_gradients: Nr * T")
    .Attr("spec: string")
    .Attr("mode: {'forward', 'training', 'forward_backward', 'backward'}")
    .Attr("state_type: int = -1")
    .Attr("N: int >= 0")
    .Attr("Nk: int >= 0")
    .Attr("Nl: int >= 0")
    .Attr("Ng: int >= 0")
    .Attr("No: int >= 0")
    .Attr("Ns: int >= 0")
    .Attr("Nd: int >= 0")
    .Attr("Nr: int >= 0")
    .Attr("T: {float, double} = DT_FLOAT")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .SetShapeFn(DynamicShape)
    .Doc(R"doc(
Runs a batch of graphs whose nodes are of given kinds.

parameters: as the spec declares them.
kinds: of all nodes, example by example; kind_splits says where each begins, and so for the others.
children: of all nodes, positions in the example.
arguments: the integer arguments of all nodes.
seed: of random numbers.
kept: what `keep` of the forward pass was, in mode 'backward'.
loss_gradients: with respect to the loss of each example; none: 1.
state_gradients: with respect to the states of `state_type`, [nodes, width].
losses: of each example, the sum over its nodes.
outputs: of each node, [nodes, width]; 0 where its kind has none.
states: of the nodes of `state_type`, [nodes, width]; 0 for others.
gradients: of the parameters that are not sparse.
rows: of each sparse parameter those that were looked up.
row_gradients: the gradients of these.
spec: Spec.text of custom_ops/dynamic/spec.py.
programs: for a GPU, DynamicProgram.to_text of custom_ops/dynamic/codegen/gpu_program.py.
images: functions of the graph that return their code.
)doc");

REGISTER_OP("TfmemDynamicOutput")
    .Input("output: T")
    .Output("same: T")
    .Attr("T: {float, double} = DT_FLOAT")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
An output of TfmemDynamic in mode 'training' as it is given to the user: its gradient is an error.

TensorFlow asks TfmemDynamic for a gradient with zeros in place of the gradients of results that
nothing depends on, so that op cannot know whether something depends on this one.
)doc");

class DynamicOutputOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override { ctx->set_output(0, ctx->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("TfmemDynamicOutput").Device(tensorflow::DEVICE_CPU), DynamicOutputOp);
REGISTER_KERNEL_BUILDER(Name("TfmemDynamicOutput").Device(tensorflow::DEVICE_GPU), DynamicOutputOp);

template <typename Real>
class DynamicOp : public OpKernel {
 public:
  explicit DynamicOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, mode_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) {
    TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec_));
    TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec_, batch));
    const std::vector<LookedUp> looked_up = FindLookedUp(spec_, batch);
    DynamicCall<Real> call{spec_, batch, layout, looked_up};
    TFMEM_ASSIGN_OR_RETURN(const std::vector<const void*> parameters,
                           ReadParameters(ctx, spec_, batch));
    for (const void* parameter : parameters) {
      call.parameters.push_back(static_cast<const Real*>(parameter));
    }
    TFMEM_ASSIGN_OR_RETURN(call.seed, ReadSeed(ctx));
    TFMEM_RETURN_IF_ERROR(ReadLossGradients(ctx, &call));
    TFMEM_RETURN_IF_ERROR(ReadStateGradients(ctx, &call));
    Tensor memory;
    TFMEM_RETURN_IF_ERROR(Memory(ctx, layout.floats, &memory));
    call.memory = memory.flat<Real>().data();
    std::vector<Real*> targets;
    if (mode_.backward) TFMEM_RETURN_IF_ERROR(Gradients(ctx, looked_up, &targets));
    call.take = [&](int parameter, int64_t index, int64_t row, int64_t column, int64_t count,
                    int64_t columns, const Real* gradient, int64_t stride, Real*) {
      const DynamicParameter& shape = spec_.parameters[parameter];
      Real* target = targets[parameter] + (shape.sparse ? index : row) * shape.columns + column;
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(target + i * shape.columns, gradient + i * stride, columns * sizeof(Real));
      }
    };
    TFMEM_RETURN_IF_ERROR(RunBatch(ctx, call, mode_.forward, mode_.backward));
    return Outputs(ctx, call, memory);
  }

  absl::Status ReadStateGradients(OpKernelContext* ctx, DynamicCall<Real>* call) const {
    OpInputList list;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("state_gradients", &list));
    TFMEM_RETURN_IF_ERROR(CheckStateGradients(list, spec_, mode_.state_type, call->batch));
    if (list.size() > 0) call->gradient_type = mode_.state_type;
    for (const Tensor& gradient : list) {
      call->state_gradients.push_back(gradient.flat<Real>().data());
    }
    return absl::OkStatus();
  }

  // New, or in mode 'backward' what the forward pass left, to go on with.
  absl::Status Memory(OpKernelContext* ctx, int64_t floats, Tensor* memory) const {
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({floats}, &shape));
    if (mode_.forward)
      return ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, shape, memory);
    OpInputList kept;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("kept", &kept));
    TFMEM_RETURN_IF_ERROR(CheckKept(kept[0].shape(), shape));
    TFMEM_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, shape, memory));
    std::memcpy(memory->data(), kept[0].data(), kept[0].TotalBytes());
    return absl::OkStatus();
  }

  absl::Status Gradients(OpKernelContext* ctx, const std::vector<LookedUp>& looked_up,
                         std::vector<Real*>* targets) const {
    TFMEM_ASSIGN_OR_RETURN(const GradientOutputs outputs, AllocateGradients(ctx, spec_, looked_up));
    for (Tensor* gradient : outputs.gradients) targets->push_back(gradient->flat<Real>().data());
    size_t next = 0;
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      if (!spec_.parameters[i].sparse) continue;
      auto rows = outputs.rows[next++]->flat<int32_t>();
      const LookedUp& table = looked_up[i];
      for (int64_t row = 0; row < table.rows(); ++row) {
        rows(row) = table.entries[table.first[row]].row;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Outputs(OpKernelContext* ctx, const DynamicCall<Real>& call,
                       const Tensor& memory) const {
    TFMEM_RETURN_IF_ERROR(PutKept(ctx, mode_.keeps, memory));
    if (!mode_.forward) return PutNothing(ctx, mode_.widths);
    TFMEM_RETURN_IF_ERROR(PutLosses(ctx, call));
    TFMEM_RETURN_IF_ERROR(PutOutputs(ctx, call, mode_.widths));
    return PutStates(ctx, call);
  }

  absl::Status PutStates(OpKernelContext* ctx, const DynamicCall<Real>& call) const {
    const DynamicBatch& batch = call.batch;
    TFMEM_ASSIGN_OR_RETURN(const std::vector<Tensor*> outputs, AllocateStates(ctx, mode_, batch));
    const int type = mode_.state_type;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int64_t width = spec_.types[type][i];
      Real* target = outputs[i]->flat<Real>().data();
      const Real* states = call.memory + call.layout.states[type][i];
      for (int64_t node = 0; node < batch.nodes; ++node, target += width) {
        const int kind = batch.kind_of[node];
        if (spec_.kinds[kind].type == type) {
          const int64_t row = batch.kinds[kind].states[batch.row_of[node]];
          std::memcpy(target, states + row * StrideOf(width), width * sizeof(Real));
        } else {
          std::fill_n(target, width, Real{0});
        }
      }
    }
    return absl::OkStatus();
  }

  DynamicMode mode_;
  const DynamicSpec& spec_ = mode_.spec;
};

TFMEM_REGISTER_DYNAMIC("TfmemDynamic", DynamicOp)

}  // namespace
}  // namespace tfmem
