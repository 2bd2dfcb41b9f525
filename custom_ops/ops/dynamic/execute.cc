#include "custom_ops/ops/dynamic/execute.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/platform/threadpool.h"

namespace tfmem {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

namespace {

constexpr double kWorthThreads = 1e5;  // nanoseconds of a batch below which one thread runs it

absl::StatusOr<RaggedIntegers> ReadRagged(OpKernelContext* ctx, absl::string_view values,
                                          absl::string_view splits) {
  const Tensor *value = nullptr, *split = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input(values, &value));
  TFMEM_RETURN_IF_ERROR(ctx->input(splits, &split));
  if (value->dims() != 1 || split->dims() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(values, " and ", splits, " have shapes ", value->shape().DebugString(),
                     " and ", split->shape().DebugString(), "; expected one dimension each"));
  }
  const auto v = value->flat<int32_t>();
  const auto s = split->flat<int64_t>();
  return RaggedIntegers{{v.data(), static_cast<size_t>(v.size())},
                        {s.data(), static_cast<size_t>(s.size())}};
}

absl::Status CheckList(OpKernelConstruction* ctx, const char* name, int64_t expected) {
  int64_t found = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr(name, &found));
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", found, "; expected ", expected, " in this mode"));
}

}  // namespace

absl::StatusOr<DynamicSpec> ReadDynamicSpec(OpKernelConstruction* ctx) {
  std::string text;
  int64_t parameters = 0, outputs = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spec", &text));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("N", &parameters));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("No", &outputs));
  TFMEM_ASSIGN_OR_RETURN(DynamicSpec spec, ParseDynamicSpec(text));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<int64_t> widths, OutputWidths(spec));
  if (static_cast<int64_t>(spec.parameters.size()) == parameters &&
      static_cast<int64_t>(widths.size()) == outputs) {
    return spec;
  }
  return absl::InvalidArgumentError(absl::StrCat("the op has ", parameters, " parameters and ",
                                                 outputs, " outputs; its kinds have ",
                                                 spec.parameters.size(), " and ", widths.size()));
}

absl::Status CheckLists(OpKernelConstruction* ctx, const DynamicSpec& spec, int state_type,
                        bool forward, bool backward) {
  const int64_t types = spec.types.size();
  if (state_type < -1 || state_type >= types) {
    return absl::InvalidArgumentError(
        absl::StrCat("state_type is ", state_type, "; expected -1 to ", types - 1));
  }
  int64_t sparse = 0;
  for (const DynamicParameter& parameter : spec.parameters) sparse += parameter.sparse;
  const int64_t states = state_type < 0 ? 0 : spec.types[state_type].size();
  const int64_t dense = spec.parameters.size() - sparse;
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Nk", forward ? 0 : 1));
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Ng", backward && !forward ? states : 0));
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Ns", forward ? states : 0));
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Nd", backward ? dense : 0));
  return CheckList(ctx, "Nr", backward ? sparse : 0);
}

absl::StatusOr<std::vector<int64_t>> OutputWidths(const DynamicSpec& spec) {
  std::vector<int64_t> widths;
  for (const DynamicKind& kind : spec.kinds) {
    for (size_t i = 0; i < kind.outputs.size(); ++i) {
      if (i == widths.size()) widths.push_back(kind.outputs[i]);
      if (widths[i] == kind.outputs[i]) continue;
      return absl::InvalidArgumentError(absl::StrCat("output ", i, " of two kinds of nodes has ",
                                                     widths[i], " and ", kind.outputs[i],
                                                     " numbers"));
    }
  }
  return widths;
}

absl::StatusOr<DynamicBatch> ReadBatch(OpKernelContext* ctx, const DynamicSpec& spec) {
  TFMEM_ASSIGN_OR_RETURN(const RaggedIntegers kinds, ReadRagged(ctx, "kinds", "kind_splits"));
  TFMEM_ASSIGN_OR_RETURN(const RaggedIntegers children,
                         ReadRagged(ctx, "children", "child_splits"));
  TFMEM_ASSIGN_OR_RETURN(const RaggedIntegers arguments,
                         ReadRagged(ctx, "arguments", "argument_splits"));
  return DecodeBatch(spec, kinds, children, arguments);
}

static absl::Status CheckRows(const DynamicSpec& spec, int number, const DynamicBatch& batch,
                              int64_t rows) {
  for (size_t kind = 0; kind < spec.kinds.size(); ++kind) {
    for (const std::vector<DynamicStep>& section : spec.kinds[kind].sections) {
      for (const DynamicStep& step : section) {
        if (step.op != StepOp::kLookup || step.numbers[0] != number) continue;
        for (int32_t row : batch.kinds[kind].arguments[step.numbers[1]]) {
          if (row < rows) continue;
          return absl::InvalidArgumentError(absl::StrCat("a node of kind ", kind, " reads row ",
                                                         row, " of input ", number, ", which has ",
                                                         rows, " rows in this batch"));
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckParameter(const DynamicSpec& spec, int number, const DynamicBatch& batch,
                            const TensorShape& shape) {
  const DynamicParameter& parameter = spec.parameters[number];
  if (parameter.matrix && parameter.rows == kOpenRows && shape.dims() == 2 &&
      shape.dim_size(1) == parameter.columns) {
    return CheckRows(spec, number, batch, shape.dim_size(0));
  }
  const TensorShape expected = parameter.matrix ? TensorShape({parameter.rows, parameter.columns})
                                                : TensorShape({parameter.columns});
  if (shape == expected) return absl::OkStatus();
  // A parameter of another rank is seen as a matrix or as a vector.
  if (shape.dims() != expected.dims() && shape.num_elements() == expected.num_elements()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", number, " has shape ", shape.DebugString(),
                   "; when the net was specialised, it had ", expected.DebugString()));
}

absl::Status CheckLossGradients(const OpInputList& list, const DynamicBatch& batch) {
  if (list.size() == 0) return absl::OkStatus();
  if (list.size() == 1 && list[0].dims() == 1 && list[0].dim_size(0) == batch.examples) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("gradients of the losses have shape ", list[0].shape().DebugString(),
                   "; expected one for each of ", batch.examples, " examples"));
}

absl::Status CheckStateGradients(const OpInputList& list, const DynamicSpec& spec, int state_type,
                                 const DynamicBatch& batch) {
  for (int i = 0; i < list.size(); ++i) {
    const TensorShape expected({batch.nodes, spec.types[state_type][i]});
    if (list[i].shape() == expected) continue;
    return absl::InvalidArgumentError(absl::StrCat("gradients of state ", i, " have shape ",
                                                   list[i].shape().DebugString(), "; expected ",
                                                   expected.DebugString()));
  }
  return absl::OkStatus();
}

absl::Status CheckKept(const TensorShape& found, const TensorShape& expected) {
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("what was kept has shape ", found.DebugString(),
                                                 "; the forward pass of this batch keeps ",
                                                 expected.DebugString()));
}

template <typename Real>
absl::Status ReadLossGradients(OpKernelContext* ctx, DynamicCall<Real>* call) {
  OpInputList list;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("loss_gradients", &list));
  TFMEM_RETURN_IF_ERROR(CheckLossGradients(list, call->batch));
  if (list.size() == 0) return absl::OkStatus();
  call->loss_gradients = list[0].flat<Real>().data();
  return absl::OkStatus();
}

template <typename Real>
absl::Status RunBatch(OpKernelContext* ctx, const DynamicCall<Real>& call, bool forward,
                      bool backward) {
  const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
  std::vector<int64_t> looked_up;
  for (const LookedUp& table : call.looked_up) looked_up.push_back(table.rows());
  ScriptOptions options;
  options.forward = forward;
  options.backward = backward;
  options.processors = workers.num_threads;
  const Script script = BuildScript(call.spec, call.batch, looked_up, options);
  TFMEM_RETURN_IF_ERROR(CheckScript(call.spec, call.batch, looked_up, script));
  const int threads = script.work > kWorthThreads ? workers.num_threads : 1;
  const InstructionSet& kernels = ChosenKernels();
  Tensor own;
  TensorShape shape;
  const int64_t floats = threads * ThreadFloats<Real>(call.spec, kernels) +
                         (script.deals ? SharedFloats(call.spec) : 0);
  TFMEM_RETURN_IF_ERROR(BuildShape({floats}, &shape));
  TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, shape, &own));
  RunScript(script, call, kernels, threads, own.flat<Real>().data(),
            [pool = workers.workers](std::function<void()> closure) {
              pool->Schedule(std::move(closure));
            });
  return absl::OkStatus();
}

template <typename Real>
absl::Status PutLosses(OpKernelContext* ctx, const DynamicCall<Real>& call) {
  Tensor* losses = nullptr;
  TFMEM_RETURN_IF_ERROR(
      ctx->allocate_output("losses", TensorShape({call.batch.examples}), &losses));
  auto sums = losses->flat<Real>();
  const DynamicBatch& batch = call.batch;
  for (int64_t example = 0; example < batch.examples; ++example) {
    Real sum = 0;
    for (int64_t node = batch.first_of[example]; node < batch.first_of[example + 1]; ++node) {
      const int64_t place = call.layout.losses[batch.kind_of[node]];
      if (place >= 0) sum += call.memory[place + batch.row_of[node]];
    }
    sums(example) = sum;
  }
  return absl::OkStatus();
}

template <typename Real>
absl::Status PutOutputs(OpKernelContext* ctx, const DynamicCall<Real>& call,
                        const std::vector<int64_t>& widths) {
  tensorflow::OpOutputList list;
  TFMEM_RETURN_IF_ERROR(ctx->output_list("outputs", &list));
  const DynamicBatch& batch = call.batch;
  for (size_t i = 0; i < widths.size(); ++i) {
    Tensor* output = nullptr;
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({batch.nodes, widths[i]}, &shape));
    TFMEM_RETURN_IF_ERROR(list.allocate(i, shape, &output));
    Real* target = output->flat<Real>().data();
    for (int64_t node = 0; node < batch.nodes; ++node, target += widths[i]) {
      const std::vector<int64_t>& places = call.layout.outputs[batch.kind_of[node]];
      if (i < places.size()) {
        std::memcpy(target, call.memory + places[i] + batch.row_of[node] * StrideOf(widths[i]),
                    widths[i] * sizeof(Real));
      } else {
        std::fill_n(target, widths[i], Real{0});
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PutNumber(OpKernelContext* ctx) {
  const Tensor* number = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input("number", &number));
  return ctx->set_output("done", *number);
}

absl::Status PutNothing(OpKernelContext* ctx, const std::vector<int64_t>& widths) {
  Tensor* losses = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_output("losses", TensorShape({0}), &losses));
  tensorflow::OpOutputList outputs;
  TFMEM_RETURN_IF_ERROR(ctx->output_list("outputs", &outputs));
  for (size_t i = 0; i < widths.size(); ++i) {
    Tensor* none = nullptr;
    TFMEM_RETURN_IF_ERROR(outputs.allocate(i, TensorShape({0, widths[i]}), &none));
  }
  return absl::OkStatus();
}

#define TFMEM_INSTANTIATE(Real)                                                           \
  template absl::Status ReadLossGradients(OpKernelContext*, DynamicCall<Real>*);          \
  template absl::Status RunBatch(OpKernelContext*, const DynamicCall<Real>&, bool, bool); \
  template absl::Status PutLosses(OpKernelContext*, const DynamicCall<Real>&);            \
  template absl::Status PutOutputs(OpKernelContext*, const DynamicCall<Real>&,            \
                                   const std::vector<int64_t>&);
TFMEM_INSTANTIATE(float)
TFMEM_INSTANTIATE(double)
#undef TFMEM_INSTANTIATE

}  // namespace tfmem
