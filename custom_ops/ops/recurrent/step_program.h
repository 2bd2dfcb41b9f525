// A cell made ready for an interpreter: for each stage of a step the products it multiplies, then
// a tile program's stage over tiles of [rows, units]. Pure; knows no device and no sizes.
#pragma once

#include <vector>

#include "custom_ops/ops/cpu/tile_program.h"
#include "custom_ops/ops/recurrent/cell.h"

namespace tfmem {

// A [units, units] block of weights, packed before the first step.
struct WeightBlock {
  int matrix = 0;
  int row = 0;
  int column = 0;
  bool transposed = false;
};

// `carried` or state `index` times block `block`.
struct ProductTerm {
  bool state = false;
  int index = 0;
  int block = 0;
};

// What a stage multiplies before its code runs.
using ProductJob = std::vector<ProductTerm>;

// What a port of the tile program is.
struct StepPort {
  enum class Kind { kSequence, kInvariant, kVector, kState, kProduct, kOutput };

  Kind kind = Kind::kSequence;
  int index = 0;  // of the tensor or the state; of the product among its stage's
  int column = 0;
};

struct StepProgram {
  TileProgram tile;
  std::vector<StepPort> loads;
  std::vector<StepPort> stores;                   // a state's is the next value
  std::vector<std::vector<ProductJob>> products;  // of each stage
  std::vector<WeightBlock> blocks;
  // Kept values pass between stages in buffers, [batch, units] or [batch]: which of these each has.
  std::vector<int> carried_at;
  int carried = 0;
  int carried_scalars = 0;
  int products_at_once = 0;  // places of products, reused by each stage

  int row_sums() const { return tile.reductions.size(); }
  // Whether processors never need each other's values.
  bool independent() const { return blocks.empty() && row_sums() == 0; }
};

// `real` is float32 or float64: what the cell is computed in.
StepProgram CompileStep(const Cell& cell, DType real);

}  // namespace tfmem
