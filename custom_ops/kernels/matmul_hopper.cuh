// Hopper's products of a warp group, whose operands stay in shared memory: twice the rate of a
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

// sum = A B of 64 rows, 128 columns and a depth of 16, or with `more` sum += A B.
__device__ __forceinline__ void multiply_group(float (&sum)[16][4], Word a, Word b, bool more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "
      "}, %64, %65, more, 1, 1, 0, 0;\n}"
      : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]),
        "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]),
        "+f"(sum[2][2]), "+f"(sum[2][3]), "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]),
        "+f"(sum[3][3]), "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),
        "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]), "+f"(sum[6][0]),
        "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]), "+f"(sum[7][0]), "+f"(sum[7][1]),
        "+f"(sum[7][2]), "+f"(sum[7][3]), "+f"(sum[8][0]), "+f"(sum[8][1]), "+f"(sum[8][2]),
        "+f"(sum[8][3]), "+f"(sum[9][0]), "+f"(sum[9][1]), "+f"(sum[9][2]), "+f"(sum[9][3]),
        "+f"(sum[10][0]), "+f"(sum[10][1]), "+f"(sum[10][2]), "+f"(sum[10][3]), "+f"(sum[11][0]),
        "+f"(sum[11][1]), "+f"(sum[11][2]), "+f"(sum[11][3]), "+f"(sum[12][0]), "+f"(sum[12][1]),
        "+f"(sum[12][2]), "+f"(sum[12][3]), "+f"(sum[13][0]), "+f"(sum[13][1]), "+f"(sum[13][2]),
        "+f"(sum[13][3]), "+f"(sum[14][0]), "+f"(sum[14][1]), "+f"(sum[14][2]), "+f"(sum[14][3]),
        "+f"(sum[15][0]), "+f"(sum[15][1]), "+f"(sum[15][2]), "+f"(sum[15][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(more)));
}

// Both lines of a pair at once. Two warp groups have 64 rows each.
template <>
struct Sums<Hopper> {
  static constexpr int kLinesAtOnce = 2;

  template <class StageOf>
  __device__ __forceinline__ static void add(float (&sum)[1][16][4], int pair,
                                             const StageOf& stage_of) {
    const int group = threadIdx.x / (4 * kWarp);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
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
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
};

}  // namespace matmul
}  // namespace tfmem
