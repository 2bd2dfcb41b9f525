// From a program over tensors to a tile program. Its domain: the program's last axis is the
// columns, all others together are the rows.
#ifndef TFMEM_CUSTOM_OPS_OPS_CPU_EXPRESSION_TILES_H_
#define TFMEM_CUSTOM_OPS_OPS_CPU_EXPRESSION_TILES_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cpu/expression.h"
#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

struct ExpressionTiles {
  TileProgram program;
  std::vector<int> loads;  // for each port that is read the node, an input or a position
};

// Port i of what is written is output i. Unimplemented if a reduction is over some of the axes that
// make rows, but not over all.
absl::StatusOr<ExpressionTiles> CompileExpression(const Expression& expression);

// The same with a program that has been serialised, which is checked against the expression: it
// has the same ports, and reads and writes none outside the domain.
absl::StatusOr<ExpressionTiles> ReadExpressionTiles(const Expression& expression,
                                                    absl::string_view bytes);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_CPU_EXPRESSION_TILES_H_
