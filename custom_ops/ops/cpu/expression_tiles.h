// From a program over tensors, for known sizes, to a tile program.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/placement.h"
#include "custom_ops/ops/cpu/sized_expression.h"
#include "custom_ops/ops/cpu/tile_domains.h"
#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

// What a port of the tile program reads or writes.
struct TilePort {
  // An input; after them an output; after them a buffer; -1: positions. Of random numbers the key.
  int tensor = -1;
  DType dtype = DType::kFloat32;
  Access access;
  int domain = 0;
  int counter = -1;  // the input that is a random generator's counter
};

// Memory for a value that passes from stage to stage.
struct TileBuffer {
  DType dtype = DType::kFloat32;
  int64_t numbers = 0;
};

struct ExpressionTiles {
  TileProgram program;
  std::vector<int64_t> axes;  // sizes
  std::vector<TileDomain> domains;
  std::vector<int> levels;  // of each stage, in increasing order: those of one need not wait
  std::vector<TilePort> loads;
  std::vector<TilePort> stores;
  std::vector<TileBuffer> buffers;
  // A reduction over tiles: the buffer of its results, how many numbers each is of, and whether it
  // reduces all rows or keeps the first axes of the rows.
  struct Totals {
    int buffer = 0;
    int64_t count = 1;
    bool keeps_rows = false;
  };
  std::vector<Totals> totals;
  std::vector<IndexCheck> checks;

  int64_t Positions(const std::vector<int>& along) const;
};

// `inputs` are the program's tensors. Unimplemented if more values live at a time than tiles have
// room for.
absl::StatusOr<ExpressionTiles> CompileExpression(const SizedExpression& expression, int inputs);

}  // namespace tfmem
