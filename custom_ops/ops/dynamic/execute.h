// What TfmemDynamic and TfmemDynamicStep have in common: a batch read from the inputs of an op, and
// run.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/dynamic/run.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {

// The spec is a node's attribute `spec`, whose numbers of parameters and outputs the node has.
absl::StatusOr<DynamicSpec> ReadDynamicSpec(tensorflow::OpKernelConstruction* ctx);

// Widths of outputs: of the widest list among the kinds; InvalidArgument if two kinds differ.
absl::StatusOr<std::vector<int64_t>> OutputWidths(const DynamicSpec& spec);

// Whether the lists of TfmemDynamic have the lengths of its mode.
absl::Status CheckLists(tensorflow::OpKernelConstruction* ctx, const DynamicSpec& spec,
                        int state_type, bool forward, bool backward);

absl::StatusOr<DynamicBatch> ReadBatch(tensorflow::OpKernelContext* ctx, const DynamicSpec& spec);

// The rows of a parameter that has other ones in each batch, in the spec (OPEN_ROWS of
// custom_ops/dynamic/node_code.py).
constexpr int64_t kOpenRows = int64_t{1} << 30;

// InvalidArgument with the parameter's number and both shapes, if it is not the spec's; with the
// row, if its rows come with the batch, and the batch looks up one more.
absl::Status CheckParameter(const DynamicSpec& spec, int number, const DynamicBatch& batch,
                            const tensorflow::TensorShape& shape);

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
// TfmemDynamicStep's `done`: its input `number`.
absl::Status PutNumber(tensorflow::OpKernelContext* ctx);
// Empty losses and outputs, which a backward pass alone does not have.
absl::Status PutNothing(tensorflow::OpKernelContext* ctx, const std::vector<int64_t>& widths);

}  // namespace tfmem
