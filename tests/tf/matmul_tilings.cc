// What TfmemMatMul's op decides, for test_matmul_tiling.py.
#include "custom_ops/ops/matmul_tiling.h"

// found: whether tiles are small, parts, bytes of their sums, lines of an operand.
extern "C" void best_tiling(int64_t rows, int64_t depth, int64_t columns, int64_t processors,
                            int64_t* found) {
  const tfmem::MatMulSizes shape{rows, depth, columns};
  const tfmem::MatMulTiling tiling = tfmem::BestTiling(shape, processors);
  found[0] = tiling.small;
  found[1] = tiling.parts;
  found[2] = tiling.SumsBytes(shape);
  found[3] = shape.lines();
}
