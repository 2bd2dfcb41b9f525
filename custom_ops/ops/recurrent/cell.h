// A recurrent cell as data: reads what custom_ops/recurrent/cell.py writes, which says what
// everything means. Knows no TensorFlow kernels and no devices.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/elementwise.h"

namespace tfmem {

// operand @ the [units, units] block at (row, column) of a matrix, or that block transposed.
struct Term {
  int operand = 0;
  int matrix = 0;
  int row = 0;
  int column = 0;
  bool transposed = false;
};

struct CellNode {
  enum class Kind {
    kSequence,
    kInvariant,
    kVector,
    kConstant,
    kState,
    kProduct,
    kRowSum,
    kElementwise
  };

  Kind kind = Kind::kConstant;
  int tensor = 0;                      // of a leaf; the index of a state
  int column = 0;                      // of a leaf
  double value = 0;                    // of a constant
  Elementwise op = Elementwise::kAdd;  // of an elementwise node
  std::vector<int> arguments;          // of a row sum, or of an elementwise node
  std::vector<Term> terms;             // of a product

  bool scalar = false;  // one number a row, not one for each unit
  int stage = 0;        // of the step; between stages the processors exchange values
};

struct CellMatrix {
  int rows = 0;  // in blocks of `units`, as `columns`
  int columns = 0;
};

struct Cell {
  std::vector<CellNode> nodes;            // each refers to earlier ones
  std::vector<int> states;                // for each the node that it becomes
  std::vector<std::vector<int>> outputs;  // for each tensor the nodes that are its columns
  std::vector<int> sequences;             // columns of each; 0: [time, batch]
  std::vector<int> invariants;            // columns of each
  std::vector<int> vectors;               // columns of each
  std::vector<CellMatrix> matrices;

  bool scalar_output(int output) const { return nodes[outputs[output].front()].scalar; }
  int stages() const;
};

// Reads and checks a cell; InvalidArgument names the line that is wrong.
absl::StatusOr<Cell> ParseCell(absl::string_view text);

}  // namespace tfmem
