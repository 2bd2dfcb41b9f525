#include "custom_ops/ops/recurrent/recurrent_cut.h"

#include <algorithm>

namespace tfmem {
namespace {

constexpr int64_t kTileNumbers = 512;    // of a value: some ten values of a tile fill half an L1
constexpr int64_t kGroupNumbers = 4096;  // of a product
constexpr int64_t kLeastWork = 1 << 15;  // multiplications that are worth another thread
constexpr int64_t kLeastRows = 4;        // the same, if threads divide the rows

int64_t CeilOf(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `index` of `parts` equal ones of `size` begins.
int64_t Begin(int64_t size, int64_t parts, int64_t index) { return size * index / parts; }

}  // namespace

RecurrentCut CutRecurrentCall(const StepProgram& program, int64_t panel, int64_t units,
                              int64_t batch, int directions, int threads) {
  RecurrentCut cut;
  cut.units = units;
  cut.batch = batch;
  cut.lanes = panel / 4;
  cut.panel = units == 1 ? 1 : panel;
  cut.tiles = CeilOf(units, panel);
  cut.directions = directions;
  int64_t instructions = 0;
  for (const TileStage& stage : program.tile.stages) {
    for (const TileInstruction& instruction : stage.code) {
      instructions += instruction.kind != TileInstruction::Kind::kLoadView;
    }
  }
  const double weights = static_cast<double>(units) * program.blocks.size();
  const double work =
      static_cast<double>(directions) * batch * units * (weights + 2 * instructions);
  cut.threads = std::clamp<double>(work / kLeastWork, 1, threads);
  const int parts = CeilOf(cut.threads, directions);
  cut.unit_parts = std::min<int64_t>(parts, cut.tiles);
  const int64_t least_rows = cut.panel == 1 ? cut.lanes : kLeastRows;
  cut.row_parts = std::clamp<int64_t>(batch / least_rows, 1, parts / cut.unit_parts);
  cut.threads = std::min(cut.threads, cut.shares());

  const int64_t rows = std::max<int64_t>(CeilOf(batch, cut.row_parts), 1);
  const int64_t width = CeilOf(cut.tiles, cut.unit_parts) * cut.panel;
  cut.group_width = std::clamp(kTileNumbers / rows / cut.panel * cut.panel, cut.panel, width);
  cut.group_rows = std::clamp<int64_t>(kGroupNumbers / cut.group_width, 1, rows);
  cut.tile_rows = std::clamp<int64_t>(kTileNumbers / cut.group_width, 1, cut.group_rows);
  return cut;
}

RecurrentRange RecurrentCut::RangeOf(int share) const {
  const int units_part = share % unit_parts;
  const int rows_part = share % parts() / unit_parts;
  const int64_t first_tile = Begin(tiles, unit_parts, units_part);
  RecurrentRange range;
  range.share = share;
  range.direction = share / parts();
  range.first_row = Begin(batch, row_parts, rows_part);
  range.rows = Begin(batch, row_parts, rows_part + 1) - range.first_row;
  range.first_unit = first_tile * panel;
  range.width = (Begin(tiles, unit_parts, units_part + 1) - first_tile) * panel;
  return range;
}

RecurrentCut::Panels RecurrentCut::PanelsOf(int share) const {
  const RecurrentRange range = RangeOf(share);
  const int rows_part = share % parts() / unit_parts;
  const int64_t first = range.first_unit / panel;
  const int64_t count = range.width / panel;
  return {first + Begin(count, row_parts, rows_part),
          first + Begin(count, row_parts, rows_part + 1)};
}

int64_t RecurrentCut::Valid(const RecurrentRange& range) const {
  return std::min(range.width, units - range.first_unit);
}

}  // namespace tfmem
