#include "custom_ops/ops/matmul/matmul_tiling.h"

#include <algorithm>
#include <limits>

#include "custom_ops/generated/elementwise_ops.h"

namespace tfmem {
namespace {

#define TFMEM_COST(name, value) constexpr int64_t name = value;
TFMEM_TILING_COSTS(TFMEM_COST)  // of custom_ops/devices/h200.json
#undef TFMEM_COST

constexpr int64_t kPairNumbers = 64;  // along the depth, of two lines
constexpr int64_t kMostSplits = 16;
constexpr int64_t kMostTurns = 2;  // of CTAs on all multiprocessors, where tiles are split

// What a product takes once its operands are split, to compare tilings: for each pair of lines,
// for each turn of CTAs, and for sums of parts. A small tile alone on its multiprocessor takes
// longer for a pair than one that has company.
int64_t Nanoseconds(const MatMulSizes& shape, const MatMulTiling& tiling, int64_t processors) {
  const int64_t pairs = Ceiling(shape.lines(), 2 * tiling.split_k);
  const int64_t turns = Ceiling(shape.tiles(tiling.tile()) * tiling.split_k, processors);
  const int64_t time = tiling.small ? pairs * std::max(kLoneSmallPairNs, kSmallPairNs * turns) +
                                          Ceiling(turns, 2) * kSmallTurnNs
                                    : turns * (pairs * kLargePairNs + kLargeTurnNs);
  return time + (tiling.split_k > 1 ? kSumsNs + tiling.SumsBytes(shape) / kSumsBytesPerNs : 0);
}

}  // namespace

int64_t MatMulSizes::lines() const { return Ceiling(depth, kPairNumbers) * 2; }

int64_t MatMulSizes::tiles(int64_t tile) const {
  return Ceiling(rows, tile) * Ceiling(columns, tile);
}

int64_t MatMulTiling::SumsBytes(const MatMulSizes& shape) const {
  return split_k > 1 ? shape.tiles(tile()) * split_k * tile() * tile() * sizeof(float) : 0;
}

MatMulTiling BestTiling(const MatMulSizes& shape, int64_t processors) {
  const int64_t pairs = shape.lines() / 2;
  MatMulTiling best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (bool small : {false, true}) {
    const int64_t tiles = std::max<int64_t>(shape.tiles(MatMulTiling{small}.tile()), 1);
    const int64_t most = std::min({pairs, kMostSplits, kMostTurns * processors / tiles});
    for (int64_t split_k = 1; split_k <= std::max<int64_t>(most, 1); ++split_k) {
      // Each part has some of the depth.
      if (split_k > 1 && Ceiling(pairs, Ceiling(pairs, split_k)) != split_k) continue;
      const MatMulTiling tiling{small, split_k};
      const int64_t time = Nanoseconds(shape, tiling, processors);
      if (time < least) {
        least = time;
        best = tiling;
      }
    }
  }
  return best;
}

}  // namespace tfmem

// For benchmarks/matmul/multiplier.py. `found`: whether tiles are small, split_k.
extern "C" void tfmem_best_tiling(int64_t rows, int64_t depth, int64_t columns, int64_t processors,
                                  int64_t* found) {
  const tfmem::MatMulTiling tiling = tfmem::BestTiling({rows, depth, columns}, processors);
  found[0] = tiling.small;
  found[1] = tiling.split_k;
}
