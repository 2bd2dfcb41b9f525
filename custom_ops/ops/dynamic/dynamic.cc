// TfmemDynamic: a batch of graphs forward, backward, or both; gradients are tensors.
#include <cstring>
#include <string>
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
using ::tensorflow::OpOutputList;
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
    OP_REQUIRES_VALUE(spec_, ctx, ReadDynamicSpec(ctx));
    OP_REQUIRES_VALUE(widths_, ctx, OutputWidths(spec_));
    std::string mode;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mode", &mode));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("state_type", &state_type_));
    forward_ = mode != "backward";
    backward_ = mode == "backward" || mode == "forward_backward";
    keeps_ = mode == "training";
    OP_REQUIRES_OK(ctx, CheckLists(ctx, spec_, state_type_, forward_, backward_));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) {
    TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec_));
    TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec_, batch));
    const std::vector<LookedUp> looked_up = FindLookedUp(spec_, batch);
    DynamicCall<Real> call{spec_, batch, layout, looked_up};
    OpInputList parameters;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("parameters", &parameters));
    for (int i = 0; i < parameters.size(); ++i) {
      TFMEM_RETURN_IF_ERROR(CheckParameter(spec_, i, batch, parameters[i].shape()));
      call.parameters.push_back(parameters[i].flat<Real>().data());
    }
    const Tensor* seed = nullptr;
    TFMEM_RETURN_IF_ERROR(ctx->input("seed", &seed));
    if (seed->NumElements() != 1) return absl::InvalidArgumentError("expected one seed");
    call.seed = seed->flat<int64_t>()(0);
    TFMEM_RETURN_IF_ERROR(ReadLossGradients(ctx, &call));
    TFMEM_RETURN_IF_ERROR(ReadStateGradients(ctx, &call));
    Tensor memory;
    TFMEM_RETURN_IF_ERROR(Memory(ctx, layout.floats, &memory));
    call.memory = memory.flat<Real>().data();
    OpOutputList dense, rows, row_gradients;
    TFMEM_RETURN_IF_ERROR(ctx->output_list("gradients", &dense));
    TFMEM_RETURN_IF_ERROR(ctx->output_list("rows", &rows));
    TFMEM_RETURN_IF_ERROR(ctx->output_list("row_gradients", &row_gradients));
    std::vector<Real*> targets(spec_.parameters.size());
    if (backward_) {
      TFMEM_RETURN_IF_ERROR(Gradients(looked_up, &dense, &rows, &row_gradients, &targets));
    }
    call.take = [&](int parameter, int64_t index, int64_t row, int64_t column, int64_t count,
                    int64_t columns, const Real* gradient, int64_t stride, Real*) {
      const DynamicParameter& shape = spec_.parameters[parameter];
      Real* target = targets[parameter] + (shape.sparse ? index : row) * shape.columns + column;
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(target + i * shape.columns, gradient + i * stride, columns * sizeof(Real));
      }
    };
    TFMEM_RETURN_IF_ERROR(RunBatch(ctx, call, forward_, backward_));
    return Outputs(ctx, call, memory);
  }

  absl::Status ReadStateGradients(OpKernelContext* ctx, DynamicCall<Real>* call) const {
    OpInputList list;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("state_gradients", &list));
    TFMEM_RETURN_IF_ERROR(CheckStateGradients(list, spec_, state_type_, call->batch));
    if (list.size() > 0) call->gradient_type = state_type_;
    for (const Tensor& gradient : list) {
      call->state_gradients.push_back(gradient.flat<Real>().data());
    }
    return absl::OkStatus();
  }

  // New, or in mode 'backward' what the forward pass left, to go on with.
  absl::Status Memory(OpKernelContext* ctx, int64_t floats, Tensor* memory) const {
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({floats}, &shape));
    if (forward_) return ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, shape, memory);
    OpInputList kept;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("kept", &kept));
    TFMEM_RETURN_IF_ERROR(CheckKept(kept[0].shape(), shape));
    TFMEM_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, shape, memory));
    std::memcpy(memory->data(), kept[0].data(), kept[0].TotalBytes());
    return absl::OkStatus();
  }

  absl::Status Gradients(const std::vector<LookedUp>& looked_up, OpOutputList* dense,
                         OpOutputList* rows, OpOutputList* row_gradients,
                         std::vector<Real*>* targets) const {
    int next_dense = 0, next_sparse = 0;
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const DynamicParameter& parameter = spec_.parameters[i];
      Tensor* gradient = nullptr;
      if (!parameter.sparse) {
        const TensorShape shape = parameter.matrix
                                      ? TensorShape({parameter.rows, parameter.columns})
                                      : TensorShape({parameter.columns});
        TFMEM_RETURN_IF_ERROR(dense->allocate(next_dense++, shape, &gradient));
      } else {
        const LookedUp& table = looked_up[i];
        Tensor* indices = nullptr;
        TFMEM_RETURN_IF_ERROR(rows->allocate(next_sparse, TensorShape({table.rows()}), &indices));
        for (int64_t row = 0; row < table.rows(); ++row) {
          indices->flat<int32_t>()(row) = table.entries[table.first[row]].row;
        }
        const TensorShape shape({table.rows(), parameter.columns});
        TFMEM_RETURN_IF_ERROR(row_gradients->allocate(next_sparse++, shape, &gradient));
      }
      (*targets)[i] = gradient->flat<Real>().data();
    }
    return absl::OkStatus();
  }

  absl::Status Outputs(OpKernelContext* ctx, const DynamicCall<Real>& call,
                       const Tensor& memory) const {
    Tensor* keep = nullptr;
    if (keeps_) {
      TFMEM_RETURN_IF_ERROR(ctx->set_output("keep", memory));
    } else {
      TFMEM_RETURN_IF_ERROR(ctx->allocate_output("keep", TensorShape({0}), &keep));
    }
    if (forward_) {
      TFMEM_RETURN_IF_ERROR(PutLosses(ctx, call));
      TFMEM_RETURN_IF_ERROR(PutOutputs(ctx, call, widths_));
      return PutStates(ctx, call);
    }
    return PutNothing(ctx, widths_);
  }

  absl::Status PutStates(OpKernelContext* ctx, const DynamicCall<Real>& call) const {
    OpOutputList list;
    TFMEM_RETURN_IF_ERROR(ctx->output_list("states", &list));
    const DynamicBatch& batch = call.batch;
    for (int i = 0; i < list.size(); ++i) {
      const int64_t width = spec_.types[state_type_][i];
      Tensor* output = nullptr;
      TensorShape shape;
      TFMEM_RETURN_IF_ERROR(BuildShape({batch.nodes, width}, &shape));
      TFMEM_RETURN_IF_ERROR(list.allocate(i, shape, &output));
      Real* target = output->flat<Real>().data();
      const Real* states = call.memory + call.layout.states[state_type_][i];
      for (int64_t node = 0; node < batch.nodes; ++node, target += width) {
        const int kind = batch.kind_of[node];
        if (spec_.kinds[kind].type == state_type_) {
          const int64_t row = batch.kinds[kind].states[batch.row_of[node]];
          std::memcpy(target, states + row * StrideOf(width), width * sizeof(Real));
        } else {
          std::fill_n(target, width, Real{0});
        }
      }
    }
    return absl::OkStatus();
  }

  DynamicSpec spec_;
  std::vector<int64_t> widths_;
  int state_type_ = -1;
  bool forward_ = true;
  bool backward_ = false;
  bool keeps_ = false;
};

#define TFMEM_REGISTER(type)                                                         \
  REGISTER_KERNEL_BUILDER(                                                           \
      Name("TfmemDynamic").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"), \
      DynamicOp<type>);                                                              \
  REGISTER_KERNEL_BUILDER(Name("TfmemDynamic")                                       \
                              .Device(tensorflow::DEVICE_CPU)                        \
                              .Label(kHostKernelLabel)                               \
                              .TypeConstraint<type>("T"),                            \
                          DynamicOp<type>);
TFMEM_REGISTER(float)
TFMEM_REGISTER(double)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
