// TfmemFusion: what it is, and what it does on the CPU.
#include "custom_ops/ops/fusion/fusion.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/fusion/region.h"
#include "custom_ops/ops/fusion/region_run.h"
#include "custom_ops/ops/fusion/region_shapes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {
namespace {

using ::tensorflow::DataType;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

// Whether the op's inputs, outputs and variables are the region's.
template <typename Context>
absl::Status CheckSignature(Context* ctx, const Region& region) {
  std::vector<DataType> inputs, outputs;
  int64_t variables = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("T_args", &inputs));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("T_out", &outputs));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("N", &variables));
  std::vector<DataType> expected_inputs, expected_outputs;
  for (int i = 0; i < region.inputs; ++i) {
    expected_inputs.push_back(DataTypeOf(region.values[i].dtype));
  }
  for (int output : region.outputs) {
    expected_outputs.push_back(DataTypeOf(region.values[output].dtype));
  }
  const int64_t expected_variables = region.variables.size();
  if (inputs == expected_inputs && outputs == expected_outputs && variables == expected_variables) {
    return absl::OkStatus();
  }
  const auto show = [](const std::vector<DataType>& types) {
    return absl::StrCat("[", tensorflow::DataTypeSliceString(types), "]");
  };
  return absl::InvalidArgumentError(
      absl::StrCat("the op has inputs ", show(inputs), ", ", variables, " variables and outputs ",
                   show(outputs), "; its region has ", show(expected_inputs), ", ",
                   expected_variables, " and ", show(expected_outputs)));
}

// Outputs have the shapes that the region declares.
absl::Status FusionShape(InferenceContext* c) {
  std::string text;
  TFMEM_RETURN_IF_ERROR(c->GetAttr("region", &text));
  TFMEM_ASSIGN_OR_RETURN(const Region region, ParseRegion(text));
  TFMEM_RETURN_IF_ERROR(CheckSignature(c, region));
  const auto shape_of = [&](int value) {
    std::vector<DimensionHandle> sizes;
    for (int64_t size : region.values[value].shape) {
      sizes.push_back(size < 0 ? c->UnknownDim() : c->MakeDim(size));
    }
    return c->MakeShape(sizes);
  };
  for (int i = 0; i < region.inputs; ++i) {
    ShapeHandle merged;
    TFMEM_RETURN_IF_ERROR(c->Merge(c->input(i), shape_of(i), &merged));
  }
  for (size_t i = 0; i < region.outputs.size(); ++i) {
    const int value = region.outputs[i];
    c->set_output(i, value < region.inputs ? c->input(value) : shape_of(value));
  }
  return absl::OkStatus();
}

REGISTER_OP("TfmemFusion")
    .Input("args: T_args")
    .Input("variables: N * resource")
    .Output("outputs: T_out")
    .Attr("T_args: list(type) >= 0")
    .Attr("N: int >= 0")
    .Attr("T_out: list(type) >= 0")
    .Attr("region: string")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .Attr("time_products: bool = false")
    .Attr("keep_memory: bool = true")
    .Attr("dry_run: bool = false")
    // An op with variables has to be stateful, as TensorFlow's ops of variables are. Without them,
    // this only keeps it from being merged with another one.
    .SetIsStateful()
    .SetShapeFn(FusionShape)
    .Doc(R"doc(
Runs a region of a graph: its elementwise ops, reductions and products, and its variables.

args: what the region reads.
variables: the variables that it reads and assigns.
outputs: what it gives.
region: to_text() of custom_ops/fusion/text.py.
programs: for a GPU, for each kernel of the region how it is launched, as
  custom_ops/fusion/codegen/description.py says it.
images: the functions that hold the code of the programs (custom_ops/image_functions.py).
time_products: for a GPU, whether the algorithms of its products may be timed when it first runs
  with given shapes. Not where op determinism is on.
keep_memory: on a CPU, whether the memory of a run may wait for the next one.
dry_run: whether the region's variables stay as they are.
)doc");

class FusionOp : public OpKernel {
 public:
  explicit FusionOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_VALUE(Region region, ctx, ReadFusionRegion(ctx));
    OP_REQUIRES_VALUE(std::unique_ptr<CompiledRegion> compiled, ctx,
                      CompiledRegion::Create(ctx, std::move(region)));
    bool keep_memory = true, dry_run = false;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep_memory", &keep_memory));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dry_run", &dry_run));
    runner_ = std::make_unique<RegionRunner>(std::move(compiled), keep_memory, dry_run);
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, runner_->Run(ctx)); }

 private:
  std::unique_ptr<RegionRunner> runner_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemFusion").Device(DEVICE_CPU), FusionOp);
REGISTER_KERNEL_BUILDER(Name("TfmemFusion").Device(DEVICE_CPU).Label(kHostKernelLabel), FusionOp);

}  // namespace

absl::StatusOr<Region> ReadFusionRegion(OpKernelConstruction* ctx) {
  std::string text;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("region", &text));
  TFMEM_ASSIGN_OR_RETURN(Region region, ParseRegion(text));
  TFMEM_RETURN_IF_ERROR(CheckSignature(ctx, region));
  return region;
}

}  // namespace tfmem
