// Where and when the nodes of a sized program are computed: in which domain, and at which level.
//
// All tiles of a domain are done with one level before any begins with the next, so a value passes
// from level to level, and from domain to domain, through memory. What is computed in one domain at
// one level is a stage.
#pragma once

#include <vector>

#include "custom_ops/ops/cpu/sized_expression.h"
#include "custom_ops/ops/cpu/tile_domains.h"

namespace tfmem {

struct PlacedNode {
  enum class Kind {
    kLoad,      // of a tensor, or of positions; where it is needed
    kConstant,  // the same
    kApply,
    kCast,
    kReduceInTile,
    kReduceTiles,  // the parts of its level's tiles; the result is there at the next
    kGather,       // of a tensor, at offsets that the argument has
  };

  Kind kind = Kind::kConstant;
  DType dtype = DType::kFloat32;
  int tensor = -1;   // of a load or a gather; -1: positions
  int counter = -1;  // of a load of random numbers, whose key `tensor` is
  Access access;     // of a load or a gather
  ConstantValue value;
  Elementwise op = Elementwise::kAdd;
  Reduction reduction = Reduction::kSum;
  AxisSet axes;                // that are reduced
  std::vector<int> arguments;  // earlier nodes
  AxisSet varies;
  int check = -1;   // of `Placement::checks`, that the value has to pass
  int domain = -1;  // -1: wherever it is needed
  int level = 0;

  bool leaf() const { return domain < 0; }
};

// A value of 64 bits that is to be from 0 to size - 1.
struct IndexCheck {
  int64_t size = 0;
  AxisSet axes;  // of the program, that the index varies along: for the message
};

struct PlacedStore {
  int node = 0;  // of a domain along exactly the axes of the output
  int output = 0;
};

struct Placement {
  std::vector<PlacedNode> nodes;
  std::vector<PlacedStore> stores;
  std::vector<IndexCheck> checks;
};

Placement Place(const SizedExpression& expression, TileDomains* domains);

}  // namespace tfmem
