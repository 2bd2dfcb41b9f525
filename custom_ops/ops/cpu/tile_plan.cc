#include "custom_ops/ops/cpu/tile_plan.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <variant>

namespace tfmem {
namespace {

using Code = TileInstruction::Kind;

constexpr int64_t kTileNumbers = 1024;        // of a value: some tiles fill half an L1
constexpr int64_t kTransposed = 32;           // rows and columns of a tile that is read across
constexpr int64_t kMostTransposed = 1 << 14;  // numbers of one whose rows are whole
constexpr int64_t kPieceNumbers = 1 << 14;
constexpr int64_t kPieceColumns = 1 << 13;
constexpr int64_t kMostPieces = 64;
constexpr int64_t kFinishNumbers = 1 << 12;
constexpr double kWorkNs = 0.1;  // of an instruction for a number
constexpr int kDraw = 10;        // instructions for a random number

int64_t Parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Arrays one after the other, each of whole cache lines.
int64_t Reserve(int64_t bytes, int64_t* end) {
  const int64_t place = *end;
  *end = std::min(place + (bytes + 63) / 64 * 64, kMostWorkspace);
  return place;
}

bool HasPort(Code kind) {
  return kind == Code::kLoad || kind == Code::kStore || kind == Code::kGather ||
         kind == Code::kGatherRows;
}

bool Has(const TileStage& stage, Code kind) {
  return std::any_of(stage.code.begin(), stage.code.end(),
                     [kind](const TileInstruction& one) { return one.kind == kind; });
}

// Bytes of the longest numbers that the program's tiles hold.
int64_t MostBytes(const TileProgram& program) {
  int most = 1;
  for (const TileConstant& constant : program.constants) {
    most = std::max(most, TileBytes(constant.type.dtype));
  }
  for (const TileStage& stage : program.stages) {
    for (const TileInstruction& instruction : stage.code) {
      most = std::max(most, TileBytes(instruction.type.dtype));
    }
  }
  return most;
}

double WorkOf(const ExpressionTiles& tiles, const TileStage& stage) {
  double work = 0;
  for (const TileInstruction& instruction : stage.code) {
    if (instruction.type.scalar && instruction.kind != Code::kReduce) continue;
    const bool loads = instruction.kind == Code::kLoad;
    const bool draws = loads && tiles.loads[instruction.index].counter >= 0;
    work += instruction.kind == Code::kCompute ? InfoOf(instruction.op).work : draws ? kDraw : 1;
  }
  return work * kWorkNs;
}

}  // namespace

TilePlan::TilePlan(ExpressionTiles compiled, const InstructionSet& set)
    : tiles(std::move(compiled)), kernels(set) {
  for (const TilePort& port : tiles.loads) loads.emplace_back(port, tiles);
  for (const TilePort& port : tiles.stores) stores.emplace_back(port, tiles);
  for (const TileBuffer& buffer : tiles.buffers) {
    buffers.push_back(
        Reserve(WholeVectors(buffer.numbers) * TileBytes(buffer.dtype), &shared_bytes));
  }
  parts.resize(tiles.totals.size());
  stages.resize(tiles.program.stages.size());
  for (size_t stage = 0; stage < stages.size(); ++stage) PlanStage(stage);
  PlanLevels();
  FillConstants();
}

void TilePlan::PlanStage(int number) {
  const TileStage& stage = tiles.program.stages[number];
  StagePlan& plan = stages[number];
  const TileDomain& domain = tiles.domains[stage.domain];
  plan.rows = tiles.Positions(domain.rows);
  plan.columns = tiles.Positions(domain.columns);
  for (const TileInstruction& instruction : stage.code) {
    plan.ports.push_back(HasPort(instruction.kind) ? instruction.index : -1);
  }
  CutTiles(stage, &plan);
  CutPieces(stage, &plan);
  work += plan.rows * plan.columns * WorkOf(tiles, stage);

  const int64_t bytes = MostBytes(tiles.program);
  const int64_t wide = WholeVectors(plan.tile_rows * plan.tile_columns);
  const int64_t scalar = WholeVectors(plan.tile_rows);
  plan.wide_bytes = wide * bytes + kSplatNumbers * 8;
  plan.scalar_bytes = scalar * bytes + kSplatNumbers * 8;
  int64_t end = 0;
  Reserve(tiles.program.wide_locations * plan.wide_bytes, &end);
  plan.scalars = Reserve(tiles.program.scalar_locations * plan.scalar_bytes, &end);
  plan.scratch = Reserve(wide * sizeof(uint16_t), &end);
  plan.sums = Reserve(scalar * 8, &end);
  for (const TileInstruction& instruction : stage.code) {
    if (instruction.kind != Code::kPart) continue;
    const bool columns = tiles.program.reductions[instruction.index].columns;
    const int64_t numbers = WholeVectors(columns ? 1 : plan.piece_columns);
    parts[instruction.index].partial = Reserve(numbers * 8, &end);
  }
  thread_bytes = std::max(thread_bytes, end);
  PlanParts(number);
  FindDirectStores(number);
}

// Whole rows, where they are reduced; so many numbers else, in columns of about the same length.
void TilePlan::CutTiles(const TileStage& stage, StagePlan* plan) const {
  bool transposed = false;
  for (const TileInstruction& instruction : stage.code) {
    if (instruction.type.scalar) continue;
    if (instruction.kind == Code::kLoad) transposed |= loads[instruction.index].transposed();
    if (instruction.kind == Code::kStore) transposed |= stores[instruction.index].transposed();
  }
  plan->tile_columns = plan->columns;
  if (!Has(stage, Code::kReduce)) {
    const int64_t most = transposed && plan->rows > 1 ? kTransposed : kTileNumbers;
    const int64_t tiles = std::max<int64_t>(Parts(plan->columns, most), 1);
    plan->tile_columns = std::min(WholeVectors(Parts(plan->columns, tiles)), plan->columns);
    if (transposed && plan->rows > 1) plan->tile_columns = std::min(plan->columns, most);
  }
  const int64_t rows = kTileNumbers / std::max<int64_t>(plan->tile_columns, 1);
  const int64_t most = kMostTransposed / std::max<int64_t>(plan->tile_columns, 1);
  const int64_t least = transposed ? std::clamp<int64_t>(most, 1, kTransposed / 2) : 1;
  plan->tile_rows = std::clamp<int64_t>(rows, least, std::max(plan->rows, least));
}

// As their number decides the order in which numbers are added up, it depends on the sizes alone.
void TilePlan::CutPieces(const TileStage& stage, StagePlan* plan) const {
  const int64_t numbers = plan->rows * plan->columns;
  plan->segment_rows = plan->rows;
  for (const TileInstruction& instruction : stage.code) {
    if (instruction.kind != Code::kPart || !tiles.totals[instruction.index].keeps_rows) continue;
    const TileDomain& domain = tiles.domains[stage.domain];
    const std::vector<int> reduced(domain.rows.begin() + domain.kept, domain.rows.end());
    plan->segment_rows = tiles.Positions(reduced);
  }
  if (numbers == 0) return;  // of no pieces
  const int64_t wanted = std::clamp<int64_t>(numbers / kPieceNumbers, 1, kMostPieces);
  plan->column_pieces = 1;
  plan->piece_columns = plan->columns;
  if (plan->tile_columns < plan->columns) {
    const int64_t tile_pieces = std::max<int64_t>(kPieceColumns / plan->tile_columns, 1);
    plan->piece_columns = std::min(tile_pieces * plan->tile_columns, plan->columns);
    plan->column_pieces = Parts(plan->columns, plan->piece_columns);
  }
  const int64_t segments = plan->rows / plan->segment_rows;
  const int64_t wanted_rows = Parts(wanted, plan->column_pieces);
  if (segments >= wanted_rows && plan->segment_rows < plan->rows) {
    plan->row_pieces = wanted_rows;
    return;
  }
  const int64_t tiles_of_segment = Parts(plan->segment_rows, plan->tile_rows);
  plan->segment_pieces = std::min(Parts(wanted_rows, segments), tiles_of_segment);
  plan->row_pieces = segments * plan->segment_pieces;
}

void TilePlan::PlanParts(int number) {
  const StagePlan& stage = stages[number];
  for (const TileInstruction& instruction : tiles.program.stages[number].code) {
    if (instruction.kind != Code::kPart) continue;
    const TileReduction& reduction = tiles.program.reductions[instruction.index];
    const ExpressionTiles::Totals& totals = tiles.totals[instruction.index];
    PartPlan& part = parts[instruction.index];
    part.segment_rows = totals.keeps_rows ? stage.segment_rows : stage.rows;
    part.totals = reduction.columns || reduction.type.scalar ? 1 : stage.columns;
    part.count = totals.count;
    part.results = buffers[totals.buffer];
    part.place = part.results;
    const int64_t results = tiles.buffers[totals.buffer].numbers;
    part.segments = part.totals == 0 ? 0 : results / part.totals;
    if (stage.pieces() == 0) continue;  // no slots: nothing is reduced
    part.slots = totals.keeps_rows ? stage.segment_pieces : stage.row_pieces;
    if (reduction.columns) part.slots *= stage.column_pieces;
    if (!part.combined()) continue;
    const int64_t numbers = WholeVectors(results * part.slots);
    part.place = Reserve(numbers * TileBytes(reduction.type.dtype), &shared_bytes);
  }
}

// A value that is stored right after it was computed goes where it is stored.
void TilePlan::FindDirectStores(int number) {
  const std::vector<TileInstruction>& code = tiles.program.stages[number].code;
  std::vector<int>& direct = stages[number].direct;
  direct.assign(code.size(), -1);
  for (size_t i = 1; i < code.size(); ++i) {
    if (code[i].kind != Code::kStore) continue;
    const TileInstruction& before = code[i - 1];
    const bool computes = before.kind == Code::kCompute || before.kind == Code::kCast;
    if (computes && before.target == code[i].arguments[0] && before.type == code[i].type) {
      direct[i - 1] = i;
    }
  }
}

void TilePlan::PlanLevels() {
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (stage == 0 || tiles.levels[stage] != tiles.levels[stage - 1]) {
      levels.emplace_back().first_stage = stage;
    }
    LevelPlan& level = levels.back();
    level.end_stage = stage + 1;
    level.pieces += stages[stage].pieces();
    for (const TileInstruction& instruction : tiles.program.stages[stage].code) {
      if (instruction.kind != Code::kPart) continue;
      const PartPlan& part = parts[instruction.index];
      const TileReduction& reduction = tiles.program.reductions[instruction.index];
      const bool changes = reduction.reduction == Reduction::kMean || IsHalf(reduction.type.dtype);
      if (!part.combined() && !changes) continue;
      // Results of one slot lie one behind the other.
      const bool single = part.slots <= 1;
      const int64_t segments = single ? 1 : part.segments;
      const int64_t numbers = part.totals * (single ? part.segments : 1);
      for (int64_t segment = 0; segment < segments; ++segment) {
        for (int64_t first = 0; first < numbers; first += kFinishNumbers) {
          level.finish.push_back(
              {instruction.index, segment, first, std::min(kFinishNumbers, numbers - first)});
        }
      }
    }
  }
}

void TilePlan::FillConstants() {
  const std::vector<TileConstant>& all = tiles.program.constants;
  constants.reset(new char[all.size() * kSplatNumbers * 8]);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto fill = [&](auto value) {
      decltype(value) values[kSplatNumbers];
      std::fill_n(values, kSplatNumbers, value);
      const DType from = std::is_integral_v<decltype(value)> ? DType::kInt64 : DType::kFloat64;
      kernels.tile.cast(from, all[i].type.dtype, values, constants.get() + i * kSplatNumbers * 8,
                        kSplatNumbers);
    };
    std::visit(fill, all[i].value);
  }
}

}  // namespace tfmem
