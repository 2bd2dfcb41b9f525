// What TfmemDynamic and TfmemDynamicStep have in common: a batch read from the inputs of an op, and
// run.
#pragma once

#include <array>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/dynamic/run.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {

// Widths of outputs: of the widest list among the kinds; InvalidArgument if two kinds differ.
absl::StatusOr<std::vector<int64_t>> OutputWidths(const DynamicSpec& spec);

// The net of an op: attribute `spec`, whose numbers of parameters and outputs the op has.
struct DynamicNet {
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  DynamicSpec spec;
  std::vector<int64_t> widths;  // of outputs
};

// TfmemDynamic by its attributes, whose lists have the lengths of its mode.
struct DynamicMode : DynamicNet {
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  int state_type = -1;
  bool forward = true;
  bool backward = false;
  bool keeps = false;  // the memory of the forward pass
};

// Update rules, as kernels/dynamic.cuh numbers them; kNoRule writes gradients.
enum UpdateRule { kNoRule, kSgd, kMomentum, kAdam };

// TfmemDynamicStep by its attributes.
struct DynamicUpdate : DynamicNet {
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  UpdateRule rule = kSgd;
  std::vector<VariableUse> uses;  // of the parameters, and then of each slot of all of them
};

absl::StatusOr<DynamicBatch> ReadBatch(tensorflow::OpKernelContext* ctx, const DynamicSpec& spec);

// The rows of a parameter that has other ones in each batch, in the spec (OPEN_ROWS of
// custom_ops/dynamic/node_code.py).
constexpr int64_t kOpenRows = int64_t{1} << 30;

// InvalidArgument with the parameter's number and both shapes, if it is not the spec's; with the
// row, if its rows come with the batch, and the batch looks up one more.
absl::Status CheckParameter(const DynamicSpec& spec, int number, const DynamicBatch& batch,
                            const tensorflow::TensorShape& shape);

// Where the input `parameters` is, each of which is checked.
absl::StatusOr<std::vector<const void*>> ReadParameters(tensorflow::OpKernelContext* ctx,
                                                        const DynamicSpec& spec,
                                                        const DynamicBatch& batch);
absl::StatusOr<int64_t> ReadSeed(tensorflow::OpKernelContext* ctx);

// The input `rates` as the rule multiplies with them: the learning rate, and the momentum; for Adam
// the step's rate, 1 - beta_1, 1 - beta_2 and epsilon.
template <typename Real>
absl::StatusOr<std::array<Real, 4>> ReadRates(tensorflow::OpKernelContext* ctx, UpdateRule rule);

// The variables' memory in the order of `uses`; that of copies where another op still reads it.
absl::StatusOr<std::vector<void*>> WritableVariables(tensorflow::OpKernelContext* ctx,
                                                     const DynamicUpdate& update,
                                                     const DynamicBatch& batch,
                                                     const CopyBytes& copy,
                                                     RegionVariables* variables);

// Outputs for the gradients of all parameters, and for the rows of the sparse ones.
struct GradientOutputs {
  std::vector<tensorflow::Tensor*> gradients, rows;
};
absl::StatusOr<GradientOutputs> AllocateGradients(tensorflow::OpKernelContext* ctx,
                                                  const DynamicSpec& spec,
                                                  const std::vector<LookedUp>& looked_up);
// The list of outputs `name`: `rows` of each of these widths.
absl::StatusOr<std::vector<tensorflow::Tensor*>> AllocateRows(tensorflow::OpKernelContext* ctx,
                                                              absl::string_view name, int64_t rows,
                                                              absl::Span<const int64_t> widths);
// The list of outputs `states`.
absl::StatusOr<std::vector<tensorflow::Tensor*>> AllocateStates(tensorflow::OpKernelContext* ctx,
                                                                const DynamicMode& mode,
                                                                const DynamicBatch& batch);

// InvalidArgument with what was found and expected.
absl::Status CheckLossGradients(const tensorflow::OpInputList& list, const DynamicBatch& batch);
absl::Status CheckStateGradients(const tensorflow::OpInputList& list, const DynamicSpec& spec,
                                 int state_type, const DynamicBatch& batch);
absl::Status CheckKept(const tensorflow::TensorShape& found,
                       const tensorflow::TensorShape& expected);

// The input `loss_gradients`, if there is one, has one number for each example.
template <typename Real>
absl::Status ReadLossGradients(tensorflow::OpKernelContext* ctx, DynamicCall<Real>* call);

// Builds the script, checks it and runs it on the threads of the device.
template <typename Real>
absl::Status RunBatch(tensorflow::OpKernelContext* ctx, const DynamicCall<Real>& call, bool forward,
                      bool backward);

// Shapes of TfmemDynamic's outputs and TfmemDynamicStep's.
absl::Status DynamicShape(tensorflow::shape_inference::InferenceContext* c);
absl::Status DynamicStepShape(tensorflow::shape_inference::InferenceContext* c);

// Output `losses`, and the list `outputs`.
template <typename Real>
absl::Status PutLosses(tensorflow::OpKernelContext* ctx, const DynamicCall<Real>& call);
template <typename Real>
absl::Status PutOutputs(tensorflow::OpKernelContext* ctx, const DynamicCall<Real>& call,
                        const std::vector<int64_t>& widths);
// Output `keep`: the memory of a batch, or nothing.
absl::Status PutKept(tensorflow::OpKernelContext* ctx, bool keeps,
                     const tensorflow::Tensor& memory);
// TfmemDynamicStep's `done`: its input `number`.
absl::Status PutNumber(tensorflow::OpKernelContext* ctx);
// Empty losses and outputs, which a backward pass alone does not have.
absl::Status PutNothing(tensorflow::OpKernelContext* ctx, const std::vector<int64_t>& widths);

// Registers an op's kernel on the CPU, and as the one that an op on a GPU may run in its place.
#define TFMEM_REGISTER_DYNAMIC(op, kernel)          \
  TFMEM_REGISTER_DYNAMIC_(op, kernel<float>, float) \
  TFMEM_REGISTER_DYNAMIC_(op, kernel<double>, double)
#define TFMEM_REGISTER_DYNAMIC_(op, kernel, type)                                                \
  REGISTER_KERNEL_BUILDER(Name(op).Device(tensorflow::DEVICE_CPU).TypeConstraint<type>("T"),     \
                          kernel);                                                               \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name(op).Device(tensorflow::DEVICE_CPU).Label(kHostKernelLabel).TypeConstraint<type>("T"), \
      kernel);

}  // namespace tfmem
