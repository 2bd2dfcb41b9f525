#include "custom_ops/ops/dynamic/spec.h"

#include <algorithm>
#include <utility>

#include "absl/strings/string_view.h"
#include "custom_ops/ops/cpu/costs.h"
#include "custom_ops/ops/text_reader.h"

namespace tfmem {
namespace {

constexpr absl::string_view kSpecFormat = "dynamic 1";
constexpr int64_t kMostWidth = 1 << 20;
constexpr int64_t kMostParts = 1 << 16;  // kinds, steps, places
constexpr int64_t kMostRows = int64_t{1} << 31;

struct StepInfo {
  absl::string_view name;
  bool target;
  int values;
  int numbers;
};

constexpr StepInfo kSteps[] = {
#define TFMEM_INFO(op, name, target, values, numbers) {name, target, values, numbers},
    TFMEM_DYNAMIC_STEPS(TFMEM_INFO)
#undef TFMEM_INFO
};

using Where = StepPlace::Where;

class SpecParser {
 public:
  explicit SpecParser(absl::string_view text) : in_("kinds of nodes", text) {}

  absl::StatusOr<DynamicSpec> Parse() {
    if (ReadSpec()) return std::move(spec_);
    return in_.failure();
  }

 private:
  template <typename Number>
  bool Numbers(int64_t least, int64_t most, std::vector<Number>* numbers) {
    return in_.Numbers(least, most, numbers, kMostParts);
  }
  // The next line, which begins with a word.
  template <typename Number>
  bool Line(absl::string_view word, int64_t least, int64_t most, std::vector<Number>* numbers) {
    in_.NextLine();
    return in_.Key(word) && Numbers(least, most, numbers);
  }

  // Parameters, then types, then kinds.
  bool ReadSpec() {
    if (!in_.Format(kSpecFormat)) return false;
    while (in_.NextLine()) {
      bool read = false;
      if (spec_.types.empty() && in_.TakeWord("parameter")) {
        read = ReadParameter();
      } else if (spec_.kinds.empty() && in_.TakeWord("type")) {
        read = Numbers(1, kMostWidth, &spec_.types.emplace_back());
      } else {
        read = in_.Key("kind") && ReadKind();
      }
      if (!read) return false;
    }
    return true;
  }

  bool ReadParameter() {
    std::vector<int64_t> numbers;
    if (!Numbers(0, kMostRows, &numbers)) return false;
    if (numbers.size() != 2 && numbers.size() != 3) {
      return in_.Expected("one dimension or two");
    }
    DynamicParameter parameter;
    parameter.matrix = numbers.size() == 3;
    parameter.sparse = numbers[0] != 0;
    parameter.rows = parameter.matrix ? numbers[1] : 1;
    parameter.columns = numbers.back();
    if (parameter.rows < 1 || parameter.columns < 1 || parameter.columns > kMostWidth ||
        (parameter.sparse && !parameter.matrix)) {
      return in_.Wrong("no shape of a parameter");
    }
    spec_.parameters.push_back(parameter);
    return true;
  }

  bool ReadKind() {
    kind_ = DynamicKind();
    const int64_t types = spec_.types.size();
    if (spec_.kinds.size() + 1 >= kMostParts) return in_.Wrong("too many kinds");
    if (!in_.Below(types, &kind_.type) || !in_.End() ||
        !Line("children", 0, types - 1, &kind_.children) ||
        !Line("arguments", 1, kMostRows, &kind_.arguments) ||
        !Line("outputs", 1, kMostWidth, &kind_.outputs) ||
        !Line("kept", 1, kMostWidth, &kind_.kept) ||
        !Line("scratch", 1, kMostWidth, &kind_.scratch) || !ReadConstants()) {
      return false;
    }
    states_.assign(spec_.types[kind_.type].size(), false);
    for (int child : kind_.children) kind_.puts.emplace_back(spec_.types[child].size());
    written_.assign(kind_.kept.size(), false);
    for (section_ = 0; section_ < kSections; ++section_) {
      if (!ReadSection()) return false;
    }
    for (bool put : states_) {
      if (!put) return in_.Wrong("a kind whose state is not computed");
    }
    spec_.kinds.push_back(std::move(kind_));
    return true;
  }

  bool ReadConstants() {
    in_.NextLine();
    if (!in_.Key("constants")) return false;
    while (in_.NextWord()) {
      double value = 0;
      if (!in_.Real(&value)) return false;
      kind_.constants.push_back(value);
    }
    return in_.End();
  }

  bool ReadSection() {
    int64_t count = 0;
    in_.NextLine();
    if (!in_.Key("section") || !in_.Number(0, kMostParts, &count) || !in_.End()) return false;
    scratch_written_.assign(kind_.scratch.size(), false);
    for (int64_t i = 0; i < count; ++i) {
      if (!ReadStep()) return false;
    }
    return true;
  }

  // k0, s0 or c0
  bool ReadPlace(StepPlace* place) {
    for (Where where : {Where::kKept, Where::kScratch, Where::kConstant}) {
      const char letter = static_cast<char>(where);
      if (!in_.NextWord() || !in_.Take(absl::string_view(&letter, 1))) continue;
      place->where = where;
      return in_.Below(where == Where::kKept      ? kind_.kept.size()
                       : where == Where::kScratch ? kind_.scratch.size()
                                                  : kind_.constants.size(),
                       &place->number);
    }
    return in_.Expected("a place, such as k0, s0 or c0");
  }

  int64_t WidthAt(const StepPlace& place) const {
    if (place.where == Where::kConstant) return 0;
    return (place.where == Where::kKept ? kind_.kept : kind_.scratch)[place.number];
  }

  // OP TARGET VALUE... | NUMBER...
  bool ReadStep() {
    DynamicStep step;
    StepInfo info{};
    in_.NextLine();
    if (!ReadOp(&step, &info)) return false;
    if (!(info.target ? ReadPlace(&step.target) : in_.Key("-"))) return false;
    while (!in_.TakeWord("|")) {
      StepPlace place;
      if (!ReadPlace(&place)) return false;
      const bool written =
          place.where == Where::kConstant ||
          (place.where == Where::kKept ? written_ : scratch_written_)[place.number];
      if (!written) return in_.Wrong("a place is read before it is written");
      step.values.push_back(place);
      step.widths.push_back(WidthAt(place));
    }
    if (!Numbers(0, kMostRows, &step.numbers)) return false;
    const int values = step.values.size();
    if ((info.values < 0 ? values < 1 : values != info.values) ||
        step.numbers.size() != static_cast<size_t>(info.numbers)) {
      return in_.Wrong("another number of values or numbers than the op takes");
    }
    if (info.target && step.target.where == Where::kConstant) {
      return in_.Wrong("a constant is no target");
    }
    step.width = info.target ? WidthAt(step.target) : std::max<int64_t>(step.widths[0], 1);
    if (!Check(step)) return false;
    if (info.target) {
      (step.target.where == Where::kKept ? written_ : scratch_written_)[step.target.number] = true;
    }
    if (!IsIn(step.op, section_)) return in_.Wrong("an op in a section that cannot run it");
    if (section_ == kGradients) spec_.parameters[step.numbers[0]].trained = true;
    step.work = Work(step);
    kind_.work[section_] += step.work;
    kind_.sections[section_].push_back(std::move(step));
    return true;
  }

  bool ReadOp(DynamicStep* step, StepInfo* info) {
    absl::string_view name;
    if (!in_.Word(&name)) return false;
    for (size_t i = 0; i < std::size(kSteps); ++i) {
      if (kSteps[i].name == name) {
        step->op = static_cast<StepOp>(i);
        *info = kSteps[i];
        return true;
      }
    }
    const auto op = ElementwiseNamed(name);
    if (!op.has_value() || (InfoOf(*op).kinds & kFloats) == 0) return in_.Expected("an op");
    step->elementwise = *op;
    *info = {name, true, InfoOf(*op).arguments, 0};
    return true;
  }

  // Whether what the op reads is there, and what it puts is not yet read.
  static bool IsIn(StepOp op, int section) {
    switch (op) {
      case StepOp::kChild:
        return section != kBefore && section != kGradients;
      case StepOp::kPutState:
        return section == kBefore || section == kLevel;
      case StepOp::kPutLoss:
      case StepOp::kPutOutput:
        return section <= kAfter;
      case StepOp::kLossAdjoint:
        return section >= kBackBefore && section < kGradients;
      case StepOp::kAdjoint:
        return section == kBackLevel || section == kBackAfter;
      case StepOp::kPutChild:
        return section == kBackBefore || section == kBackLevel;
      case StepOp::kOuter:
      case StepOp::kColumnSum:
      case StepOp::kPutLookup:
        return section == kGradients;
      default:
        return section != kGradients;
    }
  }

  // About nanoseconds for a node.
  static double Work(const DynamicStep& step) {
    if (step.op == StepOp::kProduct || step.op == StepOp::kOuter) {
      return cpu_costs::kNodeMultiplicationNs * step.width *
             (step.op == StepOp::kOuter ? step.widths[1] : step.widths[0]);
    }
    const int cost = step.op == StepOp::kElementwise ? InfoOf(step.elementwise).work : 1;
    return cpu_costs::kNodeNumberNs * step.width * cost + cpu_costs::kNodeStepNs;
  }

  static bool Holds(int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count <= all && first <= all - count;
  }

  bool Check(const DynamicStep& step) {
    const std::vector<int64_t>& n = step.numbers;
    const int64_t width = step.width;
    const auto fits = [&](bool holds) {
      return holds || in_.Wrong("widths or numbers do not fit");
    };
    const auto parameter = [&](int64_t number) -> const DynamicParameter* {
      const int64_t count = spec_.parameters.size();
      return number < count ? &spec_.parameters[number] : nullptr;
    };
    const auto state = [&](int type, int64_t number) -> int64_t {
      const std::vector<int64_t>& widths = spec_.types[type];
      return number < static_cast<int64_t>(widths.size()) ? widths[number] : -1;
    };
    const int64_t children = kind_.children.size();
    for (size_t i = 0; i < step.values.size(); ++i) {
      const bool takes_constants = step.op == StepOp::kElementwise ||
                                   step.op == StepOp::kBroadcast || step.op == StepOp::kPutLoss;
      if (step.widths[i] == 0 && !takes_constants) return in_.Wrong("a constant is no such value");
    }
    switch (step.op) {
      case StepOp::kChild:
      case StepOp::kPutChild: {
        if (n[0] >= children || state(kind_.children[n[0]], n[1]) != width) return fits(false);
        if (step.op == StepOp::kChild) return true;
        if (kind_.puts[n[0]][n[1]]) return in_.Wrong("the adjoint of a child is put twice");
        kind_.puts[n[0]][n[1]] = true;
        return true;
      }
      case StepOp::kLookup:
      case StepOp::kPutLookup: {
        if (step.op == StepOp::kPutLookup && step.values[0].where != Where::kKept) {
          return fits(false);
        }
        const DynamicParameter* table = parameter(n[0]);
        const int64_t arguments = kind_.arguments.size();
        return fits(table != nullptr && n[1] < arguments && kind_.arguments[n[1]] <= table->rows &&
                    Holds(n[2], width, table->columns));
      }
      case StepOp::kRow:
      case StepOp::kColumnSum: {
        const DynamicParameter* row = parameter(n[0]);
        if (step.op == StepOp::kColumnSum && step.values[0].where != Where::kKept) {
          return fits(false);
        }
        return fits(row != nullptr && !row->matrix && Holds(n[1], width, row->columns));
      }
      case StepOp::kOneHot:
        return fits(n[0] < static_cast<int64_t>(kind_.arguments.size()));
      case StepOp::kProduct: {
        const DynamicParameter* matrix = parameter(n[0]);
        if (matrix == nullptr || step.values.size() > 2) return fits(false);
        const int64_t rows = n[3] != 0 ? width : step.widths[0];
        const int64_t columns = n[3] != 0 ? step.widths[0] : width;
        return fits(!matrix->sparse && matrix->matrix && Holds(n[1], rows, matrix->rows) &&
                    Holds(n[2], columns, matrix->columns) &&
                    (step.values.size() == 1 || step.widths[1] == width));
      }
      case StepOp::kOuter: {
        const DynamicParameter* matrix = parameter(n[0]);
        return fits(matrix != nullptr && !matrix->sparse && matrix->matrix &&
                    step.values[0].where == Where::kKept && step.values[1].where == Where::kKept &&
                    Holds(n[1], step.widths[0], matrix->rows) &&
                    Holds(n[2], step.widths[1], matrix->columns));
      }
      case StepOp::kBroadcast:
      case StepOp::kReduceSum:
      case StepOp::kReduceMax:
        return fits(step.op == StepOp::kBroadcast ? step.widths[0] <= 1 : width == 1);
      case StepOp::kConcat: {
        int64_t sum = 0;
        for (int64_t part : step.widths) sum += part;
        return fits(sum == width);
      }
      case StepOp::kSlice:
        return fits(Holds(n[0], width, step.widths[0]));
      case StepOp::kAdjoint:
        return fits(state(kind_.type, n[0]) == width);
      case StepOp::kPutState:
        if (state(kind_.type, n[0]) != width) return fits(false);
        states_[n[0]] = true;
        return true;
      case StepOp::kPutLoss:
        kind_.has_loss = true;
        return fits(width == 1);
      case StepOp::kLossAdjoint:
        return fits(width == 1);
      case StepOp::kPutOutput:
        return fits(n[0] < static_cast<int64_t>(kind_.outputs.size()) &&
                    kind_.outputs[n[0]] == width);
      case StepOp::kElementwise:
        for (int64_t value : step.widths) {
          if (value != 0 && value != width) return fits(false);
        }
        return true;
      default:
        return true;
    }
  }

  TextReader in_;
  int section_ = 0;
  DynamicSpec spec_;
  DynamicKind kind_;
  std::vector<bool> written_;
  std::vector<bool> scratch_written_;
  std::vector<bool> states_;
};

}  // namespace

absl::StatusOr<DynamicSpec> ParseDynamicSpec(absl::string_view text) {
  return SpecParser(text).Parse();
}

}  // namespace tfmem
