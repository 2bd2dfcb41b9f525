#include "custom_ops/ops/dynamic/spec.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

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

using Words = std::vector<absl::string_view>;
using Where = StepPlace::Where;

class Parser {
 public:
  explicit Parser(absl::string_view text) : lines_(absl::StrSplit(text, '\n')) {}

  absl::StatusOr<DynamicSpec> Parse() {
    const absl::Status status = Spec();
    if (status.ok()) return std::move(spec_);
    const size_t line = next_ == 0 ? 0 : next_ - 1;
    return absl::InvalidArgumentError(absl::StrCat("line ", next_, " of the kinds of nodes, '",
                                                   line < lines_.size() ? lines_[line] : "",
                                                   "': ", status.message()));
  }

 private:
  static absl::Status Wrong(absl::string_view what) { return absl::InvalidArgumentError(what); }

  // The words of the next line, without the first, which is `word`.
  absl::Status Next(absl::string_view word, Words* words) {
    if (next_ >= lines_.size()) return Wrong("the text ends too early");
    *words = absl::StrSplit(lines_[next_++], ' ', absl::SkipEmpty());
    if (words->empty() || words->front() != word) return Wrong(absl::StrCat("expected ", word));
    words->erase(words->begin());
    return absl::OkStatus();
  }

  bool Begins(absl::string_view word) const {
    const absl::string_view line = next_ < lines_.size() ? lines_[next_] : "";
    return absl::StartsWith(line, word) && (line.size() == word.size() || line[word.size()] == ' ');
  }

  template <typename Number>
  absl::Status Numbers(const Words& words, int64_t least, int64_t most,
                       std::vector<Number>* numbers) {
    if (words.size() > kMostParts) return Wrong("too many words");
    for (absl::string_view word : words) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(word, &number) || number < least || number > most) {
        return Wrong(absl::StrCat("'", word, "' is no number from ", least, " to ", most));
      }
      numbers->push_back(static_cast<Number>(number));
    }
    return absl::OkStatus();
  }

  absl::Status Spec() {
    Words words;
    TFMEM_RETURN_IF_ERROR(Next("dynamic", &words));
    if (words != Words{"1"}) return Wrong("expected version 1");
    while (Begins("parameter")) TFMEM_RETURN_IF_ERROR(Parameter());
    while (Begins("type")) {
      TFMEM_RETURN_IF_ERROR(Next("type", &words));
      spec_.types.emplace_back();
      TFMEM_RETURN_IF_ERROR(Numbers(words, 1, kMostWidth, &spec_.types.back()));
    }
    while (Begins("kind")) TFMEM_RETURN_IF_ERROR(Kind());
    if (spec_.kinds.size() >= kMostParts) return Wrong("too many kinds");
    while (next_ < lines_.size() && lines_[next_].empty()) ++next_;
    if (next_ == lines_.size()) return absl::OkStatus();
    ++next_;
    return Wrong("expected parameters, then types, then kinds");
  }

  absl::Status Parameter() {
    Words words;
    TFMEM_RETURN_IF_ERROR(Next("parameter", &words));
    std::vector<int64_t> numbers;
    TFMEM_RETURN_IF_ERROR(Numbers(words, 0, kMostRows, &numbers));
    if (numbers.size() != 2 && numbers.size() != 3) return Wrong("expected one dimension or two");
    DynamicParameter parameter;
    parameter.matrix = numbers.size() == 3;
    parameter.sparse = numbers[0] != 0;
    parameter.rows = parameter.matrix ? numbers[1] : 1;
    parameter.columns = numbers.back();
    if (parameter.rows < 1 || parameter.columns < 1 || parameter.columns > kMostWidth ||
        (parameter.sparse && !parameter.matrix)) {
      return Wrong("no shape of a parameter");
    }
    spec_.parameters.push_back(parameter);
    return absl::OkStatus();
  }

  absl::Status Kind() {
    Words words;
    kind_ = DynamicKind();
    written_.clear();
    std::vector<int> type;
    const int64_t types = spec_.types.size();
    TFMEM_RETURN_IF_ERROR(Next("kind", &words));
    TFMEM_RETURN_IF_ERROR(Numbers(words, 0, types - 1, &type));
    if (type.size() != 1) return Wrong("expected one type");
    kind_.type = type[0];
    states_.assign(spec_.types[kind_.type].size(), false);
    TFMEM_RETURN_IF_ERROR(Next("children", &words));
    TFMEM_RETURN_IF_ERROR(Numbers(words, 0, types - 1, &kind_.children));
    for (int child : kind_.children) kind_.puts.emplace_back(spec_.types[child].size());
    TFMEM_RETURN_IF_ERROR(Next("arguments", &words));
    TFMEM_RETURN_IF_ERROR(Numbers(words, 1, kMostRows, &kind_.arguments));
    TFMEM_RETURN_IF_ERROR(Next("outputs", &words));
    TFMEM_RETURN_IF_ERROR(Numbers(words, 1, kMostWidth, &kind_.outputs));
    TFMEM_RETURN_IF_ERROR(Next("kept", &words));
    TFMEM_RETURN_IF_ERROR(Numbers(words, 1, kMostWidth, &kind_.kept));
    TFMEM_RETURN_IF_ERROR(Next("scratch", &words));
    TFMEM_RETURN_IF_ERROR(Numbers(words, 1, kMostWidth, &kind_.scratch));
    TFMEM_RETURN_IF_ERROR(Next("constants", &words));
    for (absl::string_view word : words) {
      double value = 0;
      if (!absl::SimpleAtod(word, &value)) return Wrong(absl::StrCat("'", word, "' is no number"));
      kind_.constants.push_back(static_cast<float>(value));
    }
    written_.assign(kind_.kept.size(), false);
    for (section_ = 0; section_ < kSections; ++section_) {
      TFMEM_RETURN_IF_ERROR(Next("section", &words));
      std::vector<int64_t> count;
      TFMEM_RETURN_IF_ERROR(Numbers(words, 0, kMostParts, &count));
      if (count.size() != 1) return Wrong("expected one number");
      scratch_written_.assign(kind_.scratch.size(), false);
      for (int64_t i = 0; i < count[0]; ++i) TFMEM_RETURN_IF_ERROR(Step());
    }
    for (bool put : states_) {
      if (!put) return Wrong("a kind whose state is not computed");
    }
    spec_.kinds.push_back(std::move(kind_));
    return absl::OkStatus();
  }

  absl::StatusOr<StepPlace> Place(absl::string_view word) const {
    StepPlace place;
    int64_t number = 0;
    const bool ok = word.size() > 1 && absl::SimpleAtoi(word.substr(1), &number);
    place.where = static_cast<Where>(word[0]);
    const int64_t count = place.where == Where::kKept       ? kind_.kept.size()
                          : place.where == Where::kScratch  ? kind_.scratch.size()
                          : place.where == Where::kConstant ? kind_.constants.size()
                                                            : 0;
    if (!ok || number < 0 || number >= count) return Wrong(absl::StrCat("no place '", word, "'"));
    place.number = static_cast<int>(number);
    return place;
  }

  int64_t WidthAt(const StepPlace& place) const {
    if (place.where == Where::kConstant) return 0;
    return (place.where == Where::kKept ? kind_.kept : kind_.scratch)[place.number];
  }

  absl::Status Step() {
    if (next_ >= lines_.size()) return Wrong("the text ends too early");
    const Words words = absl::StrSplit(lines_[next_++], ' ', absl::SkipEmpty());
    if (words.size() < 3) return Wrong("expected an op, a target, values and numbers");
    DynamicStep step;
    StepInfo info{};
    TFMEM_RETURN_IF_ERROR(Op(words[0], &step, &info));
    size_t at = 2;
    for (; at < words.size() && words[at] != "|"; ++at) {
      TFMEM_ASSIGN_OR_RETURN(const StepPlace place, Place(words[at]));
      const bool written =
          place.where == Where::kConstant ||
          (place.where == Where::kKept ? written_ : scratch_written_)[place.number];
      if (!written) return Wrong(absl::StrCat(words[at], " is read before it is written"));
      step.values.push_back(place);
      step.widths.push_back(WidthAt(place));
    }
    if (at == words.size()) return Wrong("expected '|' behind the values");
    TFMEM_RETURN_IF_ERROR(
        Numbers(Words(words.begin() + at + 1, words.end()), 0, kMostRows, &step.numbers));
    const int values = step.values.size();
    if ((info.values < 0 ? values < 1 : values != info.values) ||
        step.numbers.size() != static_cast<size_t>(info.numbers)) {
      return Wrong("another number of values or numbers than the op takes");
    }
    if (info.target) {
      TFMEM_ASSIGN_OR_RETURN(step.target, Place(words[1]));
      if (step.target.where == Where::kConstant) return Wrong("a constant is no target");
      step.width = WidthAt(step.target);
    } else if (words[1] != "-") {
      return Wrong("an op without a value has a target");
    } else {
      step.width = step.widths[0] == 0 ? 1 : step.widths[0];
    }
    TFMEM_RETURN_IF_ERROR(Check(step));
    if (info.target) {
      (step.target.where == Where::kKept ? written_ : scratch_written_)[step.target.number] = true;
    }
    if (!IsIn(step.op, section_)) return Wrong("an op in a section that cannot run it");
    if (section_ == kGradients) spec_.parameters[step.numbers[0]].trained = true;
    step.work = Work(step);
    kind_.work[section_] += step.work;
    kind_.sections[section_].push_back(std::move(step));
    return absl::OkStatus();
  }

  absl::Status Op(absl::string_view name, DynamicStep* step, StepInfo* info) {
    for (size_t i = 0; i < std::size(kSteps); ++i) {
      if (kSteps[i].name == name) {
        step->op = static_cast<StepOp>(i);
        *info = kSteps[i];
        return absl::OkStatus();
      }
    }
    const auto op = ElementwiseNamed(name);
    if (!op.has_value() || (InfoOf(*op).kinds & kFloats) == 0) return Wrong("an unknown op");
    step->elementwise = *op;
    *info = {name, true, InfoOf(*op).arguments, 0};
    return absl::OkStatus();
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
      return 0.05 * step.width * (step.op == StepOp::kOuter ? step.widths[1] : step.widths[0]);
    }
    const int cost = step.op == StepOp::kElementwise ? InfoOf(step.elementwise).work : 1;
    return 0.1 * step.width * cost + 2;
  }

  static bool Holds(int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count <= all && first <= all - count;
  }

  absl::Status Check(const DynamicStep& step) {
    const std::vector<int64_t>& n = step.numbers;
    const int64_t width = step.width;
    const auto fits = [](bool holds) {
      return holds ? absl::OkStatus() : Wrong("widths or numbers do not fit");
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
      if (step.widths[i] == 0 && !takes_constants) return Wrong("a constant is no such value");
    }
    switch (step.op) {
      case StepOp::kChild:
      case StepOp::kPutChild: {
        if (n[0] >= children || state(kind_.children[n[0]], n[1]) != width) return fits(false);
        if (step.op == StepOp::kChild) return absl::OkStatus();
        if (kind_.puts[n[0]][n[1]]) return Wrong("the adjoint of a child is put twice");
        kind_.puts[n[0]][n[1]] = true;
        return absl::OkStatus();
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
        return absl::OkStatus();
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
        return absl::OkStatus();
      default:
        return absl::OkStatus();
    }
  }

  const Words lines_;
  size_t next_ = 0;
  int section_ = 0;
  DynamicSpec spec_;
  DynamicKind kind_;
  std::vector<bool> written_;
  std::vector<bool> scratch_written_;
  std::vector<bool> states_;
};

}  // namespace

absl::StatusOr<DynamicSpec> ParseDynamicSpec(absl::string_view text) {
  return Parser(text).Parse();
}

}  // namespace tfmem
