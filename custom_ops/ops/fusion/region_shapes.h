// The shapes of a region's values for given shapes of its inputs and variables, and where the
// values then lie.
#ifndef TFMEM_CUSTOM_OPS_OPS_FUSION_REGION_SHAPES_H_
#define TFMEM_CUSTOM_OPS_OPS_FUSION_REGION_SHAPES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/tile_run.h"
#include "custom_ops/ops/fusion/inner_kernel.h"
#include "custom_ops/ops/fusion/region.h"
#include "custom_ops/ops/fusion/region_flow.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfmem {

tensorflow::DataType DataTypeOf(ValueDType dtype);

// A region with the kernels that it takes, whatever its shapes are.
struct CompiledRegion {
  Region region;
  std::vector<std::unique_ptr<InnerKernel>> calls;  // of the steps that are calls; else null
  std::vector<VariableUse> uses;                    // of the variables
  RegionFlow flow;

  static absl::StatusOr<std::unique_ptr<CompiledRegion>> Create(
      tensorflow::OpKernelConstruction* ctx, Region region);
};

struct RegionShapes {
  std::vector<tensorflow::TensorShape> values;
  std::vector<std::unique_ptr<const PreparedExpression>>
      kernels;  // of the steps that are; else null
  // The arena has the roots that lie there, by offset, and behind them what one kernel needs.
  std::vector<int64_t> offsets;
  int64_t workspace = 0;
  int64_t arena_bytes = 0;
  // For each step the input in whose memory each output may be written; -1: none.
  std::vector<std::vector<int>> reused;
};

// `variables` are the values that the variables have; null: none. `threads` run the kernels.
// InvalidArgument if they do not fit; Unimplemented if a call's shapes do not follow from its
// inputs' shapes.
absl::StatusOr<RegionShapes> ShapesOf(const CompiledRegion& compiled,
                                      const std::vector<tensorflow::TensorShape>& inputs,
                                      const std::vector<const tensorflow::Tensor*>& variables,
                                      int threads);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_FUSION_REGION_SHAPES_H_
