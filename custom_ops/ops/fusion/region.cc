#include "custom_ops/ops/fusion/region.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/text_reader.h"

namespace tfmem {
namespace {

using Kind = RegionStep::Kind;

constexpr absl::string_view kRegionFormat = "region 1";
constexpr absl::string_view kIndent = "  ";  // of a program's lines

std::string Show(const RegionType& type) {
  return absl::StrCat(NameOf(type.dtype), "[", absl::StrJoin(type.shape, ","), "]");
}

bool MayBeEqual(const RegionType& a, const RegionType& b) {
  if (a.dtype != b.dtype || a.shape.size() != b.shape.size()) return false;
  for (size_t i = 0; i < a.shape.size(); ++i) {
    if (a.shape[i] >= 0 && b.shape[i] >= 0 && a.shape[i] != b.shape[i]) return false;
  }
  return true;
}

// Reads a region line by line; each line is checked against what is known by then.
class RegionParser {
 public:
  explicit RegionParser(absl::string_view text) : in_("region", text) {}

  absl::StatusOr<Region> Parse() {
    if (ReadLines()) return std::move(region_);
    return in_.failure();
  }

 private:
  bool ReadLines() {
    if (!in_.Format(kRegionFormat)) return false;
    while (in_.NextLine()) {
      if (outputs_seen_) return in_.Wrong("stands behind the outputs");
      if (!ReadLine() || !in_.End()) return false;
    }
    if (!outputs_seen_) return in_.Wrong("there is no line of outputs");
    return known_ == static_cast<int>(region_.values.size()) ||
           in_.Wrong("there are ", region_.values.size(), " values; inputs and steps give ",
                     known_);
  }

  bool ReadLine() {
    if (in_.TakeWord("input")) return ReadInput();
    if (in_.TakeWord("variable")) return ReadType(&region_.variables.emplace_back());
    if (in_.TakeWord("value")) return ReadType(&region_.values.emplace_back());
    if (in_.TakeWord("program")) return ReadProgram();
    if (in_.TakeWord("members")) return ReadMembers();
    if (in_.TakeWord("output")) {
      outputs_seen_ = true;
      return in_.Numbers(0, known_ - 1, &region_.outputs);
    }
    RegionStep step;
    if (!ReadStep(&step)) return false;
    known_ += step.outputs;
    region_.steps.push_back(std::move(step));
    return true;
  }

  bool ReadStep(RegionStep* step) {
    if (in_.TakeWord("kernel")) return ReadKernel(step);
    if (in_.TakeWord("call")) return ReadCall(step);
    if (in_.TakeWord("view")) return ReadView(step);
    if (in_.TakeWord("read")) return ReadRead(step);
    if (in_.TakeWord("assign")) return ReadAssign(step);
    return in_.Word(&word_) && in_.Expected("a type, a program, a step or outputs");
  }

  bool ReadInput() {
    if (static_cast<int>(region_.values.size()) != region_.inputs) {
      return in_.Wrong("stands behind a value");
    }
    known_ = ++region_.inputs;
    return ReadType(&region_.values.emplace_back());
  }

  bool ReadType(RegionType* type) {
    if (!region_.steps.empty()) return in_.Wrong("stands behind a step");
    if (!in_.Name("a dtype", ValueDType::kComplex128, &type->dtype)) return false;
    int64_t bytes = BytesOf(type->dtype);
    while (in_.NextWord()) {
      if (type->shape.size() == kMostRank) return in_.Expected("fewer dimensions");
      int64_t size = -1;
      if (!in_.TakeWord("?") && !in_.Number(0, std::numeric_limits<int64_t>::max(), &size)) {
        return false;
      }
      if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
        return in_.Wrong("has more bytes than 64 bits count");
      }
      type->shape.push_back(size);
    }
    return true;
  }

  bool ReadProgram() {
    if (!in_.End()) return false;
    in_.set_indent(kIndent);
    const bool read = ReadExpression(&in_, &region_.programs.emplace_back());
    in_.set_indent("");
    return read;
  }

  bool ReadMembers() {
    if (region_.steps.empty() || !region_.steps.back().members.empty()) {
      return in_.Wrong("has no step before it that needs members");
    }
    RegionStep& step = region_.steps.back();
    if (step.kind != Kind::kKernel && step.kind != Kind::kCall) {
      return in_.Wrong("stands behind a step without members");
    }
    while (in_.NextWord()) {
      if (!in_.Word(&word_)) return false;
      step.members.emplace_back(word_);
    }
    return true;
  }

  // program, inputs > outputs
  bool ReadKernel(RegionStep* step) {
    step->kind = Kind::kKernel;
    if (!in_.Below(region_.programs.size(), &step->program) || !ReadInputs(step) ||
        !ReadOutputs(step)) {
      return false;
    }
    const Expression& program = region_.programs[step->program];
    if (step->inputs.size() != program.tensors.size() ||
        step->outputs != static_cast<int>(program.outputs.size())) {
      return in_.Wrong("its program has ", program.tensors.size(), " tensors and ",
                       program.outputs.size(), " outputs");
    }
    for (size_t i = 0; i < program.tensors.size(); ++i) {
      const ExpressionTensor& tensor = program.tensors[i];
      const ValueDType dtype = tensor.state ? ValueDType::kUint64 : ValueDTypeOf(tensor.dtype);
      if (!CheckForm(step->inputs[i], dtype, tensor.rank)) return false;
    }
    for (size_t i = 0; i < program.outputs.size(); ++i) {
      const ExpressionOutput& output = program.outputs[i];
      const ValueDType dtype = ValueDTypeOf(program.nodes[output.node].dtype);
      if (!CheckForm(step->first_output + i, dtype, output.axes.size())) return false;
    }
    return true;
  }

  // op, attributes, variables, inputs > outputs
  bool ReadCall(RegionStep* step) {
    step->kind = Kind::kCall;
    if (!in_.Word(&word_)) return false;
    step->op = std::string(word_);
    if (!in_.TakeWord("-")) {
      if (!in_.Word(&word_)) return false;
      if (!absl::WebSafeBase64Unescape(word_, &step->attrs)) {
        return in_.Expected("attributes in web-safe base64");
      }
    }
    while (in_.NextWord() && in_.Take("v")) {
      if (!in_.Below(region_.variables.size(), &step->variables.emplace_back())) return false;
    }
    return ReadInputs(step) && ReadOutputs(step);
  }

  bool ReadView(RegionStep* step) {
    step->kind = Kind::kView;
    if (!ReadValue(step) || !in_.Key(">") || !ReadOutputs(step) || !GivesOne(*step)) return false;
    const RegionType& from = region_.values[step->inputs[0]];
    const RegionType& to = region_.values[step->first_output];
    if (from.dtype == to.dtype && std::count(to.shape.begin(), to.shape.end(), -1) <= 1) {
      return true;
    }
    return in_.Wrong("views ", Show(from), " as ", Show(to),
                     "; expected one dtype, and at most one size that is unknown");
  }

  // read VARIABLE > VALUE
  bool ReadRead(RegionStep* step) {
    step->kind = Kind::kRead;
    return ReadVariable(step) && in_.Key(">") && ReadOutputs(step) && GivesOne(*step) &&
           CheckAccess(step->variables[0], step->first_output);
  }

  // assign VARIABLE VALUE
  bool ReadAssign(RegionStep* step) {
    step->kind = Kind::kAssign;
    return ReadVariable(step) && ReadValue(step) &&
           CheckAccess(step->variables[0], step->inputs[0]);
  }

  bool CheckAccess(int variable, int value) {
    const RegionType& first = region_.variables[variable];
    const RegionType& second = region_.values[value];
    return MayBeEqual(first, second) ||
           in_.Wrong("the variable is ", Show(first), ", the value ", Show(second));
  }

  bool ReadVariable(RegionStep* step) {
    if (!in_.NextWord() || !in_.Take("v")) return in_.Expected("a variable, such as v0");
    return in_.Below(region_.variables.size(), &step->variables.emplace_back());
  }

  bool ReadValue(RegionStep* step) { return in_.Below(known_, &step->inputs.emplace_back()); }

  // Values that are known by now, up to the ">".
  bool ReadInputs(RegionStep* step) {
    while (!in_.TakeWord(">")) {
      if (!ReadValue(step)) return false;
    }
    return true;
  }

  // Behind the ">": the values that a step gives, which are the next ones.
  bool ReadOutputs(RegionStep* step) {
    step->first_output = known_;
    for (; in_.NextWord(); ++step->outputs) {
      int value = 0;
      if (!in_.Below(region_.values.size(), &value)) return false;
      const int next = known_ + step->outputs;
      if (value != next) {
        return in_.Wrong("gives value ", value, " of ", region_.values.size(), "; expected ", next,
                         ", since values are numbered in order");
      }
    }
    return true;
  }

  bool GivesOne(const RegionStep& step) { return step.outputs == 1 || in_.Expected("one value"); }

  bool CheckForm(int value, ValueDType dtype, int rank) {
    const RegionType& found = region_.values[value];
    if (found.dtype == dtype && static_cast<int>(found.shape.size()) == rank) return true;
    return in_.Wrong("value ", value, " is ", Show(found), "; its program has ", NameOf(dtype),
                     " of ", rank, " dimensions there");
  }

  TextReader in_;
  Region region_;
  int known_ = 0;  // values that inputs and steps have given
  bool outputs_seen_ = false;
  absl::string_view word_;  // the last that was read
};

}  // namespace

const char* NameOf(ValueDType dtype) {
  static constexpr const char* kNames[] = {
#define TFMEM_NAME(name, text, bytes) text,
      TFMEM_VALUE_DTYPES(TFMEM_NAME)
#undef TFMEM_NAME
  };
  return kNames[static_cast<int>(dtype)];
}

int BytesOf(ValueDType dtype) {
  static constexpr int kBytes[] = {
#define TFMEM_BYTES(name, text, bytes) bytes,
      TFMEM_VALUE_DTYPES(TFMEM_BYTES)
#undef TFMEM_BYTES
  };
  return kBytes[static_cast<int>(dtype)];
}

absl::StatusOr<Region> ParseRegion(absl::string_view text) { return RegionParser(text).Parse(); }

}  // namespace tfmem
