#include "custom_ops/ops/cpu/expression.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using Kind = ExpressionNode::Kind;
using Words = std::vector<absl::string_view>;

constexpr absl::string_view kFormat = "program 1";
// Of numbers in an index: so that no sum or product of a few of them and a position wraps.
constexpr int64_t kMostFactor = int64_t{1} << 40;
constexpr int64_t kMostBound = int64_t{1} << 56;
constexpr size_t kMostTerms = 64;
constexpr absl::string_view kState = "uint64";  // the dtype of a random generator's key and counter

// Reads a program line by line; each line is checked against what is known by then.
class Parser {
 public:
  absl::StatusOr<Expression> Parse(absl::string_view text) {
    const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
    if (lines.front() != kFormat) {
      return Wrong("expected '", kFormat, "' on the first line, found '",
                   lines.front().substr(0, 40),
                   "'; this op library and the program's writer differ in version");
    }
    for (size_t i = 1; i < lines.size(); ++i) {
      line_ = lines[i].substr(0, 80);
      const Words words = absl::StrSplit(lines[i], ' ', absl::SkipEmpty());
      if (words.empty()) continue;
      TFMEM_RETURN_IF_ERROR(ParseLine(words));
    }
    if (!axes_seen_) return Wrong("there is no line of axes");
    return std::move(expression_);
  }

 private:
  template <typename... Parts>
  static absl::Status Wrong(Parts... parts) {
    return absl::InvalidArgumentError(absl::StrCat("program: ", parts...));
  }
  absl::Status Unreadable() const { return Wrong("cannot read the line '", line_, "'"); }

  absl::Status ParseLine(const Words& words) {
    if (words[0] == "axes") return ParseAxes(words);
    if (!axes_seen_) return Wrong("'", line_, "' stands before the line of axes");
    if (words[0] == "tensor") return ParseTensor(words);
    if (words[0] == "output") return ParseOutput(words);
    ExpressionNode node;
    absl::Status status = Unreadable();
    if (words[0] == "input") {
      status = ParseInput(words, &node);
    } else if (words[0] == "constant") {
      status = ParseConstant(words, &node);
    } else if (words[0] == "position") {
      status = ParsePosition(words, &node);
    } else if (words[0] == "random") {
      status = ParseRandom(words, &node);
    } else if (words[0] == "cast") {
      status = ParseCast(words, &node);
    } else if (words[0] == "reduce") {
      status = ParseReduce(words, &node);
    } else if (const auto op = ElementwiseNamed(words[0])) {
      status = ParseApply(*op, words, &node);
    }
    if (status.ok()) expression_.nodes.push_back(std::move(node));
    return status;
  }

  absl::Status ParseAxes(const Words& words) {
    if (axes_seen_ || words.size() > 1 + kMostAxes) return Unreadable();
    axes_seen_ = true;
    for (size_t i = 1; i < words.size(); ++i) {
      int64_t size = 0;
      if (!absl::SimpleAtoi(words[i], &size) || size < 0) return Unreadable();
      expression_.axes.push_back(size);
    }
    return absl::OkStatus();
  }

  absl::Status ParseTensor(const Words& words) {
    ExpressionTensor tensor;
    if (words.size() != 3 || !ReadBelow(words[2], kMostAxes + 1, &tensor.rank)) return Unreadable();
    tensor.state = words[1] == kState;
    if (tensor.state) {
      tensor.dtype = DType::kInt64;
    } else if (!ReadName(words[1], DType::kBool, &tensor.dtype)) {
      return Unreadable();
    }
    expression_.tensors.push_back(tensor);
    return absl::OkStatus();
  }

  absl::Status ParseOutput(const Words& words) {
    ExpressionOutput output;
    if (words.size() < 2 || !ReadNode(words[1], &output.node)) return Unreadable();
    for (size_t i = 2; i < words.size(); ++i) {
      int axis = 0;
      if (!ReadAxis(words[i], &axis) || output.varies().Has(axis)) return Unreadable();
      output.axes.push_back(axis);
    }
    if (!output.varies().Covers(expression_.nodes[output.node].varies)) {
      return Wrong("'", line_, "' leaves out an axis that its node varies along");
    }
    expression_.outputs.push_back(std::move(output));
    return absl::OkStatus();
  }

  absl::Status ParseInput(const Words& words, ExpressionNode* node) {
    node->kind = Kind::kInput;
    if (words.size() < 2 || !ReadBelow(words[1], expression_.tensors.size(), &node->tensor)) {
      return Unreadable();
    }
    const ExpressionTensor& tensor = expression_.tensors[node->tensor];
    node->dtype = tensor.dtype;
    if (tensor.state) return Wrong("'", line_, "' reads the state of a random generator");
    if (static_cast<int>(words.size()) != 2 + tensor.rank) return Unreadable();
    for (size_t i = 2; i < words.size(); ++i) {
      Index index;
      for (absl::string_view text : absl::StrSplit(words[i], '+')) {
        if (index.terms.size() + index.nodes.size() == kMostTerms) return Unreadable();
        if (!text.empty() && text[0] == 'n') {
          index.nodes.emplace_back();
          if (!ReadNode(text.substr(1), &index.nodes.back())) return Unreadable();
          const ExpressionNode& value = expression_.nodes[index.nodes.back()];
          if (value.dtype != DType::kInt32 && value.dtype != DType::kInt64) {
            return Wrong("'", line_, "' gathers at values of ", NameOf(value.dtype),
                         "; expected integers");
          }
          node->varies |= value.varies;
          continue;
        }
        IndexTerm& term = index.terms.emplace_back();
        TFMEM_RETURN_IF_ERROR(ParseTerm(text, &term));
        if (term.axis >= 0) node->varies.Add(term.axis);
      }
      node->index.push_back(std::move(index));
    }
    return absl::OkStatus();
  }

  // random DTYPE KEY COUNTER INDEX
  absl::Status ParseRandom(const Words& words, ExpressionNode* node) const {
    node->kind = Kind::kRandom;
    const int tensors = expression_.tensors.size();
    if (words.size() != 5 || !ReadName(words[1], DType::kInt64, &node->dtype) ||
        !ReadBelow(words[2], tensors, &node->tensor) ||
        !ReadBelow(words[3], tensors, &node->counter)) {
      return Unreadable();
    }
    for (int tensor : {node->tensor, node->counter}) {
      if (expression_.tensors[tensor].state) continue;
      return Wrong("'", line_, "': tensor ", tensor, " is no state of a random generator");
    }
    Index& index = node->index.emplace_back();
    for (absl::string_view text : absl::StrSplit(words[4], '+')) {
      if (index.terms.size() == kMostTerms) return Unreadable();
      IndexTerm& term = index.terms.emplace_back();
      TFMEM_RETURN_IF_ERROR(ParseTerm(text, &term));
      if (term.axis >= 0) node->varies.Add(term.axis);
    }
    return absl::OkStatus();
  }

  // 3, a1, 2*a1, a1/4, 3*a1/4%2
  absl::Status ParseTerm(absl::string_view text, IndexTerm* term) const {
    const size_t star = text.find('*');
    term->factor = 1;
    if (star != absl::string_view::npos) {
      if (!ReadFactor(text.substr(0, star), &term->factor)) return Unreadable();
      text.remove_prefix(star + 1);
    }
    if (text.empty() || text[0] != 'a') {
      if (star != absl::string_view::npos || !ReadFactor(text, &term->factor)) return Unreadable();
      return absl::OkStatus();
    }
    text.remove_prefix(1);
    if (const size_t percent = text.find('%'); percent != absl::string_view::npos) {
      if (!ReadFactor(text.substr(percent + 1), &term->modulus) || term->modulus < 1) {
        return Unreadable();
      }
      text = text.substr(0, percent);
    }
    if (const size_t slash = text.find('/'); slash != absl::string_view::npos) {
      if (!ReadFactor(text.substr(slash + 1), &term->divisor) || term->divisor < 1) {
        return Unreadable();
      }
      text = text.substr(0, slash);
    }
    return ReadAxis(text, &term->axis) ? absl::OkStatus() : Unreadable();
  }

  absl::Status ParseConstant(const Words& words, ExpressionNode* node) const {
    node->kind = Kind::kConstant;
    if (words.size() != 3 || !ReadName(words[1], DType::kBool, &node->dtype)) return Unreadable();
    if (node->dtype == DType::kBool) {
      node->value = int64_t{words[2] == "True"};
      return words[2] == "True" || words[2] == "False" ? absl::OkStatus() : Unreadable();
    }
    if (node->dtype == DType::kInt32) return ReadInteger<int32_t>(words[2], &node->value);
    if (node->dtype == DType::kInt64) return ReadInteger<int64_t>(words[2], &node->value);
    double value = 0;
    if (!absl::SimpleAtod(words[2], &value)) return Unreadable();
    node->value = value;
    return absl::OkStatus();
  }

  template <typename Integer>
  absl::Status ReadInteger(absl::string_view word, ConstantValue* value) const {
    Integer found = 0;
    if (!absl::SimpleAtoi(word, &found)) {
      return Wrong("'", line_, "': expected an integer from ", std::numeric_limits<Integer>::min(),
                   " to ", std::numeric_limits<Integer>::max());
    }
    *value = int64_t{found};
    return absl::OkStatus();
  }

  absl::Status ParsePosition(const Words& words, ExpressionNode* node) const {
    node->kind = Kind::kPosition;
    if (words.size() != 3 || !ReadName(words[1], DType::kBool, &node->dtype) ||
        !ReadAxis(words[2], &node->axis)) {
      return Unreadable();
    }
    if (node->dtype != DType::kInt32 && node->dtype != DType::kInt64) return Unreadable();
    node->varies.Add(node->axis);
    return absl::OkStatus();
  }

  absl::Status ParseCast(const Words& words, ExpressionNode* node) const {
    node->kind = Kind::kCast;
    node->arguments.resize(1);
    if (words.size() != 3 || !ReadName(words[1], DType::kBool, &node->dtype) ||
        !ReadNode(words[2], &node->arguments[0])) {
      return Unreadable();
    }
    node->varies = expression_.nodes[node->arguments[0]].varies;
    return absl::OkStatus();
  }

  absl::Status ParseReduce(const Words& words, ExpressionNode* node) const {
    node->kind = Kind::kReduce;
    node->arguments.resize(1);
    // A `dot` is a sum here: rounding its factors is for GPUs.
    if (words.size() < 4) return Unreadable();
    const absl::string_view name = words[1] == "dot" ? "sum" : words[1];
    if (!ReadName(name, Reduction::kAll, &node->reduction) ||
        !ReadNode(words[2], &node->arguments[0])) {
      return Unreadable();
    }
    const ExpressionNode& reduced = expression_.nodes[node->arguments[0]];
    for (size_t i = 3; i < words.size(); ++i) {
      int axis = 0;
      if (!ReadAxis(words[i], &axis)) return Unreadable();
      node->axes.Add(axis);
    }
    if (!Takes(node->reduction, reduced.dtype)) {
      return Wrong("'", line_, "' reduces values of ", NameOf(reduced.dtype));
    }
    node->dtype = reduced.dtype;
    node->varies = reduced.varies - node->axes;
    return absl::OkStatus();
  }

  absl::Status ParseApply(Elementwise op, const Words& words, ExpressionNode* node) const {
    node->kind = Kind::kApply;
    node->op = op;
    const ElementwiseInfo& info = InfoOf(op);
    if (static_cast<int>(words.size()) != 1 + info.arguments) return Unreadable();
    node->arguments.resize(info.arguments);
    for (int i = 0; i < info.arguments; ++i) {
      if (!ReadNode(words[i + 1], &node->arguments[i])) return Unreadable();
      node->varies |= expression_.nodes[node->arguments[i]].varies;
    }
    const DType dtype = expression_.nodes[node->arguments.back()].dtype;
    bool fits = Takes(info, dtype);
    for (int i = 0; i < info.arguments; ++i) {
      const DType argument = expression_.nodes[node->arguments[i]].dtype;
      const bool condition = op == Elementwise::kSelect && i == 0;
      fits &= argument == (condition ? DType::kBool : dtype);
    }
    node->dtype = info.comparison ? DType::kBool : dtype;
    if (fits) return absl::OkStatus();
    return Wrong("'", line_, "': ", info.name, " does not take its arguments' dtypes");
  }

  // One of the values from 0 to `last`, by its name.
  template <typename Enum>
  static bool ReadName(absl::string_view word, Enum last, Enum* found) {
    for (int i = 0; i <= static_cast<int>(last); ++i) {
      *found = static_cast<Enum>(i);
      if (word == NameOf(*found)) return true;
    }
    return false;
  }

  static bool ReadBelow(absl::string_view word, int end, int* number) {
    return absl::SimpleAtoi(word, number) && *number >= 0 && *number < end;
  }
  bool ReadAxis(absl::string_view word, int* axis) const {
    return ReadBelow(word, expression_.axes.size(), axis);
  }
  bool ReadNode(absl::string_view word, int* node) const {
    return ReadBelow(word, expression_.nodes.size(), node);
  }
  static bool ReadFactor(absl::string_view word, int64_t* factor) {
    return absl::SimpleAtoi(word, factor) && -kMostFactor <= *factor && *factor <= kMostFactor;
  }

  Expression expression_;
  bool axes_seen_ = false;
  absl::string_view line_;  // for messages
};

}  // namespace

void IndexTerm::Bounds(int64_t size, int64_t* least, int64_t* most) const {
  const int64_t last = (size - 1) / divisor;
  const __int128 factors = modulus == 0 ? last : std::min(last, modulus - 1);
  const __int128 bound = kMostBound;
  const int64_t end = std::clamp<__int128>(factors * factor, -bound, bound);
  *least = axis < 0 ? factor : std::min<int64_t>(end, 0);
  *most = axis < 0 ? factor : std::max<int64_t>(end, 0);
}

int Index::axis() const {
  if (terms.size() != 1 || !nodes.empty()) return -1;
  const IndexTerm& term = terms[0];
  return term.factor == 1 && term.divisor == 1 && term.modulus == 0 ? term.axis : -1;
}

absl::StatusOr<Expression> ParseExpression(absl::string_view text) { return Parser().Parse(text); }

}  // namespace tfmem
