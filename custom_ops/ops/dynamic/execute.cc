#include "custom_ops/ops/dynamic/execute.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/platform/threadpool.h"

namespace tfmem {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
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

TensorShape ShapeOf(const DynamicParameter& parameter) {
  return parameter.matrix ? TensorShape({parameter.rows, parameter.columns})
                          : TensorShape({parameter.columns});
}

}  // namespace

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
  const TensorShape expected = ShapeOf(parameter);
  if (shape == expected) return absl::OkStatus();
  // A parameter of another rank is seen as a matrix or as a vector.
  if (shape.dims() != expected.dims() && shape.num_elements() == expected.num_elements()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", number, " has shape ", shape.DebugString(),
                   "; when the net was specialised, it had ", expected.DebugString()));
}

absl::StatusOr<std::vector<const void*>> ReadParameters(OpKernelContext* ctx,
                                                        const DynamicSpec& spec,
                                                        const DynamicBatch& batch) {
  OpInputList list;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("parameters", &list));
  std::vector<const void*> found;
  for (int i = 0; i < list.size(); ++i) {
    TFMEM_RETURN_IF_ERROR(CheckParameter(spec, i, batch, list[i].shape()));
    found.push_back(list[i].data());
  }
  return found;
}

absl::StatusOr<int64_t> ReadSeed(OpKernelContext* ctx) {
  const Tensor* seed = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input("seed", &seed));
  if (seed->NumElements() != 1) return absl::InvalidArgumentError("expected one seed");
  return seed->flat<int64_t>()(0);
}

template <typename Real>
absl::StatusOr<std::array<Real, 4>> ReadRates(OpKernelContext* ctx, UpdateRule rule) {
  const Tensor* rates = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input("rates", &rates));
  const int64_t wanted = rule == kSgd ? 1 : rule == kMomentum ? 2 : 5;
  if (rates->NumElements() != wanted) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rates have shape ", rates->shape().DebugString(), "; the rule takes ", wanted));
  }
  const auto rate = rates->flat<Real>();
  if (rule == kSgd) return std::array<Real, 4>{rate(0)};
  if (rule == kMomentum) return std::array<Real, 4>{rate(0), rate(1)};
  const double step = rate(4);
  const double first = 1 - std::pow(double{rate(1)}, step);
  const double second = 1 - std::pow(double{rate(2)}, step);
  return std::array<Real, 4>{static_cast<Real>(rate(0) * std::sqrt(second) / first), 1 - rate(1),
                             1 - rate(2), rate(3)};
}

absl::StatusOr<std::vector<void*>> WritableVariables(OpKernelContext* ctx,
                                                     const DynamicUpdate& update,
                                                     const DynamicBatch& batch,
                                                     const CopyBytes& copy,
                                                     RegionVariables* variables) {
  const int count = update.spec.parameters.size(), all = update.uses.size();
  for (int i = 0; i < all; ++i) {
    if (i >= count && !update.spec.parameters[i % count].trained) continue;  // never touched
    TFMEM_RETURN_IF_ERROR(
        CheckParameter(update.spec, i % count, batch, variables->Now(i)->shape()));
  }
  std::vector<void*> found;
  for (int i = 0; i < all; ++i) {
    if (!variables->MayWrite(i)) {
      const Tensor& now = *variables->Now(i);
      Tensor own;
      TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(now.dtype(), now.shape(), &own));
      TFMEM_RETURN_IF_ERROR(copy(own.data(), now.data(), now.TotalBytes()));
      TFMEM_RETURN_IF_ERROR(variables->Assign(i, std::move(own)));
    }
    found.push_back(variables->Now(i)->data());
  }
  return found;
}

absl::StatusOr<GradientOutputs> AllocateGradients(OpKernelContext* ctx, const DynamicSpec& spec,
                                                  const std::vector<LookedUp>& looked_up) {
  OpOutputList dense, rows, row_gradients;
  TFMEM_RETURN_IF_ERROR(ctx->output_list("gradients", &dense));
  TFMEM_RETURN_IF_ERROR(ctx->output_list("rows", &rows));
  TFMEM_RETURN_IF_ERROR(ctx->output_list("row_gradients", &row_gradients));
  int next_dense = 0, next_sparse = 0;
  GradientOutputs found;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const DynamicParameter& parameter = spec.parameters[i];
    Tensor*& gradient = found.gradients.emplace_back();
    if (parameter.sparse) {
      const int64_t count = looked_up[i].rows();
      TFMEM_RETURN_IF_ERROR(
          rows.allocate(next_sparse, TensorShape({count}), &found.rows.emplace_back()));
      TFMEM_RETURN_IF_ERROR(row_gradients.allocate(
          next_sparse++, TensorShape({count, parameter.columns}), &gradient));
    } else {
      TFMEM_RETURN_IF_ERROR(dense.allocate(next_dense++, ShapeOf(parameter), &gradient));
    }
  }
  return found;
}

absl::StatusOr<std::vector<Tensor*>> AllocateRows(OpKernelContext* ctx, absl::string_view name,
                                                  int64_t rows, absl::Span<const int64_t> widths) {
  OpOutputList list;
  TFMEM_RETURN_IF_ERROR(ctx->output_list(name, &list));
  std::vector<Tensor*> found;
  for (size_t i = 0; i < widths.size(); ++i) {
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({rows, widths[i]}, &shape));
    TFMEM_RETURN_IF_ERROR(list.allocate(i, shape, &found.emplace_back()));
  }
  return found;
}

absl::StatusOr<std::vector<Tensor*>> AllocateStates(OpKernelContext* ctx, const DynamicMode& mode,
                                                    const DynamicBatch& batch) {
  if (mode.state_type < 0) return std::vector<Tensor*>();
  return AllocateRows(ctx, "states", batch.nodes, mode.spec.types[mode.state_type]);
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
  const DynamicBatch& batch = call.batch;
  TFMEM_ASSIGN_OR_RETURN(const std::vector<Tensor*> outputs,
                         AllocateRows(ctx, "outputs", batch.nodes, widths));
  for (size_t i = 0; i < widths.size(); ++i) {
    Real* target = outputs[i]->flat<Real>().data();
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

absl::Status PutKept(OpKernelContext* ctx, bool keeps, const Tensor& memory) {
  if (keeps) return ctx->set_output("keep", memory);
  Tensor* none = nullptr;
  return ctx->allocate_output("keep", TensorShape({0}), &none);
}

absl::Status PutNumber(OpKernelContext* ctx) {
  const Tensor* number = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input("number", &number));
  return ctx->set_output("done", *number);
}

absl::Status PutNothing(OpKernelContext* ctx, const std::vector<int64_t>& widths) {
  Tensor* losses = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_output("losses", TensorShape({0}), &losses));
  return AllocateRows(ctx, "outputs", 0, widths).status();
}

#define TFMEM_INSTANTIATE(Real)                                                           \
  template absl::StatusOr<std::array<Real, 4>> ReadRates(OpKernelContext*, UpdateRule);   \
  template absl::Status ReadLossGradients(OpKernelContext*, DynamicCall<Real>*);          \
  template absl::Status RunBatch(OpKernelContext*, const DynamicCall<Real>&, bool, bool); \
  template absl::Status PutLosses(OpKernelContext*, const DynamicCall<Real>&);            \
  template absl::Status PutOutputs(OpKernelContext*, const DynamicCall<Real>&,            \
                                   const std::vector<int64_t>&);
TFMEM_INSTANTIATE(float)
TFMEM_INSTANTIATE(double)
#undef TFMEM_INSTANTIATE

}  // namespace tfmem
