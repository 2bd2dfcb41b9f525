#include "custom_ops/ops/recurrent/cell.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using Kind = CellNode::Kind;
using Words = std::vector<absl::string_view>;

constexpr absl::string_view kFormat = "cell 1";

template <typename... Parts>
absl::Status Wrong(Parts... parts) {
  return absl::InvalidArgumentError(absl::StrCat("attr cell: ", parts...));
}

// Reads a cell line by line; each line is checked against what is known by then.
class Parser {
 public:
  absl::StatusOr<Cell> Parse(absl::string_view text) {
    std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
    if (lines.front() != kFormat) {
      return Wrong("expected '", kFormat, "' on the first line, found '", lines.front(),
                   "'; this op library and the cell's writer differ in version");
    }
    for (size_t i = 1; i < lines.size(); ++i) {
      line_ = lines[i];
      Words words = absl::StrSplit(line_, ' ', absl::SkipEmpty());
      if (words.empty()) continue;
      TFMEM_RETURN_IF_ERROR(ParseLine(words));
    }
    TFMEM_RETURN_IF_ERROR(CheckEnd());
    return std::move(cell_);
  }

 private:
  absl::Status ParseLine(const Words& words) {
    const absl::string_view word = words[0];
    if (word == "constant") {
      CellNode node;
      if (words.size() != 2 || !absl::SimpleAtod(words[1], &node.value)) return Unreadable();
      node.scalar = true;
      cell_.nodes.push_back(std::move(node));
      return absl::OkStatus();
    }
    std::vector<int> numbers;
    for (size_t i = 1; i < words.size(); ++i) {
      int number = 0;
      if (!absl::SimpleAtoi(words[i], &number) || number < 0) return Unreadable();
      numbers.push_back(number);
    }
    if (word == "sequences") return Declare(word, numbers, &cell_.sequences);
    if (word == "invariants") return Declare(word, numbers, &cell_.invariants);
    if (word == "vectors") return Declare(word, numbers, &cell_.vectors);
    if (word == "states") return Declare(word, numbers, &cell_.states);
    if (word == "matrices") return DeclareMatrices(word, numbers);
    if (word == "output") {
      cell_.outputs.push_back(std::move(numbers));
      return absl::OkStatus();
    }
    return ParseNode(word, numbers);
  }

  // At most once, so that what was checked against a declaration stays right.
  absl::Status Declare(absl::string_view word, const std::vector<int>& numbers,
                       std::vector<int>* declared) {
    if (!declared_.insert(word).second) {
      return Wrong("'", line_, "' declares ", word, " a second time");
    }
    *declared = numbers;
    return absl::OkStatus();
  }

  absl::Status DeclareMatrices(absl::string_view word, const std::vector<int>& numbers) {
    std::vector<int> sizes;
    TFMEM_RETURN_IF_ERROR(Declare(word, numbers, &sizes));
    if (numbers.size() % 2 != 0) return Unreadable();
    for (size_t i = 0; i < numbers.size(); i += 2) {
      cell_.matrices.push_back({numbers[i], numbers[i + 1]});
    }
    return absl::OkStatus();
  }

  absl::Status ParseNode(absl::string_view word, const std::vector<int>& numbers) {
    CellNode node;
    absl::Status status = Unreadable();
    if (word == "product") {
      status = ParseProduct(numbers, &node);
    } else if (word == "state") {
      status = ParseState(numbers, &node);
    } else if (word == "row_sum") {
      status = ParseRowSum(numbers, &node);
    } else if (word == "sequence") {
      status = ParseLeaf(Kind::kSequence, cell_.sequences, numbers, &node);
    } else if (word == "invariant") {
      status = ParseLeaf(Kind::kInvariant, cell_.invariants, numbers, &node);
    } else if (word == "vector") {
      status = ParseLeaf(Kind::kVector, cell_.vectors, numbers, &node);
    } else if (const auto op = ElementwiseNamed(word)) {
      status = ParseElementwise(*op, numbers, &node);
    }
    if (status.ok()) cell_.nodes.push_back(std::move(node));
    return status;
  }

  // `columns`: of each tensor of this kind.
  absl::Status ParseLeaf(Kind kind, const std::vector<int>& columns,
                         const std::vector<int>& numbers, CellNode* node) {
    if (numbers.size() != 2) return Unreadable();
    node->kind = kind;
    node->tensor = numbers[0];
    node->column = numbers[1];
    TFMEM_RETURN_IF_ERROR(CheckLeaf(*node, columns));
    node->scalar = kind == Kind::kSequence && columns[node->tensor] == 0;
    return absl::OkStatus();
  }

  absl::Status CheckLeaf(const CellNode& node, const std::vector<int>& columns) const {
    TFMEM_RETURN_IF_ERROR(Within(node.tensor, columns.size()));
    const int end = columns[node.tensor];
    return Within(node.column, node.kind == Kind::kSequence ? std::max(end, 1) : end);
  }

  absl::Status ParseState(const std::vector<int>& numbers, CellNode* node) {
    if (numbers.size() != 1) return Unreadable();
    node->kind = Kind::kState;
    node->tensor = numbers[0];
    largest_state_ = std::max(largest_state_, node->tensor);
    return absl::OkStatus();
  }

  absl::Status ParseProduct(const std::vector<int>& numbers, CellNode* node) {
    if (numbers.empty() || numbers.size() % 5 != 0) return Unreadable();
    node->kind = Kind::kProduct;
    for (size_t i = 0; i < numbers.size(); i += 5) {
      const Term term{numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3],
                      numbers[i + 4] != 0};
      TFMEM_RETURN_IF_ERROR(ReadsWide(term.operand));
      TFMEM_RETURN_IF_ERROR(CheckTerm(term));
      const CellNode& operand = cell_.nodes[term.operand];
      // A state is exchanged at the end of the step before.
      const int waits = operand.kind == Kind::kState ? 0 : operand.stage + 1;
      node->stage = std::max(node->stage, waits);
      node->terms.push_back(term);
    }
    return absl::OkStatus();
  }

  absl::Status CheckTerm(const Term& term) const {
    TFMEM_RETURN_IF_ERROR(Within(term.matrix, cell_.matrices.size()));
    TFMEM_RETURN_IF_ERROR(Within(term.row, cell_.matrices[term.matrix].rows));
    return Within(term.column, cell_.matrices[term.matrix].columns);
  }

  absl::Status ParseRowSum(const std::vector<int>& numbers, CellNode* node) {
    if (numbers.size() != 1) return Unreadable();
    TFMEM_RETURN_IF_ERROR(ReadsWide(numbers[0]));
    node->kind = Kind::kRowSum;
    node->arguments = numbers;
    node->scalar = true;
    node->stage = cell_.nodes[numbers[0]].stage + 1;
    return absl::OkStatus();
  }

  absl::Status ParseElementwise(Elementwise op, const std::vector<int>& numbers, CellNode* node) {
    const ElementwiseInfo& info = InfoOf(op);
    if (static_cast<int>(numbers.size()) != info.arguments || (info.kinds & kFloats) == 0) {
      return Unreadable();
    }
    node->kind = Kind::kElementwise;
    node->op = op;
    node->arguments = numbers;
    node->scalar = true;
    for (int argument : numbers) {
      TFMEM_RETURN_IF_ERROR(Within(argument, cell_.nodes.size()));
      node->scalar &= cell_.nodes[argument].scalar;
      node->stage = std::max(node->stage, cell_.nodes[argument].stage);
    }
    return absl::OkStatus();
  }

  absl::Status ReadsWide(int operand) const {
    absl::Status status = Within(operand, cell_.nodes.size());
    if (status.ok() && cell_.nodes[operand].scalar) {
      return Wrong("'", line_, "' needs an operand [batch, units], not a scalar");
    }
    return status;
  }

  absl::Status Within(int index, int end) const {
    if (index < end) return absl::OkStatus();
    return Wrong("'", line_, "' refers to ", index, " where there are ", end);
  }

  absl::Status Unreadable() const { return Wrong("cannot read the line '", line_, "'"); }

  // References again, against the declarations that the cell is used with.
  absl::Status CheckNode(const CellNode& node) const {
    if (node.kind == Kind::kSequence) return CheckLeaf(node, cell_.sequences);
    if (node.kind == Kind::kInvariant) return CheckLeaf(node, cell_.invariants);
    if (node.kind == Kind::kVector) return CheckLeaf(node, cell_.vectors);
    for (const Term& term : node.terms) TFMEM_RETURN_IF_ERROR(CheckTerm(term));
    return absl::OkStatus();
  }

  absl::Status CheckEnd() {
    line_ = "the cell";
    for (const CellNode& node : cell_.nodes) TFMEM_RETURN_IF_ERROR(CheckNode(node));
    const int nodes = cell_.nodes.size();
    const int states = cell_.states.size();
    if (largest_state_ >= states) {
      return Wrong("a node refers to state ", largest_state_, " where there are ", states);
    }
    for (int state : cell_.states) {
      if (state >= nodes || cell_.nodes[state].scalar) {
        return Wrong("a state becomes node ", state, "; expected one of ", nodes,
                     " nodes that is [batch, units]");
      }
    }
    for (const std::vector<int>& output : cell_.outputs) {
      if (output.empty()) return Wrong("an output without columns");
      for (int column : output) {
        if (column >= nodes || (output.size() > 1 && cell_.nodes[column].scalar)) {
          return Wrong("an output has node ", column, " among its columns; expected one of ", nodes,
                       " nodes, and a scalar only alone");
        }
      }
    }
    return absl::OkStatus();
  }

  Cell cell_;
  std::set<absl::string_view> declared_;
  absl::string_view line_;
  int largest_state_ = -1;
};

}  // namespace

std::vector<int> CellNode::exchanged() const {
  if (kind == Kind::kRowSum) return arguments;
  std::vector<int> operands;
  for (const Term& term : terms) operands.push_back(term.operand);
  return operands;
}

int Cell::stages() const {
  int last = 0;
  for (const CellNode& node : nodes) last = std::max(last, node.stage);
  return last + 1;
}

absl::StatusOr<Cell> ParseCell(absl::string_view text) { return Parser().Parse(text); }

}  // namespace tfmem
