// From an expression to a tile program: dead nodes dropped, loads where a value is first asked for,
// locations shared by values that do not live at the same time.
#pragma once

#include <map>
#include <vector>

#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

// Numbers given out to keys, in the order in which they come up.
template <typename Key>
class Numbering {
 public:
  int Of(const Key& key) { return numbers_.try_emplace(key, numbers_.size()).first->second; }
  bool Has(const Key& key) const { return numbers_.count(key) > 0; }
  int size() const { return numbers_.size(); }

 private:
  std::map<Key, int> numbers_;
};

struct TileNode {
  enum class Kind {
    kLoad,  // of a port, in each stage that needs it
    kView,  // of a port, where it lies in the node's own stage; made of its kept arguments
    kConstant,
    kApply,
    kCast,
    kReduce,       // over the columns, within a tile
    kReduceTiles,  // over all tiles of an earlier stage
    kGather,       // of a port, at offsets that the argument has
  };

  Kind kind = Kind::kConstant;
  TileType type;
  int port = 0;                        // of a load, a view or a gather
  bool same_rows = false;              // of a load: all its rows are the same
  ConstantValue value;                 // of a constant
  Elementwise op = Elementwise::kAdd;  // of kApply
  Reduction reduction = Reduction::kSum;
  bool rows = false;  // the axes of kReduceTiles
  bool columns = false;
  std::vector<int> arguments;  // earlier nodes
  int stage = 0;               // the first in which it can be computed, or be read
};

struct TileStore {
  int port = 0;
  int node = 0;
};

// A value that goes to a reduction or a check, by its number.
struct TileSink {
  int number = 0;
  int node = 0;
};

struct TileExpression {
  std::vector<TileNode> nodes;        // each refers to earlier ones
  std::vector<TileType> loads;        // of the ports that are read
  std::vector<TileStore> stores;      // in this order where they are of one node
  std::vector<TileType> store_types;  // of the ports that are written
  std::vector<int> domains;           // of each stage
  // Reductions whose results come back through ports; there are no kReduceTiles beside them.
  std::vector<TileReduction> reductions;
  std::vector<TileSink> parts;
  std::vector<TileSink> checks;  // before any other node reads the value
};

struct CompiledTile {
  TileProgram program;
  std::vector<int> kept;  // for each node its number among the program's kept values, or -1
  std::vector<bool> live;
};

// The expression is right: arguments are earlier nodes of fitting types, ports are within range,
// and no node's stage is before its arguments'.
CompiledTile CompileTile(const TileExpression& expression);

}  // namespace tfmem
