// TfmemDynamicStep: a batch forward and backward, and its gradients applied to the variables, block
// by block while they are in a cache.
#include <array>
#include <cstring>
#include <vector>

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

template <typename Real>
class Update {
 public:
  Update(const CpuKernels<Real>& kernels, UpdateRule rule, const std::array<Real, 4>& rates)
      : kernels_(kernels), rule_(rule), rates_(rates) {
    for (int number = 0; number < 2; ++number) std::fill_n(splats_[number], 64, rates[number]);
  }

  // `count` numbers of a parameter and its slots; `t` is memory for as many.
  void Apply(Real* w, Real* m, Real* v, const Real* g, int64_t count, Real* t) const {
    const auto with = [&](Elementwise op, Real* to, const Real* a, int rate) {
      kernels_.compute(op, to, a, splats_[rate], nullptr, count, 2);
    };
    const auto of = [&](Elementwise op, Real* to, const Real* a, const Real* b) {
      kernels_.compute(op, to, a, b, nullptr, count, 0);
    };
    if (rule_ == kSgd) {
      with(Elementwise::kMultiply, t, g, 0);
      of(Elementwise::kSubtract, w, w, t);
    } else if (rule_ == kMomentum) {
      with(Elementwise::kMultiply, t, g, 0);
      with(Elementwise::kMultiply, m, m, 1);
      of(Elementwise::kSubtract, m, m, t);
      of(Elementwise::kAdd, w, w, m);
    } else {
      kernels_.adam(w, m, v, g, count, rates_.data());
    }
  }

 private:
  const CpuKernels<Real>& kernels_;
  const UpdateRule rule_;
  const std::array<Real, 4> rates_;
  Real splats_[2][64];  // the learning rate and the momentum
};

template <typename Real>
class DynamicStepOp : public OpKernel {
 public:
  explicit DynamicStepOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, update_.Read(ctx));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, Run(ctx)); }

 private:
  absl::Status Run(OpKernelContext* ctx) {
    TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec_));
    TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec_, batch));
    const std::vector<LookedUp> looked_up = FindLookedUp(spec_, batch);
    DynamicCall<Real> call{spec_, batch, layout, looked_up};
    TFMEM_ASSIGN_OR_RETURN(const auto rates, ReadRates<Real>(ctx, update_.rule));
    TFMEM_ASSIGN_OR_RETURN(call.seed, ReadSeed(ctx));
    TFMEM_RETURN_IF_ERROR(ReadLossGradients(ctx, &call));
    Tensor memory;
    tensorflow::TensorShape floats;
    TFMEM_RETURN_IF_ERROR(BuildShape({layout.floats}, &floats));
    TFMEM_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DataTypeToEnum<Real>::value, floats, &memory));
    call.memory = memory.flat<Real>().data();

    RegionVariables variables(ctx, 0, update_.uses);
    TFMEM_RETURN_IF_ERROR(variables.Open());
    TFMEM_RETURN_IF_ERROR(variables.CheckDistinct());
    const CopyBytes copy = [](void* to, const void* from, int64_t bytes) {
      std::memcpy(to, from, bytes);
      return absl::OkStatus();
    };
    TFMEM_ASSIGN_OR_RETURN(const std::vector<void*> memories,
                           WritableVariables(ctx, update_, batch, copy, &variables));
    std::vector<Real*> values;
    for (void* found : memories) values.push_back(static_cast<Real*>(found));
    const size_t count = spec_.parameters.size();
    call.parameters.assign(values.begin(), values.begin() + count);
    const Update<Real> update(KernelsOf<Real>(ChosenKernels()), update_.rule, rates);
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
    TFMEM_RETURN_IF_ERROR(PutOutputs(ctx, call, update_.widths));
    return PutNumber(ctx);
  }

  DynamicUpdate update_;
  const DynamicSpec& spec_ = update_.spec;
};

TFMEM_REGISTER_DYNAMIC("TfmemDynamicStep", DynamicStepOp)

}  // namespace
}  // namespace tfmem
