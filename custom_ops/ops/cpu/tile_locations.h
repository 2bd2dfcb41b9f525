// Where the values of a tile program lie: those that do not live at the same time share a location.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "custom_ops/ops/cpu/tile_compiler.h"
#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

// A value of one stage, which numbers its values from 0 on.
struct TileValue {
  TileType type;
  int constant = -1;  // the node of a constant
  bool view = false;
  bool own = false;  // whether no other value shares its location
};

// The number of a constant among the program's, by its node and whether it is a scalar.
using ConstantNumbers = std::map<std::pair<int, bool>, int>;

// The constants that stages read, each with a location.
ConstantNumbers PlaceConstants(const TileExpression& expression,
                               const std::vector<const std::vector<TileValue>*>& stages,
                               std::vector<TileConstant>* constants);

// Rewrites a stage's code from values to locations, and makes the program's locations as many as
// it needs. Views are counted from -2 down, since they begin after the wide locations of all
// stages.
void AssignLocations(const std::vector<TileValue>& values, const ConstantNumbers& constant_of,
                     TileStage* stage, TileProgram* program);

}  // namespace tfmem
