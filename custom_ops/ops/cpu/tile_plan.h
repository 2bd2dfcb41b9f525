// How the stages of a program over tensors are cut into tiles and pieces, and where everything lies
// that is no input and no output: all that is known once sizes are.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/expression_tiles.h"
#include "custom_ops/ops/cpu/tensor_port.h"

namespace tfmem {

inline constexpr int64_t kSplatNumbers = 64;                 // of one that stands for a whole tile
inline constexpr int64_t kMostWorkspace = int64_t{1} << 42;  // bytes

inline int64_t WholeVectors(int64_t numbers) { return (numbers + 63) / 64 * 64; }

// One reduction over the tiles of a stage.
//
// The rows that go into one result are a segment, and may be cut into several pieces; so may the
// columns. Each piece puts its part into a slot, and slots of one segment lie one after the other:
// [segments, slots, totals]. With one slot a segment they are the results.
struct PartPlan {
  int64_t segment_rows = 0;
  int64_t segments = 0;
  int64_t slots = 0;    // of a segment
  int64_t totals = 0;   // numbers of a slot
  int64_t place = 0;    // of the slots in the shared memory
  int64_t results = 0;  // the same of what later stages read
  int64_t count = 0;    // numbers that go into a result
  int64_t partial = 0;  // in a thread's memory: a part of a part

  bool combined() const { return slots != 1; }
};

struct StagePlan {
  int64_t rows = 0;  // of the domain
  int64_t columns = 0;
  int64_t tile_rows = 0;
  int64_t tile_columns = 0;
  int64_t segment_rows = 0;    // of reductions that keep axes of the rows; else all
  int64_t row_pieces = 0;      // one or more segments each, or
  int64_t segment_pieces = 1;  // so many for a segment
  int64_t column_pieces = 0;
  int64_t piece_columns = 0;

  int64_t wide_bytes = 0;  // of a location: a tile, and behind it a splat
  int64_t scalar_bytes = 0;
  int64_t scalars = 0;  // where they begin in a thread's memory
  int64_t scratch = 0;
  int64_t sums = 0;

  // For each instruction the port, or -1; and for one whose value goes to a port as well the
  // number of the instruction that stores it, or -1.
  std::vector<int> ports;
  std::vector<int> direct;

  int64_t pieces() const { return row_pieces * column_pieces; }
};

// Numbers of a reduction's results, to be combined of its slots or changed in place.
struct FinishTask {
  int reduction = 0;
  int64_t segment = 0;
  int64_t first = 0;  // of the totals
  int64_t count = 0;
};

// Stages that do not wait for each other, and what is to be done before any later one begins.
struct LevelPlan {
  int first_stage = 0;
  int end_stage = 0;
  int64_t pieces = 0;
  std::vector<FinishTask> finish;
};

struct TilePlan {
  TilePlan(ExpressionTiles tiles, const InstructionSet& kernels);

  const ExpressionTiles tiles;
  const InstructionSet& kernels;
  std::vector<TensorPort> loads;
  std::vector<TensorPort> stores;
  std::vector<StagePlan> stages;
  std::vector<LevelPlan> levels;
  std::vector<PartPlan> parts;   // of each reduction
  std::vector<int64_t> buffers;  // where they lie in the shared memory
  int64_t shared_bytes = 0;
  int64_t thread_bytes = 0;
  double work = 0;                    // about nanoseconds
  std::unique_ptr<char[]> constants;  // 64 numbers of each

  const void* Constant(int number) const { return constants.get() + number * kSplatNumbers * 8; }

 private:
  void PlanStage(int number);
  void CutTiles(const TileStage& stage, StagePlan* plan) const;
  void CutPieces(const TileStage& stage, StagePlan* plan) const;
  void PlanParts(int number);
  void FindDirectStores(int number);
  void PlanLevels();
  void FillConstants();
};

}  // namespace tfmem
