// From a program over tensors to a tile program.
//
// One of its axes is the columns of all domains. The others are rows: those that some value varies
// along together make a domain. So `softmax(x @ w + b)`, [rows, classes], and the step of `w`,
// [features, classes], are two domains, whose columns are the classes.
#ifndef TFMEM_CUSTOM_OPS_OPS_CPU_EXPRESSION_TILES_H_
#define TFMEM_CUSTOM_OPS_OPS_CPU_EXPRESSION_TILES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cpu/expression.h"
#include "custom_ops/ops/cpu/tensor_port.h"
#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

struct ExpressionTiles {
  TileProgram program;
  std::vector<int> loads;  // for each port that is read the node, an input or a position
  int column = -1;         // the axis; -1: there is none
  std::vector<std::vector<int>> rows;  // for each domain the axes; none for the first

  // The domain of what varies along some axes.
  int DomainOf(uint32_t varies) const;
  TileAxes AxesOf(uint32_t varies, const std::vector<int64_t>& sizes) const;
};

// Port i of what is written is output i. Unimplemented if no axis can be the columns, because a
// reduction is over some of the axes that make rows, but not over all.
absl::StatusOr<ExpressionTiles> CompileExpression(const Expression& expression);

// The same with a program that has been serialised, which is checked against the expression: it
// has the same ports, and reads and writes none outside the domain.
absl::StatusOr<ExpressionTiles> ReadExpressionTiles(const Expression& expression,
                                                    absl::string_view bytes);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_CPU_EXPRESSION_TILES_H_
