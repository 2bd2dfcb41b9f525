#include "custom_ops/ops/recurrent/cell.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tfmem {
namespace {

using Kind = CellNode::Kind;
using Words = std::vector<absl::string_view>;

constexpr absl::string_view kFormat = "cell 1";

struct ElementwiseName {
  Elementwise op;
  absl::string_view name;
  size_t arguments;
  int kinds;
};

constexpr ElementwiseName kElementwise[] = {
#define TFMEM_NAME(op, name, arguments, kinds, comparison) \
  {Elementwise::op, name, arguments, kinds},
    TFMEM_ELEMENTWISE_OPS(TFMEM_NAME)
#undef TFMEM_NAME
};

struct LeafName {
  Kind kind;
  absl::string_view name;
};

constexpr LeafName kLeaves[] = {
    {Kind::kSequence, "sequence"},
    {Kind::kInvariant, "invariant"},
    {Kind::kVector, "vector"},
};

struct Declaration {
  absl::string_view name;
};

constexpr Declaration kDeclarations[] = {
    {"sequences"}, {"invariants"}, {"vectors"}, {"states"}, {"matrices"},
};

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
      absl::Status status = ParseLine(words);
      if (!status.ok()) return status;
    }
    absl::Status status = CheckEnd();
    if (!status.ok()) return status;
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
    if (Find(kDeclarations, word) != nullptr) {
      // Lines before a second one were checked against the first.
      if (!declared_.insert(word).second) {
        return Wrong("'", line_, "' declares ", word, " a second time");
      }
      return Declare(word, numbers);
    }
    if (word == "output") {
      cell_.outputs.push_back(std::move(numbers));
      return absl::OkStatus();
    }
    return ParseNode(word, numbers);
  }

  absl::Status Declare(absl::string_view word, const std::vector<int>& numbers) {
    if (word == "sequences") cell_.sequences = numbers;
    if (word == "invariants") cell_.invariants = numbers;
    if (word == "vectors") cell_.vectors = numbers;
    if (word == "states") cell_.states = numbers;
    return word == "matrices" ? DeclareMatrices(numbers) : absl::OkStatus();
  }

  absl::Status DeclareMatrices(const std::vector<int>& numbers) {
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
    } else if (auto* leaf = Find(kLeaves, word)) {
      status = ParseLeaf(leaf->kind, numbers, &node);
    } else if (auto* op = Find(kElementwise, word)) {
      status = ParseElementwise(*op, numbers, &node);
    }
    if (status.ok()) cell_.nodes.push_back(std::move(node));
    return status;
  }

  template <typename Name, size_t count>
  static const Name* Find(const Name (&names)[count], absl::string_view word) {
    auto* found = std::find_if(names, names + count, [&](auto& name) { return name.name == word; });
    return found == names + count ? nullptr : found;
  }

  absl::Status ParseLeaf(Kind kind, const std::vector<int>& numbers, CellNode* node) {
    if (numbers.size() != 2) return Unreadable();
    node->kind = kind;
    node->tensor = numbers[0];
    node->column = numbers[1];
    if (absl::Status status = CheckLeaf(*node); !status.ok()) return status;
    node->scalar = kind == Kind::kSequence && cell_.sequences[node->tensor] == 0;
    return absl::OkStatus();
  }

  absl::Status CheckLeaf(const CellNode& node) const {
    const std::vector<int>& columns = node.kind == Kind::kSequence    ? cell_.sequences
                                      : node.kind == Kind::kInvariant ? cell_.invariants
                                                                      : cell_.vectors;
    if (absl::Status status = Within(node.tensor, columns.size()); !status.ok()) return status;
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
      absl::Status status = ReadsWide(term.operand);
      if (status.ok()) status = CheckTerm(term);
      if (!status.ok()) return status;
      const CellNode& operand = cell_.nodes[term.operand];
      // A state is exchanged at the end of the step before.
      const int waits = operand.kind == Kind::kState ? 0 : operand.stage + 1;
      node->stage = std::max(node->stage, waits);
      node->terms.push_back(term);
    }
    return absl::OkStatus();
  }

  absl::Status CheckTerm(const Term& term) const {
    absl::Status status = Within(term.matrix, cell_.matrices.size());
    if (!status.ok()) return status;
    status = Within(term.row, cell_.matrices[term.matrix].rows);
    return status.ok() ? Within(term.column, cell_.matrices[term.matrix].columns) : status;
  }

  absl::Status ParseRowSum(const std::vector<int>& numbers, CellNode* node) {
    if (numbers.size() != 1) return Unreadable();
    if (absl::Status status = ReadsWide(numbers[0]); !status.ok()) return status;
    node->kind = Kind::kRowSum;
    node->arguments = numbers;
    node->scalar = true;
    node->stage = cell_.nodes[numbers[0]].stage + 1;
    return absl::OkStatus();
  }

  absl::Status ParseElementwise(const ElementwiseName& op, const std::vector<int>& numbers,
                                CellNode* node) {
    if (numbers.size() != op.arguments || (op.kinds & kFloats) == 0) return Unreadable();
    node->kind = Kind::kElementwise;
    node->op = op.op;
    node->arguments = numbers;
    node->scalar = true;
    for (int argument : numbers) {
      if (absl::Status status = Within(argument, cell_.nodes.size()); !status.ok()) return status;
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

  // Again, against what the cell is used with.
  absl::Status CheckNode(const CellNode& node) const {
    absl::Status status;
    if (node.kind == Kind::kSequence || node.kind == Kind::kInvariant ||
        node.kind == Kind::kVector) {
      status = CheckLeaf(node);
    }
    for (const Term& term : node.terms) {
      if (status.ok()) status = CheckTerm(term);
    }
    return status;
  }

  absl::Status CheckEnd() {
    line_ = "the cell";
    for (const CellNode& node : cell_.nodes) {
      if (absl::Status status = CheckNode(node); !status.ok()) return status;
    }
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
