// Shapes of what the ops give, while a graph is built: widths are the spec's, numbers of nodes are
// not known.
#include <string>
#include <vector>

#include "custom_ops/ops/dynamic/execute.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

namespace {

absl::Status SetList(InferenceContext* c, absl::string_view name, std::vector<ShapeHandle> shapes) {
  std::vector<ShapeHandle> declared;
  TFMEM_RETURN_IF_ERROR(c->output(name, &declared));
  shapes.resize(declared.size(), c->UnknownShape());
  return c->set_output(name, shapes);
}

std::vector<ShapeHandle> Rows(InferenceContext* c, const std::vector<int64_t>& widths) {
  std::vector<ShapeHandle> shapes;
  for (int64_t width : widths) {
    shapes.push_back(c->Matrix(c->UnknownDim(), c->MakeDim(width)));
  }
  return shapes;
}

absl::StatusOr<DynamicSpec> SetLosses(InferenceContext* c) {
  std::string text;
  TFMEM_RETURN_IF_ERROR(c->GetAttr("spec", &text));
  TFMEM_ASSIGN_OR_RETURN(DynamicSpec spec, ParseDynamicSpec(text));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<int64_t> widths, OutputWidths(spec));
  TFMEM_RETURN_IF_ERROR(c->set_output("losses", {c->Vector(c->UnknownDim())}));
  TFMEM_RETURN_IF_ERROR(SetList(c, "outputs", Rows(c, widths)));
  return spec;
}

}  // namespace

absl::Status DynamicShape(InferenceContext* c) {
  TFMEM_ASSIGN_OR_RETURN(const DynamicSpec spec, SetLosses(c));
  int64_t type = -1;
  TFMEM_RETURN_IF_ERROR(c->GetAttr("state_type", &type));
  const bool has_states = type >= 0 && type < static_cast<int64_t>(spec.types.size());
  TFMEM_RETURN_IF_ERROR(
      SetList(c, "states", has_states ? Rows(c, spec.types[type]) : std::vector<ShapeHandle>()));
  std::vector<ShapeHandle> gradients, rows;
  std::vector<int64_t> widths;
  for (const DynamicParameter& parameter : spec.parameters) {
    if (parameter.sparse) {
      widths.push_back(parameter.columns);
      rows.push_back(c->Vector(c->UnknownDim()));
    } else if (parameter.matrix) {
      gradients.push_back(c->Matrix(parameter.rows, parameter.columns));
    } else {
      gradients.push_back(c->Vector(parameter.columns));
    }
  }
  TFMEM_RETURN_IF_ERROR(c->set_output("keep", {c->Vector(c->UnknownDim())}));
  TFMEM_RETURN_IF_ERROR(SetList(c, "gradients", gradients));
  TFMEM_RETURN_IF_ERROR(SetList(c, "rows", rows));
  return SetList(c, "row_gradients", Rows(c, widths));
}

absl::Status DynamicStepShape(InferenceContext* c) {
  std::vector<ShapeHandle> numbers;
  TFMEM_RETURN_IF_ERROR(SetLosses(c).status());
  TFMEM_RETURN_IF_ERROR(c->input("number", &numbers));
  return c->set_output("done", numbers);
}

}  // namespace tfmem
