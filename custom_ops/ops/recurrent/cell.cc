#include "custom_ops/ops/recurrent/cell.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/string_view.h"
#include "custom_ops/ops/text_reader.h"

namespace tfmem {
namespace {

using Kind = CellNode::Kind;

constexpr absl::string_view kCellFormat = "cell 1";
constexpr int64_t kMostCellNumber = std::numeric_limits<int>::max();

// Reads a cell line by line; each line is checked against what is known by then.
class CellParser {
 public:
  explicit CellParser(absl::string_view text) : in_("attr cell", text) {}

  absl::StatusOr<Cell> Parse() {
    if (ReadLines() && CheckEnd()) return std::move(cell_);
    return in_.failure();
  }

 private:
  bool ReadLines() {
    if (!in_.Format(kCellFormat)) return false;
    while (in_.NextLine()) {
      if (!ReadLine() || !in_.End()) return false;
    }
    return true;
  }

  bool ReadLine() {
    if (in_.TakeWord("sequences")) return Declare("sequences", &cell_.sequences);
    if (in_.TakeWord("invariants")) return Declare("invariants", &cell_.invariants);
    if (in_.TakeWord("vectors")) return Declare("vectors", &cell_.vectors);
    if (in_.TakeWord("states")) return Declare("states", &cell_.states);
    if (in_.TakeWord("matrices")) return DeclareMatrices();
    if (in_.TakeWord("output"))
      return in_.Numbers(0, kMostCellNumber, &cell_.outputs.emplace_back());
    CellNode node;
    if (!ReadNode(&node)) return false;
    cell_.nodes.push_back(std::move(node));
    return true;
  }

  // At most once, so that what was checked against a declaration stays right.
  bool Declare(absl::string_view word, std::vector<int>* declared) {
    if (!declared_.insert(word).second) return in_.Wrong("declares ", word, " a second time");
    return in_.Numbers(0, kMostCellNumber, declared);
  }

  bool DeclareMatrices() {
    std::vector<int> sizes;
    if (!Declare("matrices", &sizes)) return false;
    if (sizes.size() % 2 != 0) return in_.Expected("rows and columns of each matrix");
    for (size_t i = 0; i < sizes.size(); i += 2) {
      cell_.matrices.push_back({sizes[i], sizes[i + 1]});
    }
    return true;
  }

  bool ReadNode(CellNode* node) {
    if (in_.TakeWord("constant")) {
      node->scalar = true;
      return in_.Real(&node->value);
    }
    if (in_.TakeWord("product")) return ReadProduct(node);
    if (in_.TakeWord("state")) return ReadState(node);
    if (in_.TakeWord("row_sum")) return ReadRowSum(node);
    if (in_.TakeWord("sequence")) return ReadLeaf(Kind::kSequence, cell_.sequences, node);
    if (in_.TakeWord("invariant")) return ReadLeaf(Kind::kInvariant, cell_.invariants, node);
    if (in_.TakeWord("vector")) return ReadLeaf(Kind::kVector, cell_.vectors, node);
    absl::string_view word;
    if (!in_.Word(&word)) return false;
    const auto op = ElementwiseNamed(word);
    if (!op || (InfoOf(*op).kinds & kFloats) == 0) return in_.Expected("a node");
    return ReadElementwise(*op, node);
  }

  // `columns`: of each tensor of this kind.
  bool ReadLeaf(Kind kind, const std::vector<int>& columns, CellNode* node) {
    node->kind = kind;
    if (!in_.Number(0, kMostCellNumber, &node->tensor) ||
        !in_.Number(0, kMostCellNumber, &node->column) || !CheckLeaf(*node, columns)) {
      return false;
    }
    node->scalar = kind == Kind::kSequence && columns[node->tensor] == 0;
    return true;
  }

  bool CheckLeaf(const CellNode& node, const std::vector<int>& columns) {
    if (!Within(node.tensor, columns.size())) return false;
    const int end = columns[node.tensor];
    return Within(node.column, node.kind == Kind::kSequence ? std::max(end, 1) : end);
  }

  bool ReadState(CellNode* node) {
    node->kind = Kind::kState;
    if (!in_.Number(0, kMostCellNumber, &node->tensor)) return false;
    largest_state_ = std::max(largest_state_, node->tensor);
    return true;
  }

  bool ReadProduct(CellNode* node) {
    node->kind = Kind::kProduct;
    do {
      int numbers[4] = {};
      bool transposed = false;
      for (int& number : numbers) {
        if (!in_.Number(0, kMostCellNumber, &number)) return false;
      }
      if (!in_.Number(0, 1, &transposed)) return false;
      const Term term{numbers[0], numbers[1], numbers[2], numbers[3], transposed};
      if (!ReadsWide(term.operand) || !CheckTerm(term)) return false;
      const CellNode& operand = cell_.nodes[term.operand];
      // A state is exchanged at the end of the step before.
      const int waits = operand.kind == Kind::kState ? 0 : operand.stage + 1;
      node->stage = std::max(node->stage, waits);
      node->terms.push_back(term);
    } while (in_.NextWord());
    return true;
  }

  bool CheckTerm(const Term& term) {
    return Within(term.matrix, cell_.matrices.size()) &&
           Within(term.row, cell_.matrices[term.matrix].rows) &&
           Within(term.column, cell_.matrices[term.matrix].columns);
  }

  bool ReadRowSum(CellNode* node) {
    node->kind = Kind::kRowSum;
    node->arguments.resize(1);
    if (!in_.Number(0, kMostCellNumber, &node->arguments[0]) || !ReadsWide(node->arguments[0])) {
      return false;
    }
    node->scalar = true;
    node->stage = cell_.nodes[node->arguments[0]].stage + 1;
    return true;
  }

  bool ReadElementwise(Elementwise op, CellNode* node) {
    node->kind = Kind::kElementwise;
    node->op = op;
    node->scalar = true;
    node->arguments.resize(InfoOf(op).arguments);
    for (int& argument : node->arguments) {
      if (!in_.Below(cell_.nodes.size(), &argument)) return false;
      node->scalar &= cell_.nodes[argument].scalar;
      node->stage = std::max(node->stage, cell_.nodes[argument].stage);
    }
    return true;
  }

  bool ReadsWide(int operand) {
    if (!Within(operand, cell_.nodes.size())) return false;
    return !cell_.nodes[operand].scalar ||
           in_.Wrong("needs an operand [batch, units], not a scalar");
  }

  bool Within(int index, int end) {
    return index < end || in_.Wrong("refers to ", index, " where there are ", end);
  }

  // References again, against the declarations that the cell is used with.
  bool CheckNode(const CellNode& node) {
    if (node.kind == Kind::kSequence) return CheckLeaf(node, cell_.sequences);
    if (node.kind == Kind::kInvariant) return CheckLeaf(node, cell_.invariants);
    if (node.kind == Kind::kVector) return CheckLeaf(node, cell_.vectors);
    for (const Term& term : node.terms) {
      if (!CheckTerm(term)) return false;
    }
    return true;
  }

  bool CheckEnd() {
    for (const CellNode& node : cell_.nodes) {
      if (!CheckNode(node)) return false;
    }
    const int nodes = cell_.nodes.size();
    const int states = cell_.states.size();
    if (largest_state_ >= states) {
      return in_.Wrong("a node refers to state ", largest_state_, " where there are ", states);
    }
    for (int state : cell_.states) {
      if (state >= nodes || cell_.nodes[state].scalar) {
        return in_.Wrong("a state becomes node ", state, "; expected one of ", nodes,
                         " nodes that is [batch, units]");
      }
    }
    for (const std::vector<int>& output : cell_.outputs) {
      if (output.empty()) return in_.Wrong("an output without columns");
      for (int column : output) {
        if (column >= nodes || (output.size() > 1 && cell_.nodes[column].scalar)) {
          return in_.Wrong("an output has node ", column, " among its columns; expected one of ",
                           nodes, " nodes, and a scalar only alone");
        }
      }
    }
    return true;
  }

  TextReader in_;
  Cell cell_;
  std::set<absl::string_view> declared_;
  int largest_state_ = -1;
};

}  // namespace

int Cell::stages() const {
  int last = 0;
  for (const CellNode& node : nodes) last = std::max(last, node.stage);
  return last + 1;
}

absl::StatusOr<Cell> ParseCell(absl::string_view text) { return CellParser(text).Parse(); }

}  // namespace tfmem
