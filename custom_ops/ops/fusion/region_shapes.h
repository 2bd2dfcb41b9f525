// The shapes of a region's values for given shapes of its inputs and variables, and where the
// values then lie.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/sized_expression.h"
#include "custom_ops/ops/fusion/inner_kernel.h"
#include "custom_ops/ops/fusion/region.h"
#include "custom_ops/ops/fusion/region_flow.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfmem {

tensorflow::DataType DataTypeOf(ValueDType dtype);

// What a region's steps do with each of its variables. `within` is left out: it depends on kernels.
std::vector<VariableUse> UsesOf(const Region& region);

// A region with the kernels that it takes, whatever its shapes are.
struct CompiledRegion {
  Region region;
  std::vector<std::unique_ptr<InnerKernel>> calls;  // of the steps that are calls; else null
  std::vector<VariableUse> uses;                    // of the variables
  RegionFlow flow;

  static absl::StatusOr<std::unique_ptr<CompiledRegion>> Create(
      tensorflow::OpKernelConstruction* ctx, Region region);
};

// What kernels and calls are on a device, for the shapes that their values have.
class RegionSteps {
 public:
  virtual ~RegionSteps() = default;
  // Prepares the kernel of a step for inputs of these shapes; the shapes of its outputs.
  virtual absl::StatusOr<std::vector<Shape>> PrepareKernel(int step, const Expression& program,
                                                           const std::vector<Shape>& inputs) = 0;
  // Prepares a call, of which all shapes are known.
  virtual absl::Status PrepareCall(int step,
                                   const std::vector<tensorflow::TensorShape>& values) = 0;
  // Whether an output of a kernel may have the memory of an input.
  virtual bool MayShare(int step, int input, int output) const = 0;
  // What a step needs beside its values.
  virtual int64_t WorkspaceBytes(int step) const = 0;
};

struct RegionShapes {
  std::vector<tensorflow::TensorShape> values;
  // The arena has the roots that lie there, by offset, and behind them what one kernel needs.
  std::vector<int64_t> offsets;
  int64_t workspace = 0;
  int64_t arena_bytes = 0;
  // For each step the input in whose memory each output may be written; -1: none.
  std::vector<std::vector<int>> reused;
};

// What the shapes of a region depend on: the shapes of its inputs and of its variables' values.
using ShapesKey = absl::InlinedVector<int64_t, 64>;

// The values that `count` variables have; null: none.
std::vector<const tensorflow::Tensor*> ValuesOf(const RegionVariables& variables, int count);
ShapesKey KeyOf(tensorflow::OpKernelContext* ctx, int inputs,
                const std::vector<const tensorflow::Tensor*>& variables);

// `variables` are the values that the variables have; null: none. `steps` are prepared.
// InvalidArgument if they do not fit; Unimplemented if a call's shapes do not follow from its
// inputs' shapes.
absl::StatusOr<RegionShapes> ShapesOf(const CompiledRegion& compiled,
                                      const std::vector<tensorflow::TensorShape>& inputs,
                                      const std::vector<const tensorflow::Tensor*>& variables,
                                      RegionSteps* steps);

}  // namespace tfmem
