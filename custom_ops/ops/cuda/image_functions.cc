#include "custom_ops/ops/cuda/image_functions.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/node_def_util.h"

namespace tfmem {
namespace {

using ::tensorflow::FunctionDef;
using ::tensorflow::NameAttrList;
using ::tensorflow::NodeDef;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::Tensor;

// The string that the one constant of a function holds; false if there is none.
bool ReadCode(const FunctionDef& function, std::string* code) {
  for (const NodeDef& node : function.node_def()) {
    Tensor value;
    if (node.op() != "Const" || !GetNodeAttr(node, "value", &value).ok()) continue;
    if (value.dtype() != tensorflow::DT_STRING || value.NumElements() != 1) continue;
    const auto& text = value.flat<tensorflow::tstring>()(0);
    code->assign(text.data(), text.size());
    return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::vector<ProgramText>> ReadPrograms(OpKernelConstruction* ctx) {
  std::vector<std::string> headers;
  std::vector<NameAttrList> functions;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("programs", &headers));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("images", &functions));
  const auto wrong = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", ctx->def().name(), "' (", ctx->def().op(), ") ", what,
                     ": give the graph with its function library, as tfmem.optimize made it, or ",
                     "run tfmem.optimize again"));
  };
  if (functions.size() != headers.size()) {
    return wrong(absl::StrCat("has ", headers.size(), " GPU programs, but attr images names ",
                              functions.size(), " functions"));
  }
  const auto* runtime = ctx->function_library();
  const auto* library = runtime == nullptr ? nullptr : runtime->GetFunctionLibraryDefinition();
  std::vector<ProgramText> programs;
  for (size_t i = 0; i < headers.size(); ++i) {
    ProgramText& program = programs.emplace_back();
    program.header = std::move(headers[i]);
    const std::string& name = functions[i].name();
    const FunctionDef* function = library == nullptr ? nullptr : library->Find(name);
    if (function == nullptr) {
      return wrong(absl::StrCat("takes its GPU code from the function '", name,
                                "', which is not in the graph's library"));
    }
    if (!ReadCode(*function, &program.code)) {
      return wrong(
          absl::StrCat("takes its GPU code from the function '", name, "', which holds no string"));
    }
  }
  return programs;
}

}  // namespace tfmem
