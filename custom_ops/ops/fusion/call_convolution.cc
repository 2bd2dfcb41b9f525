#include "custom_ops/ops/fusion/call_convolution.h"

#include <algorithm>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/node_def_util.h"

namespace tfmem {
namespace {

using ::tensorflow::TensorShape;

ConvolutionKind KindOf(const std::string& op) {
  return absl::EndsWith(op, "BackpropInput")    ? ConvolutionKind::kInputGradient
         : absl::EndsWith(op, "BackpropFilter") ? ConvolutionKind::kFilterGradient
                                                : ConvolutionKind::kForward;
}

constexpr char kDepthwise[] = "DepthwiseConv2dNative";

// Padding before and after, of both dimensions, as TensorFlow has it.
absl::Status ReadPadding(const tensorflow::NodeDef& node, int first, ConvolutionForm* form) {
  std::string padding;
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "padding", &padding));
  std::vector<int64_t> given;
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "explicit_paddings", &given));
  if (padding == "EXPLICIT" && given.size() != 8) {
    return absl::InvalidArgumentError("region: a convolution without explicit paddings");
  }
  for (int i = 0; i < 2; ++i) {
    const int64_t window = (form->filter[i] - 1) * form->dilation[i] + 1;
    int64_t before = 0, after = 0;
    if (padding == "SAME") {
      const int64_t results = (form->image[i] + form->stride[i] - 1) / form->stride[i];
      const int64_t all =
          std::max<int64_t>((results - 1) * form->stride[i] + window - form->image[i], 0);
      before = all / 2;
      after = all - before;
    } else if (padding == "EXPLICIT") {
      before = given[2 * (first + i)];
      after = given[2 * (first + i) + 1];
    }
    for (int64_t each : {before, after}) {
      TFMEM_RETURN_IF_ERROR(CheckRange("region: padding", each, 0, kMostOfASize));
    }
    if (before != after) {
      return absl::UnimplementedError(absl::StrCat("region: a convolution is padded by ", before,
                                                   " before and ", after,
                                                   " behind; cuDNN pads both sides alike"));
    }
    const int64_t room = form->image[i] + before + after - window;
    if (room < 0 || form->result[i] != room / form->stride[i] + 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("region: a convolution of ", form->image[i], " by ", form->filter[i],
                       " gives ", form->result[i], " with padding ", padding, " of ", before));
    }
    form->pad[i] = before;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<cudnn::Type> CudnnTypeOf(ValueDType dtype) {
  switch (dtype) {
    case ValueDType::kFloat32:
      return cudnn::kFloat;
    case ValueDType::kFloat64:
      return cudnn::kDouble;
    case ValueDType::kFloat16:
      return cudnn::kHalf;
    case ValueDType::kBfloat16:
      return cudnn::kBfloat16;
    default:
      return absl::UnimplementedError(absl::StrCat("cuDNN computes no ", NameOf(dtype), " here"));
  }
}

absl::Status ReadSpatial(const tensorflow::NodeDef& node, const char* name, int first,
                         std::array<int64_t, 2>* found) {
  std::vector<int64_t> all;
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, name, &all));
  const auto fits = [](int64_t each) {
    return each >= 1 && each <= std::numeric_limits<int32_t>::max();
  };
  const bool four = all.size() == 4 && std::all_of(all.begin(), all.end(), fits);
  if (!four || all[0] != 1 || all[first == 1 ? 3 : 1] != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("region: a call with ", name, " [", absl::StrJoin(all, ","), "]"));
  }
  *found = {all[first], all[first + 1]};
  return absl::OkStatus();
}

absl::Status CheckImages(const std::string& op, std::initializer_list<const TensorShape*> shapes) {
  for (const TensorShape* shape : shapes) {
    for (int64_t size : shape->dim_sizes()) {
      TFMEM_RETURN_IF_ERROR(CheckRange("region: a size of an image", size, 0, kMostOfASize));
    }
    if (shape->num_elements() > std::numeric_limits<int32_t>::max()) {
      return absl::UnimplementedError(absl::StrCat("call of ", op, ": cuDNN takes no tensor of ",
                                                   shape->num_elements(), " numbers"));
    }
  }
  return absl::OkStatus();
}

bool IsConvolution(const std::string& op) {
  for (const char* name : {"Conv2D", kDepthwise}) {
    if (op == name || op == absl::StrCat(name, "BackpropInput") ||
        op == absl::StrCat(name, "BackpropFilter")) {
      return true;
    }
  }
  return false;
}

absl::StatusOr<ConvolutionForm> ConvolutionOf(const CompiledRegion& compiled, int number, bool tf32,
                                              const std::vector<TensorShape>& values) {
  const RegionStep& step = compiled.region.steps[number];
  const tensorflow::NodeDef& node = compiled.calls[number]->node();
  if (step.inputs.size() != 2) {
    return absl::UnimplementedError(absl::StrCat(
        "call of ", step.op, ": a region on a GPU calls it with sizes that are constants"));
  }
  ConvolutionForm form;
  form.tf32 = tf32;
  form.kind = KindOf(step.op);
  TFMEM_ASSIGN_OR_RETURN(form.type, CudnnTypeOf(compiled.region.values[step.inputs[0]].dtype));
  std::string format;
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "data_format", &format));
  form.channels_last = format == "NHWC";
  const TensorShape &a = values[step.inputs[0]], &b = values[step.inputs[1]];
  const TensorShape& made = values[step.first_output];
  const bool forward = form.kind == ConvolutionKind::kForward,
             by_input = form.kind == ConvolutionKind::kInputGradient;
  const TensorShape& x = by_input ? made : a;
  const TensorShape& w = forward ? b : by_input ? a : made;
  const TensorShape& y = forward ? made : b;
  const auto wrong = [&] {
    return absl::InvalidArgumentError(absl::StrCat("region: a call of ", step.op, " convolves ",
                                                   x.DebugString(), " with ", w.DebugString(),
                                                   " and gives ", y.DebugString()));
  };
  if ((!form.channels_last && format != "NCHW") || x.dims() != 4 || w.dims() != 4 ||
      y.dims() != 4 || x.dim_size(0) != y.dim_size(0)) {
    return wrong();
  }
  TFMEM_RETURN_IF_ERROR(CheckImages(step.op, {&x, &w, &y}));
  const int first = form.channels_last ? 1 : 2, channel = form.channels_last ? 3 : 1;
  form.batch = x.dim_size(0);
  form.channels = x.dim_size(channel);
  form.results = y.dim_size(channel);
  form.image = {x.dim_size(first), x.dim_size(first + 1)};
  form.result = {y.dim_size(first), y.dim_size(first + 1)};
  form.filter = {w.dim_size(0), w.dim_size(1)};
  // A depthwise filter [h, w, c, m] has the numbers of [h, w, 1, c m], a group for each channel.
  const bool depthwise = absl::StartsWith(step.op, kDepthwise);
  if (depthwise && w.dim_size(2) != form.channels) return wrong();
  const int64_t depth = depthwise ? 1 : w.dim_size(2);
  const int64_t results = depthwise ? w.dim_size(2) * w.dim_size(3) : w.dim_size(3);
  if (w.num_elements() == 0 || results != form.results || form.channels % depth != 0 ||
      (form.channels > 0 && form.results % (form.channels / depth) != 0)) {
    return wrong();
  }
  form.groups = std::max<int64_t>(form.channels / depth, 1);
  TFMEM_RETURN_IF_ERROR(ReadSpatial(node, "strides", first, &form.stride));
  TFMEM_RETURN_IF_ERROR(ReadSpatial(node, "dilations", first, &form.dilation));
  TFMEM_RETURN_IF_ERROR(ReadPadding(node, first, &form));
  return form;
}

std::optional<ProductForm> ProductOf(const ConvolutionForm& form) {
  const std::array<int64_t, 2> ones = {1, 1}, none = {0, 0};
  const int64_t pixels = form.batch * form.image[0] * form.image[1];
  if (!form.channels_last || form.groups != 1 || form.filter != ones || form.stride != ones ||
      form.pad != none || pixels > kMostOfASize) {
    return std::nullopt;
  }
  ProductForm product;
  product.tf32 = form.tf32;
  product.type = form.type == cudnn::kFloat    ? cublas::kR32F
                 : form.type == cudnn::kDouble ? cublas::kR64F
                 : form.type == cudnn::kHalf   ? cublas::kR16F
                                               : cublas::kR16BF;
  switch (form.kind) {
    case ConvolutionKind::kForward:
      product.rows = pixels;
      product.depth = form.channels;
      product.columns = form.results;
      break;
    case ConvolutionKind::kInputGradient:
      product.transpose_right = true;
      product.rows = pixels;
      product.depth = form.results;
      product.columns = form.channels;
      break;
    case ConvolutionKind::kFilterGradient:
      product.transpose_left = true;
      product.rows = form.channels;
      product.depth = pixels;
      product.columns = form.results;
      break;
  }
  return product;
}

}  // namespace tfmem
