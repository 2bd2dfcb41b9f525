#include "custom_ops/ops/cpu/expression.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/string_view.h"

namespace tfmem {
namespace {

using Kind = ExpressionNode::Kind;

constexpr absl::string_view kProgramFormat = "program 1";
// Bounds of numbers in an index: no sum or product of a few of them and a position wraps.
constexpr int64_t kMostFactor = int64_t{1} << 40;
constexpr int64_t kMostBound = int64_t{1} << 56;
constexpr size_t kMostTerms = 64;
constexpr absl::string_view kState = "uint64";  // the dtype of a random generator's key and counter

bool IsIntegerType(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

// Reads a program line by line; each line is checked against what is known by then.
class ExpressionParser {
 public:
  explicit ExpressionParser(TextReader* in) : in_(*in) {}

  bool Parse(Expression* expression) {
    if (!in_.Format(kProgramFormat) || !ReadAxes()) return false;
    while (in_.NextLine()) {
      if (!ReadLine() || !in_.End()) return false;
    }
    *expression = std::move(expression_);
    return true;
  }

 private:
  bool ReadAxes() {
    in_.NextLine();
    return in_.Key("axes") &&
           in_.Numbers(0, std::numeric_limits<int64_t>::max(), &expression_.axes, kMostAxes);
  }

  bool ReadLine() {
    if (in_.TakeWord("tensor")) return ReadTensor(&expression_.tensors.emplace_back());
    if (in_.TakeWord("output")) return ReadOutput(&expression_.outputs.emplace_back());
    ExpressionNode node;
    if (!ReadNode(&node)) return false;
    expression_.nodes.push_back(std::move(node));
    return true;
  }

  bool ReadTensor(ExpressionTensor* tensor) {
    tensor->state = in_.TakeWord(kState);
    if (tensor->state) tensor->dtype = DType::kInt64;
    return (tensor->state || ReadDType(DType::kBool, &tensor->dtype)) &&
           in_.Below(kMostAxes + 1, &tensor->rank);
  }

  bool ReadOutput(ExpressionOutput* output) {
    if (!ReadReference(&output->node)) return false;
    while (in_.NextWord()) {
      int axis = 0;
      if (!ReadAxis(&axis)) return false;
      if (output->varies().Has(axis)) return in_.Expected("each axis once");
      output->axes.push_back(axis);
    }
    return output->varies().Covers(expression_.nodes[output->node].varies) ||
           in_.Wrong("leaves out an axis that its node varies along");
  }

  bool ReadNode(ExpressionNode* node) {
    if (in_.TakeWord("input")) return ReadInput(node);
    if (in_.TakeWord("constant")) return ReadConstant(node);
    if (in_.TakeWord("position")) return ReadPosition(node);
    if (in_.TakeWord("random")) return ReadRandom(node);
    if (in_.TakeWord("cast")) return ReadCast(node);
    if (in_.TakeWord("reduce")) return ReadReduce(node);
    absl::string_view word;
    if (!in_.Word(&word)) return false;
    const auto op = ElementwiseNamed(word);
    return op ? ReadApply(*op, node) : in_.Expected("a tensor, a node or an output");
  }

  bool ReadInput(ExpressionNode* node) {
    node->kind = Kind::kInput;
    if (!in_.Below(expression_.tensors.size(), &node->tensor)) return false;
    const ExpressionTensor& tensor = expression_.tensors[node->tensor];
    node->dtype = tensor.dtype;
    if (tensor.state) return in_.Wrong("reads the state of a random generator");
    node->index.resize(tensor.rank);
    return std::all_of(node->index.begin(), node->index.end(),
                       [&](Index& index) { return ReadIndex(true, node, &index); });
  }

  // random DTYPE KEY COUNTER INDEX; the key is the counter: it is a seed
  bool ReadRandom(ExpressionNode* node) {
    node->kind = Kind::kRandom;
    const size_t tensors = expression_.tensors.size();
    if (!ReadDType(DType::kInt64, &node->dtype) || !in_.Below(tensors, &node->tensor) ||
        !in_.Below(tensors, &node->counter)) {
      return false;
    }
    const bool seeded = node->tensor == node->counter;
    for (int tensor : {node->tensor, node->counter}) {
      const ExpressionTensor& state = expression_.tensors[tensor];
      if (seeded ? !state.state && state.dtype == DType::kInt64 : state.state) continue;
      return in_.Wrong("tensor ", tensor, " is no state of a random generator");
    }
    return ReadIndex(false, node, &node->index.emplace_back());
  }

  // Terms and, where it may gather, nodes: 3+2*a1+n4
  bool ReadIndex(bool gathers, ExpressionNode* node, Index* index) {
    if (!in_.NextWord()) return in_.Expected("an index");
    do {
      if (index->terms.size() + index->nodes.size() == kMostTerms) {
        return in_.Wrong("an index has more than ", kMostTerms, " terms");
      }
      if (gathers && in_.Take("n")) {
        if (!ReadGather(node, &index->nodes.emplace_back())) return false;
        continue;
      }
      IndexTerm& term = index->terms.emplace_back();
      if (!ReadTerm(&term)) return false;
      if (term.axis >= 0) node->varies.Add(term.axis);
    } while (in_.Take("+"));
    return true;
  }

  bool ReadGather(ExpressionNode* node, int* read) {
    if (!ReadReference(read)) return false;
    const ExpressionNode& value = expression_.nodes[*read];
    node->varies |= value.varies;
    return IsIntegerType(value.dtype) ||
           in_.Wrong("gathers at values of ", NameOf(value.dtype), "; expected integers");
  }

  // 3, a1, 2*a1, a1/4, 3*a1/4%2
  bool ReadTerm(IndexTerm* term) {
    term->factor = 1;
    if (!in_.Take("a")) {
      if (!in_.Number(-kMostFactor, kMostFactor, &term->factor)) return false;
      if (!in_.Take("*")) return true;
      if (!in_.Separator("a")) return false;
    }
    return ReadAxis(&term->axis) &&
           (!in_.Take("/") || in_.Number(1, kMostFactor, &term->divisor)) &&
           (!in_.Take("%") || in_.Number(1, kMostFactor, &term->modulus));
  }

  bool ReadConstant(ExpressionNode* node) {
    node->kind = Kind::kConstant;
    if (!ReadDType(DType::kBool, &node->dtype)) return false;
    if (node->dtype == DType::kBool) {
      const bool value = in_.TakeWord("True");
      node->value = int64_t{value};
      return value || in_.Key("False");
    }
    if (IsIntegerType(node->dtype)) {
      using Narrow = std::numeric_limits<int32_t>;
      using Wide = std::numeric_limits<int64_t>;
      const bool narrow = node->dtype == DType::kInt32;
      int64_t value = 0;
      if (!in_.Number(narrow ? Narrow::min() : Wide::min(), narrow ? Narrow::max() : Wide::max(),
                      &value)) {
        return false;
      }
      node->value = value;
      return true;
    }
    double value = 0;
    if (!in_.Real(&value)) return false;
    node->value = value;
    return true;
  }

  bool ReadPosition(ExpressionNode* node) {
    node->kind = Kind::kPosition;
    if (!ReadDType(DType::kBool, &node->dtype)) return false;
    if (!IsIntegerType(node->dtype)) return in_.Expected("a dtype of integers");
    if (!ReadAxis(&node->axis)) return false;
    node->varies.Add(node->axis);
    return true;
  }

  bool ReadCast(ExpressionNode* node) {
    node->kind = Kind::kCast;
    node->arguments.resize(1);
    if (!ReadDType(DType::kBool, &node->dtype) || !ReadReference(&node->arguments[0])) return false;
    node->varies = expression_.nodes[node->arguments[0]].varies;
    return true;
  }

  bool ReadReduce(ExpressionNode* node) {
    node->kind = Kind::kReduce;
    node->arguments.resize(1);
    // A `dot` is a sum here: rounding its factors is for GPUs.
    node->reduction = Reduction::kSum;
    if ((!in_.TakeWord("dot") && !in_.Name("a reduction", Reduction::kAll, &node->reduction)) ||
        !ReadReference(&node->arguments[0])) {
      return false;
    }
    const ExpressionNode& reduced = expression_.nodes[node->arguments[0]];
    do {
      int axis = 0;
      if (!ReadAxis(&axis)) return false;
      node->axes.Add(axis);
    } while (in_.NextWord());
    node->dtype = reduced.dtype;
    node->varies = reduced.varies - node->axes;
    return Takes(node->reduction, reduced.dtype) ||
           in_.Wrong("reduces values of ", NameOf(reduced.dtype));
  }

  bool ReadApply(Elementwise op, ExpressionNode* node) {
    node->kind = Kind::kApply;
    node->op = op;
    const ElementwiseInfo& info = InfoOf(op);
    node->arguments.resize(info.arguments);
    for (int& argument : node->arguments) {
      if (!ReadReference(&argument)) return false;
      node->varies |= expression_.nodes[argument].varies;
    }
    const DType dtype = expression_.nodes[node->arguments.back()].dtype;
    bool fits = Takes(info, dtype);
    for (int i = 0; i < info.arguments; ++i) {
      const DType argument = expression_.nodes[node->arguments[i]].dtype;
      const bool condition = op == Elementwise::kSelect && i == 0;
      fits &= argument == (condition ? DType::kBool : dtype);
    }
    node->dtype = info.comparison ? DType::kBool : dtype;
    return fits || in_.Wrong(info.name, " does not take its arguments' dtypes");
  }

  bool ReadDType(DType last, DType* dtype) { return in_.Name("a dtype", last, dtype); }
  bool ReadAxis(int* axis) { return in_.Below(expression_.axes.size(), axis); }
  bool ReadReference(int* node) { return in_.Below(expression_.nodes.size(), node); }

  TextReader& in_;
  Expression expression_;
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

bool ReadExpression(TextReader* in, Expression* expression) {
  return ExpressionParser(in).Parse(expression);
}

absl::StatusOr<Expression> ParseExpression(absl::string_view text) {
  TextReader in("program", text);
  Expression expression;
  if (ReadExpression(&in, &expression)) return expression;
  return in.failure();
}

}  // namespace tfmem
