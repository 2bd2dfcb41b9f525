#include "custom_ops/ops/cpu/tile_worker.h"

namespace tfmem {
namespace {

// Sums of so many tiles are added up before they are added to others: errors grow with the length
// of a sum.
constexpr int64_t kTilesOfSum = 32;

}  // namespace

TileWorker::Piece TileWorker::PieceAt(int64_t number) const {
  Piece piece;
  piece.row_piece = number % stage_.row_pieces;
  piece.column_piece = number / stage_.row_pieces;
  TileRange& range = piece.range;
  int64_t end = 0;
  if (stage_.segment_pieces > 1) {
    const int64_t segment = piece.row_piece / stage_.segment_pieces;
    const int64_t part = piece.row_piece % stage_.segment_pieces;
    const int64_t first = segment * stage_.segment_rows;
    range.first_row = first + stage_.segment_rows * part / stage_.segment_pieces;
    end = first + stage_.segment_rows * (part + 1) / stage_.segment_pieces;
  } else {
    const int64_t segments = stage_.rows / stage_.segment_rows;
    range.first_row = segments * piece.row_piece / stage_.row_pieces * stage_.segment_rows;
    end = segments * (piece.row_piece + 1) / stage_.row_pieces * stage_.segment_rows;
  }
  range.rows = end - range.first_row;
  range.first_column = piece.column_piece * stage_.piece_columns;
  range.columns = std::min(stage_.piece_columns, stage_.columns - range.first_column);
  return piece;
}

void TileWorker::RunPieces(int64_t first, int64_t end) {
  TileInterpreter interpreter(plan_.tiles.program, plan_.kernels, *this);
  for (int64_t number = first; number < end; ++number) {
    piece_ = PieceAt(number);
    const TileRange& all = piece_.range;
    const int64_t end_row = all.first_row + all.rows, end_column = all.first_column + all.columns;
    for (int64_t row = all.first_row; row < end_row; row += stage_.tile_rows) {
      for (int64_t column = all.first_column; column < end_column; column += stage_.tile_columns) {
        range_ = {row, std::min(stage_.tile_rows, end_row - row), column,
                  std::min(stage_.tile_columns, end_column - column)};
        interpreter.Run(code_);
      }
    }
  }
}

void* TileWorker::Tensor(int number) const {
  if (number < 0) return nullptr;
  if (number < memory_.input_count) return const_cast<void*>(memory_.inputs[number]);
  number -= memory_.input_count;
  if (number < memory_.output_count) return memory_.outputs[number];
  return memory_.shared + plan_.buffers[number - memory_.output_count];
}

const void* TileWorker::Load(const TileInstruction& instruction, void* tile) {
  const TensorPort& port = plan_.loads[instruction.index];
  const void* tensor = Tensor(plan_.tiles.loads[instruction.index].tensor);
  const int counter = plan_.tiles.loads[instruction.index].counter;
  const auto load = [&](const TileRange& part) -> const void* {
    if (!port.random()) return port.Load(part, tensor, tile, scratch(), plan_.kernels);
    port.Draw(part, static_cast<const uint64_t*>(tensor),
              static_cast<const uint64_t*>(Tensor(counter)), tile, plan_.kernels);
    return tile;
  };
  TileRange range = RangeOf(instruction.type);
  if (!instruction.same_rows) return load(range);
  Loaded& loaded = loaded_[&instruction - code_.code.data()];
  if (loaded.first_column != range.first_column || loaded.columns != range.columns) {
    range.rows = stage_.tile_rows;
    loaded = {load(range), range.first_column, range.columns};
  }
  return loaded.at;
}

void* TileWorker::Target(const TileInstruction& instruction, void* tile) const {
  const int store = stage_.direct[&instruction - code_.code.data()];
  if (store < 0) return tile;
  const int port = code_.code[store].index;
  void* direct =
      plan_.stores[port].Direct(RangeOf(instruction.type), Tensor(plan_.tiles.stores[port].tensor));
  return direct != nullptr ? direct : tile;
}

void TileWorker::Store(const TileInstruction& instruction, const void* value) {
  const int index = instruction.index;
  if (instruction.kind == TileInstruction::Kind::kPart) return AddPart(index, value);
  // One number a row is stored with the first columns.
  if (instruction.type.scalar && range_.first_column > 0) return;
  void* tensor = Tensor(plan_.tiles.stores[index].tensor);
  const TensorPort& port = plan_.stores[index];
  const TileRange range = RangeOf(instruction.type);
  if (value != port.Direct(range, tensor)) {
    port.Store(range, value, tensor, scratch(), plan_.kernels);
  }
}

const void* TileWorker::Gather(const TileInstruction& instruction, const void* offsets,
                               void* tile) const {
  const int index = instruction.index;
  return plan_.loads[index].Gather(
      RangeOf(instruction.type), Tensor(plan_.tiles.loads[index].tensor),
      static_cast<const int64_t*>(offsets), instruction.kind == TileInstruction::Kind::kGatherRows,
      tile, scratch(), plan_.kernels);
}

bool TileWorker::Check(const TileInstruction& instruction, const void* indices) {
  const int64_t size = plan_.tiles.checks[instruction.index].size;
  const int64_t* values = static_cast<const int64_t*>(indices);
  const int64_t count = Numbers(instruction.type.scalar);
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] >= 0 && values[i] < size) continue;
    const TileRange range = RangeOf(instruction.type);
    const IndexFailure failure{instruction.index, code_.domain, range.first_row + i / range.columns,
                               range.first_column + i % range.columns, values[i]};
    const std::lock_guard<std::mutex> lock(memory_.mutex);
    const IndexFailure& known = memory_.failure;
    const bool earlier = failure.check != known.check ? failure.check < known.check
                         : failure.row != known.row   ? failure.row < known.row
                                                      : failure.column < known.column;
    if (known.check < 0 || earlier) memory_.failure = failure;
    memory_.failed_level = level_;
    return false;
  }
  return true;
}

void TileWorker::AddPart(int index, const void* value) {
  const TileReduction& reduction = plan_.tiles.program.reductions[index];
  const PartPlan& part = plan_.parts[index];
  if (reduction.type.scalar && range_.first_column > 0) return;  // seen with the first columns
  const DType dtype = reduction.type.dtype;
  const char* values = static_cast<const char*>(value);
  int64_t row_bytes = RangeOf(reduction.type).columns * TileBytes(dtype);
  if (reduction.columns) {
    char* sums = own_ + stage_.sums;
    plan_.kernels.tile.reduce_columns(reduction.reduction, dtype, value, range_.rows,
                                      range_.columns, sums);
    values = sums;
    row_bytes = TileBytes(dtype);
  }
  const int64_t end = range_.first_row + range_.rows;
  for (int64_t row = range_.first_row; row < end;) {
    const int64_t next = std::min(end, (row / part.segment_rows + 1) * part.segment_rows);
    AddSegment(index, values, row, next - row);
    values += (next - row) * row_bytes;
    row = next;
  }
}

int64_t TileWorker::SlotOf(const PartPlan& part, int64_t row) const {
  const bool keeps = part.segment_rows < stage_.rows;
  int64_t slot = keeps ? row / part.segment_rows : 0;
  if (!part.combined()) return slot;
  const TileReduction& reduction = plan_.tiles.program.reductions[&part - plan_.parts.data()];
  const int64_t pieces = keeps ? stage_.segment_pieces : stage_.row_pieces;
  slot = slot * pieces + piece_.row_piece % pieces;
  return reduction.columns ? slot * stage_.column_pieces + piece_.column_piece : slot;
}

// Rows of one segment.
void TileWorker::AddSegment(int index, const char* values, int64_t row, int64_t rows) {
  const TileReduction& reduction = plan_.tiles.program.reductions[index];
  const PartPlan& part = plan_.parts[index];
  const DType dtype = reduction.type.dtype;
  const int64_t bytes = TileBytes(dtype);
  const int64_t columns = part.totals == 1 ? 1 : range_.columns;
  const int64_t column = part.totals == 1 ? 0 : range_.first_column;
  char* slot = memory_.shared + part.place + (SlotOf(part, row) * part.totals + column) * bytes;
  const auto reduce = [&](const void* from, int64_t count, void* to, bool begin) {
    plan_.kernels.tile.reduce_rows(reduction.reduction, dtype, from, count, columns, to, begin);
  };

  const TileRange& piece = piece_.range;
  const int64_t segment = row / part.segment_rows * part.segment_rows;
  const int64_t first = std::max(segment, piece.first_row);
  const int64_t end = std::min(segment + part.segment_rows, piece.first_row + piece.rows);
  const int64_t tile = (row - first + stage_.tile_rows - 1) / stage_.tile_rows;
  // A part of columns is added to by all of a row's tiles.
  const bool first_columns = !reduction.columns || range_.first_column == piece.first_column;
  const bool last_columns = !reduction.columns || range_.first_column + range_.columns ==
                                                      piece.first_column + piece.columns;
  const bool begin = tile % kTilesOfSum == 0 && first_columns;
  const bool done = (tile % kTilesOfSum == kTilesOfSum - 1 || row + rows == end) && last_columns;
  const bool begin_slot = tile < kTilesOfSum;
  if (begin && done) return reduce(values, rows, slot, begin_slot);
  char* partial = own_ + part.partial;
  if (part.totals != 1) partial += (column - piece.first_column) * bytes;
  reduce(values, rows, partial, begin);
  if (done) reduce(partial, 1, slot, begin_slot);
}

void FinishReduction(const TilePlan& plan, const FinishTask& task, char* shared) {
  const TileReduction& reduction = plan.tiles.program.reductions[task.reduction];
  const PartPlan& part = plan.parts[task.reduction];
  const TileKernels& kernels = plan.kernels.tile;
  const DType dtype = reduction.type.dtype;
  const int64_t bytes = TileBytes(dtype);
  char* results = shared + part.results + (task.segment * part.totals + task.first) * bytes;
  if (part.slots == 0) {
    kernels.reduce_columns(reduction.reduction, dtype, results, task.count, 0, results);
  } else if (part.combined()) {
    const int64_t slots = task.segment * part.slots;
    for (int64_t slot = 0; slot < part.slots; ++slot) {
      const char* from = shared + part.place + ((slots + slot) * part.totals + task.first) * bytes;
      kernels.reduce_rows(reduction.reduction, dtype, from, 1, task.count, results, slot == 0);
    }
  }
  if (reduction.reduction == Reduction::kMean) {
    kernels.divide(dtype, results, part.count, task.count);
  }
  if (IsHalf(dtype)) kernels.cast(DType::kFloat32, dtype, results, results, task.count);
}

}  // namespace tfmem
