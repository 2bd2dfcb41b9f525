#include "custom_ops/ops/fusion/inner_kernel.h"

#include <limits>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/fusion/executed_op.h"
#include "custom_ops/ops/nested_params.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace tfmem {
namespace {

using ::tensorflow::AllocatorAttributes;
using ::tensorflow::DataTypeVector;
using ::tensorflow::NodeDef;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpRegistry;
using ::tensorflow::PartialTensorShape;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::TensorValue;
using ::tensorflow::shape_inference::InferenceContext;

constexpr absl::string_view kConstant = "constant_";

// Gives a kernel memory for its outputs that was allocated before.
class InnerContext : public OpKernelContext {
 public:
  InnerContext(Params* params, absl::Span<Tensor> outputs)
      : OpKernelContext(params, outputs.size()), outputs_(outputs) {}

  using OpKernelContext::allocate_output;
  absl::Status allocate_output(int index, const TensorShape& shape, Tensor** tensor,
                               AllocatorAttributes attr) override {
    const Tensor& given = outputs_[index];
    if (!given.IsInitialized() || given.shape() != shape) {
      return OpKernelContext::allocate_output(index, shape, tensor, attr);
    }
    set_output(index, given);
    *tensor = mutable_output(index);
    return absl::OkStatus();
  }

 private:
  const absl::Span<Tensor> outputs_;
};

// `value`, but where it says the sizes of an image's gradient without that of the batch, with
// `batch`, which the gradient of the result has as well.
Tensor WithBatch(const std::string& op, const Tensor& value, int64_t batch) {
  const bool image = absl::EndsWith(op, "BackpropInput") || op == "AvgPoolGrad";
  if (!image || value.dtype() != tensorflow::DT_INT32 || value.NumElements() != 4 ||
      value.flat<int32_t>()(0) >= 0 || batch > std::numeric_limits<int32_t>::max()) {
    return value;
  }
  Tensor found = tensorflow::tensor::DeepCopy(value);
  found.flat<int32_t>()(0) = batch;
  return found;
}

int64_t BatchOf(const TensorShape& shape) { return shape.dims() > 0 ? shape.dim_size(0) : 0; }

}  // namespace

InnerKernel::InnerKernel(std::unique_ptr<OpKernel> kernel, std::unique_ptr<OpKernel> executed,
                         int graph_def_version, bool keeps, Constants constants)
    : kernel_(std::move(kernel)),
      executed_(std::move(executed)),
      graph_def_version_(graph_def_version),
      keeps_(keeps),
      constants_(std::move(constants)),
      never_forward_(kernel_->num_outputs(), OpKernelContext::Params::kNeverForward) {}

absl::StatusOr<InnerKernel::Constants> InnerKernel::TakeConstants(NodeDef* node) {
  std::map<int, Tensor> found;
  std::vector<std::string> names;
  for (const auto& [name, value] : node->attr()) {
    int place = 0;
    if (!absl::StartsWith(name, kConstant)) continue;
    Tensor tensor;
    if (!absl::SimpleAtoi(absl::string_view(name).substr(kConstant.size()), &place) || place < 0 ||
        !value.has_tensor() || !tensor.FromProto(value.tensor())) {
      return absl::InvalidArgumentError(absl::StrCat("attribute '", name, "' is no constant"));
    }
    found[place] = std::move(tensor);
    names.push_back(name);
  }
  for (const std::string& name : names) node->mutable_attr()->erase(name);
  return Constants(found.begin(), found.end());
}

absl::StatusOr<std::unique_ptr<InnerKernel>> InnerKernel::Create(OpKernelConstruction* ctx,
                                                                 const std::string& op,
                                                                 const std::string& attrs,
                                                                 const std::string& name,
                                                                 const InnerSignature& signature) {
  const auto wrong = [&](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat("call of ", op, " (", name, "): ", what...));
  };
  const tensorflow::OpDef* op_def = nullptr;
  TFMEM_RETURN_IF_ERROR(OpRegistry::Global()->LookUpOpDef(op, &op_def));
  NodeDef node;
  if (!node.ParseFromString(attrs)) return wrong("its attributes are no NodeDef");
  node.set_op(op);
  node.set_name(name);
  node.clear_device();
  node.clear_input();
  TFMEM_ASSIGN_OR_RETURN(Constants constants, TakeConstants(&node));
  DataTypeVector given = signature.inputs;
  for (const auto& [place, value] : constants) {
    if (place > static_cast<int>(given.size())) return wrong("input ", place, " is a constant");
    given.insert(given.begin() + place, value.dtype());
  }
  for (size_t i = 0; i < given.size(); ++i) node.add_input(absl::StrCat("input", i));
  AddDefaultsToNodeDef(*op_def, &node);
  DataTypeVector inputs, outputs;
  TFMEM_RETURN_IF_ERROR(tensorflow::InOutTypesForNode(node, *op_def, &inputs, &outputs));
  if (inputs != given || outputs != signature.outputs) {
    return wrong("takes ", tensorflow::DataTypeVectorString(inputs), " and gives ",
                 tensorflow::DataTypeVectorString(outputs), "; the region has ",
                 tensorflow::DataTypeVectorString(given), " and ",
                 tensorflow::DataTypeVectorString(signature.outputs));
  }
  absl::Status status;
  const auto create = [&](const NodeDef& def) {
    return tensorflow::CreateOpKernel(ctx->device_type(), ctx->device(),
                                      ctx->device()->GetAllocator(AllocatorAttributes()), def,
                                      ctx->graph_def_version(), &status);
  };
  std::unique_ptr<OpKernel> kernel = create(node);  // which checks the attributes
  TFMEM_RETURN_IF_ERROR(status);
  if (kernel->AsAsync() != nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("call of ", op, " (", name, "): it is asynchronous"));
  }
  std::unique_ptr<OpKernel> executed;
  if (ctx->device_type() == tensorflow::DEVICE_CPU) {
    const NodeDef def = ExecutedOnCpu(kernel->def(), inputs, ctx->graph_def_version());
    if (def.op() != op) executed = create(def);
    const bool fits = status.ok() && executed != nullptr && executed->AsAsync() == nullptr &&
                      executed->input_types() == inputs && executed->output_types() == outputs;
    if (!fits) executed = nullptr;
  }
  return std::unique_ptr<InnerKernel>(new InnerKernel(std::move(kernel), std::move(executed),
                                                      ctx->graph_def_version(),
                                                      op_def->is_stateful(), std::move(constants)));
}

absl::StatusOr<std::vector<PartialTensorShape>> InnerKernel::InferShapes(
    const std::vector<TensorShape>& inputs, const std::vector<const Tensor*>& variables) const {
  const tensorflow::OpRegistrationData* op = nullptr;
  TFMEM_RETURN_IF_ERROR(OpRegistry::Global()->LookUp(kernel_->def().op(), &op));
  std::vector<PartialTensorShape> shapes(variables.size(), PartialTensorShape(TensorShape({})));
  shapes.insert(shapes.end(), inputs.begin(), inputs.end());
  using Handle = std::vector<std::pair<PartialTensorShape, tensorflow::DataType>>;
  std::vector<std::unique_ptr<Handle>> handles;
  for (const Tensor* variable : variables) {
    auto& handle = handles.emplace_back();
    if (variable == nullptr) continue;
    handle = std::make_unique<Handle>();
    handle->emplace_back(PartialTensorShape(variable->shape()), variable->dtype());
  }
  std::vector<const Tensor*> values(shapes.size());
  Constants constants = constants_;
  for (auto& [place, value] : constants) {
    if (!inputs.empty()) value = WithBatch(kernel_->type_string(), value, BatchOf(inputs.back()));
    shapes.insert(shapes.begin() + place, PartialTensorShape(value.shape()));
    values.insert(values.begin() + place, &value);
    if (place < static_cast<int>(handles.size())) handles.emplace(handles.begin() + place);
  }
  handles.resize(shapes.size());
  InferenceContext context(graph_def_version_, tensorflow::AttrSlice(kernel_->def()), op->op_def,
                           shapes, values, {}, handles);
  std::vector<PartialTensorShape> outputs(kernel_->num_outputs());
  if (op->shape_inference_fn == nullptr) return outputs;
  TFMEM_RETURN_IF_ERROR(context.Run(op->shape_inference_fn));
  for (int i = 0; i < kernel_->num_outputs(); ++i) {
    tensorflow::TensorShapeProto proto;
    context.ShapeHandleToProto(context.output(i), &proto);
    TFMEM_RETURN_IF_ERROR(PartialTensorShape::BuildPartialTensorShape(proto, &outputs[i]));
  }
  return outputs;
}

absl::Status InnerKernel::Run(OpKernelContext* outer, absl::Span<const TensorValue> inputs,
                              absl::Span<Tensor> outputs) const {
  OpKernelContext::Params params;
  FillParams(outer, &params);
  OpKernel* const kernel = executed_ != nullptr ? executed_.get() : kernel_.get();
  params.op_kernel = kernel;
  absl::InlinedVector<TensorValue, 4> all;
  Constants constants = constants_;
  if (!constants.empty()) {
    all.assign(inputs.begin(), inputs.end());
    for (auto& [place, value] : constants) {
      if (!inputs.empty()) {
        value = WithBatch(kernel_->type_string(), value, BatchOf(inputs.back().tensor->shape()));
      }
      all.insert(all.begin() + place, TensorValue(&value));
    }
    inputs = all;
  }
  params.inputs = inputs;
  absl::InlinedVector<AllocatorAttributes, 4> attributes(outputs.size());
  params.output_attr_array = attributes.data();
  params.forward_from_array = never_forward_.data();
  InnerContext context(&params, outputs);
  kernel->Compute(&context);
  TFMEM_RETURN_IF_ERROR(context.status());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor* output = context.mutable_output(i);
    if (output == nullptr) {
      return absl::InternalError(absl::StrCat(name(), ": its kernel left output ", i, " out"));
    }
    if (output->dtype() != kernel_->output_type(i)) {
      return absl::InternalError(absl::StrCat(name(), ": output ", i, " is of another dtype"));
    }
    outputs[i] = *output;
  }
  return absl::OkStatus();
}

}  // namespace tfmem
