// Hopper's products of a warpgroup, whose operands stay in shared memory: twice the rate of a
// warp's own. For compute capability 9.0 alone ("sm_90a").
#pragma once

#include "matmul.cuh"

namespace tfmem {
namespace matmul {

// Where wgmma finds rows of 128 bytes, whose 16-byte words change places as `fetch` puts them:
// eight rows after eight others, from a multiple of 1,024 bytes on.
__device__ __forceinline__ Word matrix_at(unsigned address) {
  constexpr Word kEightRows = 8 * kLine;  // all in words of 16 bytes
  constexpr Word kSwizzled = 1;           // in 128 bytes
  return (address & 0x3ffff) >> 4 | Word(1) << 16 | kEightRows << 32 | kSwizzled << 62;
}

// Both lines of a pair at once. Two warpgroups have 64 rows each.
template <>
struct Sums<Hopper> {
  static constexpr int kLinesAtOnce = 2;

  template <class StageOf>
  __device__ __forceinline__ static void add(float (&sum)[1][16][4], int pair,
                                             const StageOf& stage_of) {
    const int group = threadIdx.x / (4 * kWarp);
    begin_group_products();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned stage = stage_of(pair + half);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const Word high = matrix_at(stage + group * 64 * kLine * 16) + step * 2, low = high + 4;
        const Word b_high = matrix_at(stage + Hopper::kTile * kLine * 16) + step * 2;
        multiply_group(sum[0], low, b_high, half + step > 0);
        multiply_group(sum[0], high, b_high + 4, true);
        multiply_group(sum[0], high, b_high, true);
      }
    }
    end_group_products();
  }
};

}  // namespace matmul
}  // namespace tfmem
