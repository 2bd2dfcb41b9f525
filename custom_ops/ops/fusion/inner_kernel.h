// TensorFlow's own kernel of an op, run within another op's kernel.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/types.h"

namespace tfmem {

// How a call's inputs and outputs lie; without inputs that are constants.
struct InnerSignature {
  tensorflow::DataTypeVector inputs;  // resources of variables come first
  tensorflow::DataTypeVector outputs;
};

class InnerKernel {
 public:
  // `attrs` is a serialised NodeDef, of which only the attributes count; those that are missing
  // have their defaults. A tensor "constant_1" there is the op's input 1. `ctx` is the construction
  // of the kernel that will call this one.
  //
  // InvalidArgument if there is no such op, or its signature is another; Unimplemented if it is
  // asynchronous.
  static absl::StatusOr<std::unique_ptr<InnerKernel>> Create(tensorflow::OpKernelConstruction* ctx,
                                                             const std::string& op,
                                                             const std::string& attrs,
                                                             const std::string& name,
                                                             const InnerSignature& signature);

  // The shapes of the outputs, as far as they follow from those of the inputs. `variables` are the
  // values of the inputs that are resources.
  absl::StatusOr<std::vector<tensorflow::PartialTensorShape>> InferShapes(
      const std::vector<tensorflow::TensorShape>& inputs,
      const std::vector<const tensorflow::Tensor*>& variables) const;

  // Name of the op whose kernel runs: the op itself, or what TensorFlow's executor would run for
  // it.
  const std::string& executed() const {
    return (executed_ != nullptr ? executed_ : kernel_)->type_string();
  }

  // Runs it within `outer`. An output is written into `outputs` where a tensor is given, unless the
  // kernel sets another one, say an input, or one of another shape; on return `outputs` are the
  // outputs. No input is written to.
  //
  // Internal if the kernel leaves an output out, or gives it another dtype.
  absl::Status Run(tensorflow::OpKernelContext* outer,
                   absl::Span<const tensorflow::TensorValue> inputs,
                   absl::Span<tensorflow::Tensor> outputs) const;

  // Whether it may keep tensors that it read or gave beyond a run.
  bool keeps() const { return keeps_; }

  const std::string& name() const { return kernel_->name(); }
  // The kernel's node, with all of its attributes.
  const tensorflow::NodeDef& node() const { return kernel_->def(); }

 private:
  // By input, in order. The sizes of an image's gradient may have -1 for those of the batch.
  using Constants = std::vector<std::pair<int, tensorflow::Tensor>>;

  InnerKernel(std::unique_ptr<tensorflow::OpKernel> kernel,
              std::unique_ptr<tensorflow::OpKernel> executed, int graph_def_version, bool keeps,
              Constants constants);
  static absl::StatusOr<Constants> TakeConstants(tensorflow::NodeDef* node);

  const std::unique_ptr<tensorflow::OpKernel> kernel_;    // of the op itself
  const std::unique_ptr<tensorflow::OpKernel> executed_;  // of another one in its place, or null
  const int graph_def_version_;
  const bool keeps_;
  const Constants constants_;
  std::vector<int> never_forward_;
};

}  // namespace tfmem
