#include "custom_ops/ops/fusion/call_pooling.h"

#include <algorithm>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/fusion/call_convolution.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/util/env_var.h"

namespace tfmem {
namespace {

using ::tensorflow::TensorShape;

constexpr char kMax[] = "MaxPool", kAverage[] = "AvgPool";

}  // namespace

bool IsPooling(const std::string& op) {
  for (const char* name : {kMax, kAverage}) {
    if (op == name || op == absl::StrCat(name, "Grad")) return true;
  }
  return false;
}

absl::StatusOr<PoolingForm> PoolingOf(const CompiledRegion& compiled, int number,
                                      const std::vector<TensorShape>& values) {
  const RegionStep& step = compiled.region.steps[number];
  const tensorflow::NodeDef& node = compiled.calls[number]->node();
  PoolingForm form;
  form.average = absl::StartsWith(step.op, kAverage);
  form.gradient = absl::EndsWith(step.op, "Grad");
  const size_t expected = form.gradient && !form.average ? 3 : 1;
  if (step.inputs.size() != expected) {
    return absl::UnimplementedError(absl::StrCat(
        "call of ", step.op, ": a region on a GPU calls it with sizes that are constants"));
  }
  const TensorShape& made = values[step.first_output];
  const TensorShape& x = form.gradient ? made : values[step.inputs[0]];
  const TensorShape& y = form.gradient ? values[step.inputs.back()] : made;
  const auto wrong = [&] {
    return absl::InvalidArgumentError(absl::StrCat("region: a call of ", step.op, " pools ",
                                                   x.DebugString(), " in windows to ",
                                                   y.DebugString()));
  };
  if (expected == 3 && (values[step.inputs[0]] != x || values[step.inputs[1]] != y)) return wrong();
  TFMEM_ASSIGN_OR_RETURN(form.type, CudnnTypeOf(compiled.region.values[step.inputs[0]].dtype));
  std::string format, padding;
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "data_format", &format));
  TFMEM_RETURN_IF_ERROR(tensorflow::GetNodeAttr(node, "padding", &padding));
  form.channels_last = format == "NHWC";
  if ((!form.channels_last && format != "NCHW") || x.dims() != 4 || y.dims() != 4) return wrong();
  if (padding != "SAME" && padding != "VALID") {
    return absl::UnimplementedError(absl::StrCat(
        "call of ", step.op, ": a region on a GPU pools nothing with padding ", padding));
  }
  const int first = form.channels_last ? 1 : 2, channel = form.channels_last ? 3 : 1;
  TFMEM_RETURN_IF_ERROR(CheckImages(step.op, {&x, &y}));
  form.batch = x.dim_size(0);
  form.channels = x.dim_size(channel);
  if (y.dim_size(0) != form.batch || y.dim_size(channel) != form.channels) return wrong();
  TFMEM_RETURN_IF_ERROR(ReadSpatial(node, "ksize", first, &form.window));
  TFMEM_RETURN_IF_ERROR(ReadSpatial(node, "strides", first, &form.stride));
  for (int i = 0; i < 2; ++i) {
    const int64_t size = x.dim_size(first + i), window = form.window[i], stride = form.stride[i];
    form.image[i] = size;
    form.result[i] = y.dim_size(first + i);
    const bool same = padding == "SAME";
    const int64_t results = same ? (size + stride - 1) / stride : (size - window) / stride + 1;
    if (form.result[i] != results || (!same && window > size)) return wrong();
    if (same) form.pad[i] = std::max<int64_t>((results - 1) * stride + window - size, 0) / 2;
  }
  TFMEM_RETURN_IF_ERROR(
      tensorflow::ReadBoolFromEnvVar("TF_ENABLE_MAXPOOL_NANPROP", false, &form.propagates_nan));
  return form;
}

}  // namespace tfmem
