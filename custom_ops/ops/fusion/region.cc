#include "custom_ops/ops/fusion/region.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using Kind = RegionStep::Kind;
using Words = std::vector<absl::string_view>;

constexpr absl::string_view kFormat = "region 1";
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
class Parser {
 public:
  absl::StatusOr<Region> Parse(absl::string_view text) {
    const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
    if (lines.front() != kFormat) {
      return Wrong("expected '", kFormat, "' on the first line, found '",
                   lines.front().substr(0, 40),
                   "'; this op library and the region's writer differ in version");
    }
    for (size_t i = 1; i < lines.size(); ++i) {
      line_ = lines[i].substr(0, 120);
      if (absl::ConsumePrefix(&line_, kIndent)) {
        if (!in_program_) return Wrong("'", line_, "' is no line of a program");
        absl::StrAppend(&program_, lines[i].substr(kIndent.size()), "\n");
        continue;
      }
      TFMEM_RETURN_IF_ERROR(EndProgram());
      const Words words = absl::StrSplit(lines[i], ' ', absl::SkipEmpty());
      if (!words.empty())
        TFMEM_RETURN_IF_ERROR(ParseLine(words[0], {words.begin() + 1, words.end()}));
    }
    TFMEM_RETURN_IF_ERROR(EndProgram());
    if (!outputs_seen_) return Wrong("there is no line of outputs");
    if (known_ != static_cast<int>(region_.values.size())) {
      return Wrong("there are ", region_.values.size(), " values; inputs and steps give ", known_);
    }
    return std::move(region_);
  }

 private:
  template <typename... Parts>
  static absl::Status Wrong(Parts... parts) {
    return absl::InvalidArgumentError(absl::StrCat("region: ", parts...));
  }
  absl::Status Unreadable() const { return Wrong("cannot read the line '", line_, "'"); }

  absl::Status ParseLine(absl::string_view word, const Words& rest) {
    if (outputs_seen_) return Wrong("'", line_, "' stands behind the outputs");
    if (word == "input" || word == "variable" || word == "value") return ParseType(word, rest);
    if (word == "program") {
      in_program_ = rest.empty();
      return in_program_ ? absl::OkStatus() : Unreadable();
    }
    if (word == "members") return ParseMembers(rest);
    if (word == "output") {
      outputs_seen_ = true;
      return ReadValues(rest, &region_.outputs) ? absl::OkStatus() : Unreadable();
    }
    RegionStep step;
    if (word == "kernel") {
      TFMEM_RETURN_IF_ERROR(ParseKernel(rest, &step));
    } else if (word == "call") {
      TFMEM_RETURN_IF_ERROR(ParseCall(rest, &step));
    } else if (word == "view") {
      TFMEM_RETURN_IF_ERROR(ParseView(rest, &step));
    } else if (word == "read" || word == "assign") {
      TFMEM_RETURN_IF_ERROR(ParseAccess(word, rest, &step));
    } else {
      return Unreadable();
    }
    region_.steps.push_back(std::move(step));
    return absl::OkStatus();
  }

  absl::Status ParseType(absl::string_view word, const Words& rest) {
    RegionType type;
    if (!region_.steps.empty() || rest.empty() || rest.size() > 1 + kMostRank ||
        !ReadDType(rest[0], &type.dtype)) {
      return Unreadable();
    }
    int64_t bytes = BytesOf(type.dtype);
    for (size_t i = 1; i < rest.size(); ++i) {
      int64_t size = -1;
      if (rest[i] != "?" && !(absl::SimpleAtoi(rest[i], &size) && size >= 0)) return Unreadable();
      if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
        return Wrong("'", line_, "' has more bytes than 64 bits count");
      }
      type.shape.push_back(size);
    }
    if (word == "variable") {
      region_.variables.push_back(std::move(type));
      return absl::OkStatus();
    }
    if (word == "input") {
      if (static_cast<int>(region_.values.size()) != region_.inputs) {
        return Wrong("'", line_, "' stands behind a value");
      }
      known_ = ++region_.inputs;
    }
    region_.values.push_back(std::move(type));
    return absl::OkStatus();
  }

  absl::Status EndProgram() {
    if (!std::exchange(in_program_, false)) return absl::OkStatus();
    absl::StatusOr<Expression> program = ParseExpression(program_);
    program_.clear();
    if (!program.ok()) {
      return absl::Status(program.status().code(),
                          absl::StrCat("region: program ", region_.programs.size(), ": ",
                                       program.status().message()));
    }
    region_.programs.push_back(*std::move(program));
    return absl::OkStatus();
  }

  absl::Status ParseMembers(const Words& rest) {
    if (region_.steps.empty() || !region_.steps.back().members.empty()) return Unreadable();
    RegionStep& step = region_.steps.back();
    if (step.kind != Kind::kKernel && step.kind != Kind::kCall) return Unreadable();
    step.members.assign(rest.begin(), rest.end());
    return absl::OkStatus();
  }

  // program, inputs > outputs
  absl::Status ParseKernel(const Words& rest, RegionStep* step) {
    step->kind = Kind::kKernel;
    Words before;
    TFMEM_RETURN_IF_ERROR(ParseOutputs(rest, &before, step));
    if (before.empty() || !ReadBelow(before[0], region_.programs.size(), &step->program) ||
        !ReadValues({before.begin() + 1, before.end()}, &step->inputs)) {
      return Unreadable();
    }
    const Expression& program = region_.programs[step->program];
    if (step->inputs.size() != program.tensors.size() ||
        step->outputs != static_cast<int>(program.outputs.size())) {
      return Wrong("'", line_, "': its program has ", program.tensors.size(), " tensors and ",
                   program.outputs.size(), " outputs");
    }
    for (size_t i = 0; i < program.tensors.size(); ++i) {
      const ExpressionTensor& tensor = program.tensors[i];
      const ValueDType dtype = tensor.state ? ValueDType::kUint64 : ValueDTypeOf(tensor.dtype);
      TFMEM_RETURN_IF_ERROR(CheckForm(step->inputs[i], dtype, tensor.rank));
    }
    for (size_t i = 0; i < program.outputs.size(); ++i) {
      const ExpressionOutput& output = program.outputs[i];
      const ValueDType dtype = ValueDTypeOf(program.nodes[output.node].dtype);
      TFMEM_RETURN_IF_ERROR(CheckForm(step->first_output + i, dtype, output.axes.size()));
    }
    return GiveOutputs(*step);
  }

  // op, attributes, variables, inputs > outputs
  absl::Status ParseCall(const Words& rest, RegionStep* step) {
    step->kind = Kind::kCall;
    Words before;
    TFMEM_RETURN_IF_ERROR(ParseOutputs(rest, &before, step));
    if (before.size() < 2) return Unreadable();
    step->op = std::string(before[0]);
    if (before[1] != "-" && !absl::WebSafeBase64Unescape(before[1], &step->attrs)) {
      return Unreadable();
    }
    size_t place = 2;
    for (; place < before.size() && absl::StartsWith(before[place], "v"); ++place) {
      step->variables.emplace_back();
      if (!ReadVariable(before[place], &step->variables.back())) return Unreadable();
    }
    if (!ReadValues({before.begin() + place, before.end()}, &step->inputs)) return Unreadable();
    return GiveOutputs(*step);
  }

  absl::Status ParseView(const Words& rest, RegionStep* step) {
    step->kind = Kind::kView;
    Words before;
    TFMEM_RETURN_IF_ERROR(ParseOutputs(rest, &before, step));
    if (before.size() != 1 || step->outputs != 1 || !ReadValues(before, &step->inputs)) {
      return Unreadable();
    }
    const RegionType& from = region_.values[step->inputs[0]];
    const RegionType& to = region_.values[step->first_output];
    if (from.dtype != to.dtype || std::count(to.shape.begin(), to.shape.end(), -1) > 1) {
      return Wrong("'", line_, "' views ", Show(from), " as ", Show(to),
                   "; expected one dtype, and at most one size that is unknown");
    }
    return GiveOutputs(*step);
  }

  // read VARIABLE > VALUE, assign VARIABLE VALUE
  absl::Status ParseAccess(absl::string_view word, const Words& rest, RegionStep* step) {
    Words before = rest;
    step->kind = word == "read" ? Kind::kRead : Kind::kAssign;
    step->variables.resize(1);
    if (word == "read") {
      TFMEM_RETURN_IF_ERROR(ParseOutputs(rest, &before, step));
      if (before.size() != 1 || step->outputs != 1) return Unreadable();
    } else if (before.size() != 2 || !ReadValues({before[1]}, &step->inputs)) {
      return Unreadable();
    }
    if (!ReadVariable(before[0], &step->variables[0])) return Unreadable();
    const int value = word == "read" ? step->first_output : step->inputs[0];
    const RegionType& variable = region_.variables[step->variables[0]];
    if (!MayBeEqual(variable, region_.values[value])) {
      return Wrong("'", line_, "': the variable is ", Show(variable), ", the value ",
                   Show(region_.values[value]));
    }
    return GiveOutputs(*step);
  }

  // What stands before the ">", and the values behind it, which are the next ones.
  absl::Status ParseOutputs(const Words& rest, Words* before, RegionStep* step) {
    const auto arrow = std::find(rest.begin(), rest.end(), ">");
    if (arrow == rest.end()) return Unreadable();
    before->assign(rest.begin(), arrow);
    step->first_output = known_;
    step->outputs = rest.end() - arrow - 1;
    for (int i = 0; i < step->outputs; ++i) {
      int value = 0;
      if (!ReadBelow(arrow[i + 1], region_.values.size(), &value) || value != known_ + i) {
        return Wrong("'", line_, "' gives value '", arrow[i + 1].substr(0, 20), "' of ",
                     region_.values.size(), "; expected ", known_ + i,
                     ", since values are numbered in order");
      }
    }
    return absl::OkStatus();
  }

  absl::Status GiveOutputs(const RegionStep& step) {
    known_ += step.outputs;
    return absl::OkStatus();
  }

  absl::Status CheckForm(int value, ValueDType dtype, int rank) const {
    const RegionType& found = region_.values[value];
    if (found.dtype == dtype && static_cast<int>(found.shape.size()) == rank) {
      return absl::OkStatus();
    }
    return Wrong("'", line_, "': value ", value, " is ", Show(found), "; its program has ",
                 NameOf(dtype), " of ", rank, " dimensions there");
  }

  static bool ReadDType(absl::string_view word, ValueDType* dtype) {
    for (int i = 0; i <= static_cast<int>(ValueDType::kComplex128); ++i) {
      *dtype = static_cast<ValueDType>(i);
      if (word == NameOf(*dtype)) return true;
    }
    return false;
  }
  static bool ReadBelow(absl::string_view word, size_t end, int* number) {
    return absl::SimpleAtoi(word, number) && *number >= 0 && static_cast<size_t>(*number) < end;
  }
  // Values that are known by now.
  bool ReadValues(const Words& words, std::vector<int>* values) const {
    for (absl::string_view word : words) {
      values->emplace_back();
      if (!ReadBelow(word, known_, &values->back())) return false;
    }
    return true;
  }
  bool ReadVariable(absl::string_view word, int* variable) const {
    return absl::ConsumePrefix(&word, "v") && ReadBelow(word, region_.variables.size(), variable);
  }

  Region region_;
  int known_ = 0;  // values that inputs and steps have given
  bool in_program_ = false;
  std::string program_;
  bool outputs_seen_ = false;
  absl::string_view line_;  // for messages
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

absl::StatusOr<Region> ParseRegion(absl::string_view text) { return Parser().Parse(text); }

}  // namespace tfmem
