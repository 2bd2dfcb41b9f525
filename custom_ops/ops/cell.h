// A recurrent cell as data: reads what custom_ops/cell.py writes, which says what everything means.
// Knows no TensorFlow kernels and no devices.
#ifndef TFMEM_CUSTOM_OPS_OPS_CELL_H_
#define TFMEM_CUSTOM_OPS_OPS_CELL_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfmem {

// X(enumerator, name in a cell's text, number of arguments)
#define TFMEM_ELEMENTWISE_OPS(X)                 \
  X(kAdd, "add", 2)                              \
  X(kSubtract, "subtract", 2)                    \
  X(kMultiply, "multiply", 2)                    \
  X(kDivide, "divide", 2)                        \
  X(kMaximum, "maximum", 2)                      \
  X(kMinimum, "minimum", 2)                      \
  X(kPower, "power", 2)                          \
  X(kMultiplyNoNan, "multiply_no_nan", 2)        \
  X(kDivideNoNan, "divide_no_nan", 2)            \
  X(kXdivy, "xdivy", 2)                          \
  X(kSquaredDifference, "squared_difference", 2) \
  X(kGreater, "greater", 2)                      \
  X(kGreaterEqual, "greater_equal", 2)           \
  X(kEqual, "equal", 2)                          \
  X(kNegate, "negate", 1)                        \
  X(kAbsolute, "absolute", 1)                    \
  X(kSign, "sign", 1)                            \
  X(kSquare, "square", 1)                        \
  X(kSqrt, "sqrt", 1)                            \
  X(kReciprocalSqrt, "reciprocal_sqrt", 1)       \
  X(kReciprocal, "reciprocal", 1)                \
  X(kExp, "exp", 1)                              \
  X(kLog, "log", 1)                              \
  X(kLog1p, "log1p", 1)                          \
  X(kExpm1, "expm1", 1)                          \
  X(kErf, "erf", 1)                              \
  X(kErfc, "erfc", 1)                            \
  X(kSin, "sin", 1)                              \
  X(kCos, "cos", 1)                              \
  X(kSigmoid, "sigmoid", 1)                      \
  X(kTanh, "tanh", 1)                            \
  X(kRelu, "relu", 1)                            \
  X(kSoftplus, "softplus", 1)                    \
  X(kElu, "elu", 1)                              \
  X(kRelu6, "relu6", 1)                          \
  X(kSelu, "selu", 1)                            \
  X(kSoftsign, "softsign", 1)                    \
  X(kSinh, "sinh", 1)                            \
  X(kCosh, "cosh", 1)                            \
  X(kSelect, "select", 3)

enum class Elementwise {
#define TFMEM_ENUMERATE(name, text, arguments) name,
  TFMEM_ELEMENTWISE_OPS(TFMEM_ENUMERATE)
#undef TFMEM_ENUMERATE
};

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

  // The nodes whose values it needs of other processors.
  std::vector<int> exchanged() const;
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

#endif  // TFMEM_CUSTOM_OPS_OPS_CELL_H_
