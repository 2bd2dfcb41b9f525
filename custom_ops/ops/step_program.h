// A cell made ready for an interpreter: for each stage of a step the products it multiplies, then
// straight-line code over tiles of [rows, units]. Pure; knows no device and no sizes.
#ifndef TFMEM_CUSTOM_OPS_OPS_STEP_PROGRAM_H_
#define TFMEM_CUSTOM_OPS_OPS_STEP_PROGRAM_H_

#include <vector>

#include "custom_ops/ops/cell.h"

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

struct ProductJob {
  int target = 0;  // a wide location
  std::vector<ProductTerm> terms;
};

// One instruction. Locations hold tiles: wide ones [rows, units], scalar ones [rows].
struct Instruction {
  enum class Kind {
    kLoadSequence,   // target <- column of sequence `index`
    kLoadInvariant,  // target <- column of invariant `index`
    kLoadVector,     // target <- column of vector `index`, in each row
    kLoadState,      // target <- state `index`
    kLoadCarried,    // target <- carried `index`
    kLoadRowSum,     // target <- row sum `index`, of what all processors stored
    kBroadcast,      // target <- the scalar in arguments[0], in each unit
    kCompute,        // target <- op(arguments)
    kStoreOutput,    // column of output `index` <- arguments[0]
    kStoreState,     // next value of state `index` <- arguments[0]
    kStoreCarried,   // carried `index` <- arguments[0]
    kStoreRowSum,    // this processor's part of row sum `index` <- arguments[0]
  };

  Kind kind = Kind::kCompute;
  bool scalar = false;  // what is loaded, computed or stored
  int index = 0;
  int column = 0;
  Elementwise op = Elementwise::kAdd;
  int target = -1;
  int arguments[3] = {-1, -1, -1};
};

struct Stage {
  std::vector<ProductJob> products;
  std::vector<Instruction> code;
};

// A constant has a location of its own, filled before the first step.
struct ConstantTile {
  double value = 0;
  bool scalar = false;
  int location = 0;
};

struct StepProgram {
  std::vector<Stage> stages;
  std::vector<WeightBlock> blocks;
  std::vector<ConstantTile> constants;
  int wide_locations = 0;  // tiles; the locations of products come after these
  int products = 0;        // locations of products, reused by each stage
  int scalar_locations = 0;
  int carried = 0;          // [batch, units] buffers that pass values between stages
  int carried_scalars = 0;  // the same, [batch]
  int row_sums = 0;

  // Whether processors never need each other's values.
  bool independent() const { return blocks.empty() && row_sums == 0; }
};

StepProgram CompileStep(const Cell& cell);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_STEP_PROGRAM_H_
