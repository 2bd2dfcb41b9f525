// One thread's work on the pieces of a program over tensors: a tile program's environment.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <vector>

#include "custom_ops/ops/cpu/tile_interpreter.h"
#include "custom_ops/ops/cpu/tile_plan.h"

namespace tfmem {

// The first index, in the order of positions, that was out of bounds.
struct IndexFailure {
  int check = -1;  // -1: there was none
  int domain = 0;
  int64_t row = 0;
  int64_t column = 0;
  int64_t value = 0;
};

// What one run reads and writes.
struct RunMemory {
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
  int input_count = 0;
  int output_count = 0;
  char* shared = nullptr;
  char* threads = nullptr;

  std::atomic<int> failed_level{std::numeric_limits<int>::max()};  // later ones do not run
  std::mutex mutex;                                                // of the failure
  IndexFailure failure;
};

// A stage's tiles on one thread.
class TileWorker {
 public:
  static constexpr bool kOfTensors = true;

  TileWorker(const TilePlan& plan, RunMemory* memory, int stage, int thread)
      : plan_(plan),
        stage_(plan.stages[stage]),
        code_(plan.tiles.program.stages[stage]),
        level_(plan.tiles.levels[stage]),
        memory_(*memory),
        own_(memory->threads + thread * plan.thread_bytes),
        loaded_(code_.code.size()) {}

  void RunPieces(int64_t first, int64_t end);

  // ---- what the interpreter asks for ----

  int64_t rows() const { return range_.rows; }
  int64_t columns() const { return range_.columns; }
  int64_t Numbers(bool scalar) const { return scalar ? range_.rows : range_.rows * range_.columns; }
  void* Tile(TileType type, int location) const {
    return type.scalar ? own_ + stage_.scalars + location * stage_.scalar_bytes
                       : own_ + location * stage_.wide_bytes;
  }
  void* Splat(TileType type, int location) const {
    const int64_t bytes = type.scalar ? stage_.scalar_bytes : stage_.wide_bytes;
    return static_cast<char*>(Tile(type, location)) + bytes - kSplatNumbers * 8;
  }
  const void* Constant(int number) const { return plan_.Constant(number); }

  const void* Load(const TileInstruction& instruction, void* tile);
  void* Target(const TileInstruction& instruction, void* tile) const;
  void Store(const TileInstruction& instruction, const void* value);
  const void* Gather(const TileInstruction& instruction, const void* offsets, void* tile) const;
  bool Check(const TileInstruction& instruction, const void* indices);

 private:
  // Rows and columns that one piece has.
  struct Piece {
    TileRange range;
    int64_t row_piece = 0;
    int64_t column_piece = 0;
  };
  // The part of a load whose rows are all the same that is in its tile.
  struct Loaded {
    const void* at = nullptr;
    int64_t first_column = -1;
    int64_t columns = 0;
  };

  Piece PieceAt(int64_t number) const;
  void AddPart(int index, const void* value);
  void AddSegment(int index, const char* values, int64_t row, int64_t rows);
  int64_t SlotOf(const PartPlan& part, int64_t row) const;

  TileRange RangeOf(TileType type) const { return type.scalar ? range_.scalars() : range_; }
  void* Tensor(int number) const;
  void* scratch() const { return own_ + stage_.scratch; }

  const TilePlan& plan_;
  const StagePlan& stage_;
  const TileStage& code_;
  const int level_;
  RunMemory& memory_;
  char* const own_;
  std::vector<Loaded> loaded_;  // of each instruction
  Piece piece_;
  TileRange range_;
};

// Combines what the pieces gave to some results of a reduction.
void FinishReduction(const TilePlan& plan, const FinishTask& task, char* shared);

}  // namespace tfmem
