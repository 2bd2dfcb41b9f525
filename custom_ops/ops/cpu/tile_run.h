// Runs a program over tensors in memory, tile by tile.
#ifndef TFMEM_CUSTOM_OPS_OPS_CPU_TILE_RUN_H_
#define TFMEM_CUSTOM_OPS_OPS_CPU_TILE_RUN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/expression.h"
#include "custom_ops/ops/cpu/expression_tiles.h"

namespace tfmem {

// Dense, in row-major order; booleans are bytes of 0 and 1.
struct TensorView {
  const void* data = nullptr;
  std::vector<int64_t> shape;
};

struct MutableTensorView {
  void* data = nullptr;
  int64_t bytes = 0;
};

// `axes` are the sizes of the program's axes, `outputs` is written to. On one thread. Results
// depend on the sizes alone.
//
// InvalidArgument if the sizes do not fit the program, or an index would be out of bounds: then
// nothing has been written. ResourceExhausted if there is no memory.
absl::Status RunExpression(const Expression& expression, const ExpressionTiles& tiles,
                           const std::vector<int64_t>& axes, const std::vector<TensorView>& inputs,
                           const std::vector<MutableTensorView>& outputs,
                           const InstructionSet& kernels);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_CPU_TILE_RUN_H_
