// TfmemDynamicStep: a batch forward and backward, and its gradients applied to the variables, block
// by block while they are in a cache.
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/dynamic/execute.h"
#include "custom_ops/ops/fusion/variables.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op.h"

namespace tfmem {
namespace {

using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

REGISTER_OP("TfmemDynamicStep")
    .Input("variables: Nv * resource")
    .Input("kinds: int32")
    .Input("kind_splits: int64")
    .Input("children: int32")
    .Input("child_splits: int64")
    .Input("arguments: int32")
    .Input("argument_splits: int64")
    .Input("seed: int64")
    .Input("loss_gradients: Nl * T")
    .Input("rates: T")
    .Input("number: int64")
    .Output("losses: T")
    .Output("outputs: No * T")
    .Output("done: int64")
    .Attr("spec: string")
    .Attr("rule: {'sgd', 'momentum', 'adam'}")
    .Attr("N: int >= 0")
    .Attr("Nv: int >= 0")
    .Attr("Nl: int >= 0")
    .Attr("No: int >= 0")
    .Attr("T: {float, double} = DT_FLOAT")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .SetIsStateful()
    .SetShapeFn(DynamicStepShape)
    .Doc(R"doc(
Trains on a batch of graphs: forward, backward and update.

variables: the N parameters, of which those whose gradient no kind has stay as they are; then for rule 'momentum' the momentum of each, for 'adam' the first
  moments and then the second ones.
rates: learning rate; then momentum; or beta_1, beta_2, epsilon and the number of this step, from 1.
number: anything; `done` is the same, once nothing can be wrong with the batch.
losses, outputs: as those of TfmemDynamic, which has the other inputs, too.
)doc");

struct Rule {
  int slots = 0;
  int rates = 0;
};

template <typename Real>
class Update {
 public:
  Update(const CpuKernels<Real>& kernels, const std::string& rule, const Real* rates)
      : kernels_(kernels), rule_(rule) {
    if (rule == "sgd") {
      Splat(0, rates[0]);
    } else if (rule == "momentum") {
      Splat(0, rates[0]);
      Splat(1, rates[1]);
    } else {
      const double step = rates[4];
      const double first = 1 - std::pow(double{rates[1]}, step);
      const double second = 1 - std::pow(double{rates[2]}, step);
      adam_[0] = static_cast<Real>(rates[0] * std::sqrt(second) / first);
      adam_[1] = 1 - rates[1];
      adam_[2] = 1 - rates[2];
      adam_[3] = rates[3];
    }
  }

  // `count` numbers of a parameter and its slots; `t` is memory for as many.
  void Apply(Real* w, Real* m, Real* v, const Real* g, int64_t count, Real* t) const {
    const auto with = [&](Elementwise op, Real* to, const Real* a, int rate) {
      kernels_.compute(op, to, a, splats_[rate], nullptr, count, 2);
    };
    const auto of = [&](Elementwise op, Real* to, const Real* a, const Real* b) {
      kernels_.compute(op, to, a, b, nullptr, count, 0);
    };
    if (rule_ == "sgd") {
      with(Elementwise::kMultiply, t, g, 0);
      of(Elementwise::kSubtract, w, w, t);
    } else if (rule_ == "momentum") {
      with(Elementwise::kMultiply, t, g, 0);
      with(Elementwise::kMultiply, m, m, 1);
      of(Elementwise::kSubtract, m, m, t);
      of(Elementwise::kAdd, w, w, m);
    } else {
      kernels_.adam(w, m, v, g, count, adam_);
    }
  }

 private:
  void Splat(int number, Real value) { std::fill_n(splats_[number], 64, value); }

  const CpuKernels<Real>& kernels_;
  const std::string rule_;
  Real splats_[2][64];
  Real adam_[4] = {};
};

template <typename Real>
class DynamicStepOp : public OpKernel {
 public:
  explicit DynamicStepOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(spec_, ctx, ReadDynamicSpec(ctx));
    OP_REQUIRES_VALUE(widths_, ctx, OutputWidths(spec_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rule", &rule_));
    how_ = rule_ == "sgd" ? Rule{0, 1} : rule_ == "momentum" ? Rule{1, 2} : Rule{2, 5};
    int64_t variables = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Nv", &variables));
    const int64_t expected = spec_.parameters.size() * (1 + how_.slots);
    OP_REQUIRES(ctx, variables == expected,
                absl::InvalidArgumentError(absl::StrCat(
                    "the op has ", variables, " variables; rule '", rule_, "' takes ", expected)));
    VariableUse use;
    use.read = use.assigned = true;
    use.dtype = tensorflow::DataTypeToEnum<Real>::value;
    uses_.assign(variables, use);
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) {
    TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec_));
    TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec_, batch));
    const std::vector<LookedUp> looked_up = FindLookedUp(spec_, batch);
    DynamicCall<Real> call{spec_, batch, layout, looked_up};
    const Tensor *seed = nullptr, *rates = nullptr;
    TFMEM_RETURN_IF_ERROR(ctx->input("seed", &seed));
    TFMEM_RETURN_IF_ERROR(ctx->input("rates", &rates));
    if (seed->NumElements() != 1 || rates->NumElements() != how_.rates) {
      return absl::InvalidArgumentError(absl::StrCat("rates have shape ",
                                                     rates->shape().DebugString(), "; rule '",
                                                     rule_, "' takes ", how_.rates));
    }
    call.seed = seed->flat<int64_t>()(0);
    TFMEM_RETURN_IF_ERROR(ReadLossGradients(ctx, &call));
    Tensor memory;
    tensorflow::TensorShape floats;
    TFMEM_RETURN_IF_ERROR(BuildShape({layout.floats}, &floats));
    TFMEM_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, floats, &memory));
    call.memory = memory.flat<Real>().data();

    RegionVariables variables(ctx, 0, uses_);
    TFMEM_RETURN_IF_ERROR(variables.Open());
    TFMEM_RETURN_IF_ERROR(variables.CheckDistinct());
    std::vector<Real*> values;
    TFMEM_RETURN_IF_ERROR(Writable(ctx, batch, &variables, &values));
    const size_t count = spec_.parameters.size();
    call.parameters.assign(values.begin(), values.begin() + count);
    const Update<Real> update(KernelsOf<Real>(ChosenKernels()), rule_, rates->flat<Real>().data());
    call.take = [&](int parameter, int64_t, int64_t row, int64_t column, int64_t rows,
                    int64_t columns, const Real* gradient, int64_t stride, Real* scratch) {
      if (!spec_.parameters[parameter].trained) return;
      const int64_t all = spec_.parameters[parameter].columns;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = (row + i) * all + column;
        const auto slot = [&](size_t number) -> Real* {
          const size_t place = number * count + parameter;
          return place < values.size() ? values[place] + at : nullptr;
        };
        update.Apply(values[parameter] + at, slot(1), slot(2), gradient + i * stride, columns,
                     scratch);
      }
    };
    TFMEM_RETURN_IF_ERROR(RunBatch(ctx, call, true, true));
    variables.Unlock();
    TFMEM_RETURN_IF_ERROR(PutLosses(ctx, call));
    TFMEM_RETURN_IF_ERROR(PutOutputs(ctx, call, widths_));
    return PutNumber(ctx);
  }

  // The variables' own memory; that of copies where another op still reads it.
  absl::Status Writable(OpKernelContext* ctx, const DynamicBatch& batch, RegionVariables* variables,
                        std::vector<Real*>* values) const {
    const int count = spec_.parameters.size(), all = uses_.size();
    for (int i = 0; i < all; ++i) {
      if (i >= count && !spec_.parameters[i % count].trained) continue;  // never touched
      TFMEM_RETURN_IF_ERROR(CheckParameter(spec_, i % count, batch, variables->Now(i)->shape()));
    }
    for (int i = 0; i < all; ++i) {
      if (!variables->MayWrite(i)) {
        const Tensor& now = *variables->Now(i);
        Tensor copy;
        TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(now.dtype(), now.shape(), &copy));
        std::memcpy(copy.data(), now.data(), now.TotalBytes());
        TFMEM_RETURN_IF_ERROR(variables->Assign(i, std::move(copy)));
      }
      values->push_back(static_cast<Real*>(variables->Now(i)->data()));
    }
    return absl::OkStatus();
  }

  DynamicSpec spec_;
  std::vector<int64_t> widths_;
  std::string rule_;
  Rule how_;
  std::vector<VariableUse> uses_;
};

#define TFMEM_REGISTER(type)                                                             \
  REGISTER_KERNEL_BUILDER(                                                               \
      Name("TfmemDynamicStep").Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"), \
      DynamicStepOp<type>);                                                              \
  REGISTER_KERNEL_BUILDER(Name("TfmemDynamicStep")                                       \
                              .Device(tensorflow::DEVICE_CPU)                            \
                              .Label(kHostKernelLabel)                                   \
                              .TypeConstraint<type>("T"),                                \
                          DynamicStepOp<type>);
TFMEM_REGISTER(float)
TFMEM_REGISTER(double)
#undef TFMEM_REGISTER

}  // namespace
}  // namespace tfmem
