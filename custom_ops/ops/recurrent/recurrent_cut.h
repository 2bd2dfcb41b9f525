// How a call of TfmemRecurrent on the CPU is divided among threads, and what each works on.
#pragma once

#include <cstdint>

#include "custom_ops/ops/recurrent/step_program.h"

namespace tfmem {

// A share, or a part of one that is worked on at a time: some rows and units of a direction.
struct RecurrentRange {
  int share = 0;
  int direction = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_unit = 0;
  int64_t width = 0;  // a multiple of the panel, so it may go past the last unit

  int64_t end_row() const { return first_row + rows; }
  int64_t end_unit() const { return first_unit + width; }
};

struct RecurrentCut {
  int64_t units = 0;
  int64_t batch = 0;
  int64_t lanes = 0;  // numbers of a vector
  // Units in a panel of weights: four vectors. 1 where there is one unit: then vectors are of rows.
  int64_t panel = 0;
  int64_t tiles = 0;  // panels that cover the units
  int directions = 1;
  int threads = 1;
  int unit_parts = 1;
  int row_parts = 1;
  int64_t group_width = 0;  // units in a group: a multiple of `panel`
  int64_t group_rows = 0;   // rows that are multiplied at a time
  int64_t tile_rows = 0;    // rows that are interpreted at a time

  int parts() const { return unit_parts * row_parts; }
  int shares() const { return directions * parts(); }
  int64_t stride() const { return tiles * panel; }     // of a row of states
  int64_t buffer() const { return batch * stride(); }  // numbers in all rows
  int64_t group() const { return group_rows * group_width; }
  int64_t tile() const { return tile_rows * group_width; }
  int64_t scalars() const { return tile_rows + lanes; }  // of a tile, with room for whole vectors

  RecurrentRange RangeOf(int share) const;
  // The panels that a share packs: those of its units are divided among the shares of other rows.
  struct Panels {
    int64_t first = 0;
    int64_t end = 0;
  };
  Panels PanelsOf(int share) const;
  // Units of a range that there are.
  int64_t Valid(const RecurrentRange& range) const;
};

RecurrentCut CutRecurrentCall(const StepProgram& program, int64_t panel, int64_t units,
                              int64_t batch, int directions, int threads);

}  // namespace tfmem
