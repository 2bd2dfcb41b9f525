// What the attributes of TfmemDynamic and TfmemDynamicStep say.
#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/execute.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::OpKernelConstruction;

namespace {

absl::Status CheckList(OpKernelConstruction* ctx, const char* name, int64_t expected) {
  int64_t found = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr(name, &found));
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", found, "; expected ", expected, " in this mode"));
}

}  // namespace

absl::Status DynamicNet::Read(OpKernelConstruction* ctx) {
  std::string text;
  int64_t parameters = 0, outputs = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spec", &text));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("N", &parameters));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("No", &outputs));
  TFMEM_ASSIGN_OR_RETURN(spec, ParseDynamicSpec(text));
  TFMEM_ASSIGN_OR_RETURN(widths, OutputWidths(spec));
  if (static_cast<int64_t>(spec.parameters.size()) == parameters &&
      static_cast<int64_t>(widths.size()) == outputs) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("the op has ", parameters, " parameters and ",
                                                 outputs, " outputs; its kinds have ",
                                                 spec.parameters.size(), " and ", widths.size()));
}

absl::Status DynamicMode::Read(OpKernelConstruction* ctx) {
  TFMEM_RETURN_IF_ERROR(DynamicNet::Read(ctx));
  std::string mode;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("mode", &mode));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("state_type", &state_type));
  forward = mode != "backward";
  backward = mode == "backward" || mode == "forward_backward";
  keeps = mode == "training";
  const int64_t types = spec.types.size();
  if (state_type < -1 || state_type >= types) {
    return absl::InvalidArgumentError(
        absl::StrCat("state_type is ", state_type, "; expected -1 to ", types - 1));
  }
  int64_t sparse = 0;
  for (const DynamicParameter& parameter : spec.parameters) sparse += parameter.sparse;
  const int64_t states = state_type < 0 ? 0 : spec.types[state_type].size();
  const int64_t dense = spec.parameters.size() - sparse;
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Nk", forward ? 0 : 1));
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Ng", backward && !forward ? states : 0));
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Ns", forward ? states : 0));
  TFMEM_RETURN_IF_ERROR(CheckList(ctx, "Nd", backward ? dense : 0));
  return CheckList(ctx, "Nr", backward ? sparse : 0);
}

absl::Status DynamicUpdate::Read(OpKernelConstruction* ctx) {
  TFMEM_RETURN_IF_ERROR(DynamicNet::Read(ctx));
  std::string name;
  VariableUse use;
  int64_t variables = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("rule", &name));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("T", &use.dtype));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("Nv", &variables));
  rule = name == "sgd" ? kSgd : name == "momentum" ? kMomentum : kAdam;
  use.read = use.assigned = true;
  const int64_t expected = spec.parameters.size() * rule;  // a rule's number is 1 + its slots
  uses.assign(expected, use);
  if (variables == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the op has ", variables, " variables; rule '", name, "' takes ", expected));
}

absl::StatusOr<std::vector<int64_t>> OutputWidths(const DynamicSpec& spec) {
  std::vector<int64_t> widths;
  for (const DynamicKind& kind : spec.kinds) {
    for (size_t i = 0; i < kind.outputs.size(); ++i) {
      if (i == widths.size()) widths.push_back(kind.outputs[i]);
      if (widths[i] == kind.outputs[i]) continue;
      return absl::InvalidArgumentError(absl::StrCat("output ", i, " of two kinds of nodes has ",
                                                     widths[i], " and ", kind.outputs[i],
                                                     " numbers"));
    }
  }
  return widths;
}

}  // namespace tfmem
