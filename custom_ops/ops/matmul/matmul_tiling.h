// How TfmemMatMul divides a product among CTAs. Knows neither TensorFlow nor a driver.
#pragma once

#include <cstdint>

namespace tfmem {

inline int64_t Ceiling(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

// [rows, depth] by [depth, columns].
struct MatMulSizes {
  int64_t rows = 0;
  int64_t depth = 0;
  int64_t columns = 0;

  // Lines of 32 numbers along the depth of a split operand: an even number.
  int64_t lines() const;
  int64_t tiles(int64_t tile) const;
};

struct MatMulTiling {
  bool small = false;
  int64_t split_k = 1;  // parts of a tile's depth, each for a separate CTA

  int64_t tile() const { return small ? 64 : 128; }
  // Bytes of the sums of all parts, where a tile has several.
  int64_t SumsBytes(const MatMulSizes& shape) const;
};

// The one that should take the least time on so many multiprocessors.
MatMulTiling BestTiling(const MatMulSizes& shape, int64_t processors);

}  // namespace tfmem
