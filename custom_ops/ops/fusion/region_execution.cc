#include "custom_ops/ops/fusion/region_execution.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tensorflow/core/platform/errors.h"

namespace tfmem {
namespace {

using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

constexpr size_t kMostNamed = 6;  // ops of a kernel that an error names

// TensorFlow names the region in the error of its op, so this names the program's ops.
void NameOps(const RegionStep& step, absl::Status* status) {
  if (step.members.empty()) return;
  const size_t named = std::min(step.members.size(), kMostNamed);
  const std::string names = absl::StrJoin(step.members.begin(), step.members.begin() + named, ", ");
  const size_t others = step.members.size() - named;
  tensorflow::errors::AppendToMessage(
      status, absl::StrCat("; the step that failed computes ", names,
                           others > 0 ? absl::StrCat(" and ", others, " more") : ""));
}

}  // namespace

absl::Status RegionExecution::RunSteps() {
  for (size_t at = 0; at < region_.steps.size(); ++at) {
    const RegionStep& step = region_.steps[at];
    absl::Status status;
    switch (step.kind) {
      case RegionStep::Kind::kKernel:
        status = RunKernel(at, step);
        break;
      case RegionStep::Kind::kCall:
        status = RunCall(at, step);
        break;
      case RegionStep::Kind::kView:
        status = RunView(step);
        break;
      case RegionStep::Kind::kRead:
        status = RunRead(step);
        break;
      case RegionStep::Kind::kAssign:
        status = RunAssign(at, step);
    }
    if (!status.ok()) {
      NameOps(step, &status);
      return status;
    }
    Forget(at);
  }
  return absl::OkStatus();
}

absl::Status RegionExecution::Allocate(int at, const RegionStep& step, int output, Tensor* memory) {
  const int value = step.first_output + output;
  const ValueHome& home = flow_.homes[value];
  const int reused = shapes_.reused[at][output];
  const int input = reused < 0 ? -1 : step.inputs[reused];
  const TensorShape& shape = shapes_.values[value];
  const tensorflow::DataType dtype = DataTypeOf(region_.values[value].dtype);
  tensorflow::AllocatorAttributes attributes;
  if (home.kind == ValueHome::Kind::kOutput) {
    attributes = ctx_->output_alloc_attr(home.number);
    const int number = input < 0 ? -1 : flow_.homes[flow_.root[input]].number;
    // Unless the input is computed from a copy of it.
    if (input >= 0 && ctx_->input(number).data() == DataOf(input)) {
      std::unique_ptr<Tensor> forwarded = ctx_->forward_input(
          number, home.number, dtype, shape, ctx_->output_memory_type(home.number), attributes);
      if (forwarded != nullptr) {
        *memory = std::move(*forwarded);
        return absl::OkStatus();
      }
    }
  } else if (home.kind == ValueHome::Kind::kAssigned && input >= 0) {
    const Tensor* now = variables_.Now(home.number);
    if (now != nullptr && now->data() == DataOf(input)) {  // else it has a copy
      ForgetGroup(at, input);
      if (variables_.MayWrite(home.number) && memory->CopyFrom(*now, shape)) {
        return absl::OkStatus();
      }
    }
  }
  return ctx_->allocate_temp(dtype, shape, memory, attributes);
}

absl::Status RegionExecution::CheckRead(int value, const Tensor& read) const {
  const TensorShape& shape = shapes_.values[value];
  if (read.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("region: a variable has shape ", read.shape().DebugString(),
                   " when it is read, and had ", shape.DebugString(), " when the region began"));
}

absl::Status RegionExecution::ViewOf(const Tensor& tensor, int value, Tensor* view) const {
  if (view->CopyFrom(tensor, shapes_.values[value])) return absl::OkStatus();
  return absl::InternalError("region: a view of another size than its value");
}

}  // namespace tfmem
