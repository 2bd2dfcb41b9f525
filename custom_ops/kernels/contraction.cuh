// Products of matrices within fusion kernels (custom_ops/fusion/codegen/plan/contraction.py): a CTA
// computes a tile of the result, its warps share the depth, and what they have is added up in
// shared memory in the order of the warps, so that results are the same in every run.
//
// Operands go from global memory to registers as the tensor cores take them, without a copy in
// shared memory: products that are this small wait for memory, so all loads should be under way at
// once. A sum may take its terms in any order. So of a depth of 16, lane 4 g + t of a warp has the
// numbers 4 t to 4 t + 3, and of the rows (columns) of a tile EACH neighbouring ones from g * EACH
// on: one load of 16 bytes has four of them, whichever way they lie.
#pragma once

#include "fusion.cuh"

namespace tfmem {

constexpr int kDepth = 16;  // of a chunk, which a warp multiplies at once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kTensorCores = false;  // none for these numbers
#else
constexpr bool kTensorCores = true;
#endif

// How tensor cores take numbers: rounded to TensorFloat-32, or as what they are.
enum class Factors { kTf32, kHalf, kBfloat16 };

// How a product is computed: WARPS share the depth, each loads AHEAD chunks before it multiplies
// them. With EXACT each of them has as many chunks.
template <int ROWS, int COLUMNS, int WARPS, int AHEAD, bool EXACT>
struct Tile {
  static constexpr int kRows = ROWS, kColumns = COLUMNS, kWarps = WARPS;
  static constexpr int kAhead = AHEAD;
  static constexpr bool kExact = EXACT;
  static constexpr int kStride = COLUMNS + 2;  // of the rows of a warp's results
  static constexpr int kPart = ROWS * kStride;
};

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

template <class T, int COUNT>
__device__ constexpr int count_of(const T (&)[COUNT]) {
  return COUNT;
}

// Goes through a warp's chunks: loads those of `left` and `right`, functions of a lane's first row
// or column, its place along the depth and where to put the numbers; and gives them to `add`.
template <class Tile, int LEFT, int RIGHT, class Number, class Index, class Left, class Right,
          class Add>
__device__ __forceinline__ void for_chunks(const Left& left, const Right& right, Index row,
                                           Index column, Index depth, const Add& add) {
  constexpr int kStep = Tile::kWarps * kDepth;
  const int warp = threadIdx.x / kWarp, quarter = threadIdx.x % 4;
#pragma unroll 1
  for (Index first = warp * kDepth; first < depth; first += kStep * Tile::kAhead) {
    Number a[Tile::kAhead][LEFT][4], b[Tile::kAhead][RIGHT][4];
#pragma unroll
    for (int i = 0; i < Tile::kAhead; ++i) {
      const Index k = first + i * kStep;
      if (Tile::kExact || k < depth) {
        left(row, k + quarter * 4, a[i]);
        right(column, k + quarter * 4, b[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kAhead; ++i) {
      if (Tile::kExact || first + i * kStep < depth) add(a[i], b[i]);
    }
  }
}

// By ordinary instructions: each lane has all rows, and adds up its own part of each chunk.
template <class Tile, int ROWS, class Number, class Index, class Left, class Right>
__device__ __forceinline__ void multiply_by_threads(const Left& left, const Right& right,
                                                    Index first_row, Index first_column,
                                                    Index depth, Number* results) {
  constexpr int kEach = Tile::kColumns / 8;
  const int warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, quarter = threadIdx.x % 4;
  Number sum[ROWS][kEach] = {};
  const auto add = [&](const Number(&a)[ROWS][4], const Number(&b)[kEach][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] = multiply_add(a[i][k], b[j][k], sum[i][j]);
      }
    }
  };
  for_chunks<Tile, ROWS, kEach, Number>(left, right, first_row, first_column + group * kEach, depth,
                                        add);
  Number* const to = results + warp * Tile::kPart + group * kEach;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const Number total = reduce_lanes<Sum, 4>(sum[i][j]);
      if (quarter == i % 4) to[i * Tile::kStride + j] = total;
    }
  }
}

// By tensor cores; the tile has a multiple of 16 rows. A lane's rows 2 i and 2 i + 1 are those that
// it has of the i-th product's 16, its columns j those of the products with j.
template <class Tile, Factors FACTORS, class Index, class Left, class Right>
__device__ __forceinline__ void multiply_by_tensor_cores(const Left& left, const Right& right,
                                                         Index first_row, Index first_column,
                                                         Index depth, float* results) {
  constexpr int kRowsEach = Tile::kRows / 8, kEach = Tile::kColumns / 8;
  const int warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, quarter = threadIdx.x % 4;
  float sum[kRowsEach / 2][kEach][4] = {};
  const auto add = [&](const float (&a)[kRowsEach][4], const float (&b)[kEach][4]) {
    if constexpr (FACTORS == Factors::kTf32) {
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        unsigned y[kEach][2];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          y[j][0] = tf32_nearest(b[j][half]);
          y[j][1] = tf32_nearest(b[j][half + 1]);
        }
#pragma unroll
        for (int i = 0; i < kRowsEach; i += 2) {
          const unsigned x[4] = {tf32_nearest(a[i][half]), tf32_nearest(a[i + 1][half]),
                                 tf32_nearest(a[i][half + 1]), tf32_nearest(a[i + 1][half + 1])};
#pragma unroll
          for (int j = 0; j < kEach; ++j) mma_tf32(sum[i / 2][j], x, y[j]);
        }
      }
    } else {
      constexpr bool kBfloat16 = FACTORS == Factors::kBfloat16;
      const auto pair = [](float x, float y) {
        return kBfloat16 ? bfloat16_pair(x, y) : half_pair(x, y);
      };
      unsigned y[kEach][2];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        y[j][0] = pair(b[j][0], b[j][1]);
        y[j][1] = pair(b[j][2], b[j][3]);
      }
#pragma unroll
      for (int i = 0; i < kRowsEach; i += 2) {
        const uint4 x = make_uint4(pair(a[i][0], a[i][1]), pair(a[i + 1][0], a[i + 1][1]),
                                   pair(a[i][2], a[i][3]), pair(a[i + 1][2], a[i + 1][3]));
#pragma unroll
        for (int j = 0; j < kEach; ++j) mma_half<kBfloat16>(sum[i / 2][j], x, y[j]);
      }
    }
  };
  for_chunks<Tile, kRowsEach, kEach, float>(left, right, first_row + group * kRowsEach,
                                            first_column + group * kEach, depth, add);
  float* const to =
      results + warp * Tile::kPart + group * kRowsEach * Tile::kStride + quarter * 2 * kEach;
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      to[i * Tile::kStride + j] = sum[i / 2][j][i % 2 * 2];
      to[i * Tile::kStride + kEach + j] = sum[i / 2][j][i % 2 * 2 + 1];
    }
  }
}

// A tile without tensor cores, so many rows at a time.
template <class Tile, int ROWS, class Number, class Index, class Left, class Right>
__device__ __forceinline__ void multiply_rows(const Left& left, const Right& right, Index first_row,
                                              Index first_column, Index depth, Number* results) {
#pragma unroll 1
  for (int row = 0; row < Tile::kRows; row += ROWS) {
    multiply_by_threads<Tile, ROWS, Number>(left, right, first_row + row, first_column, depth,
                                            results + row * Tile::kStride);
  }
}

// An element of the tile, of what the warps have of it.
template <class Tile, class Number>
__device__ __forceinline__ Number total_of(const Number* results, int row, int column) {
  const Number* const from = results + row * Tile::kStride + column;
  Number total = from[0];
#pragma unroll
  for (int warp = 1; warp < Tile::kWarps; ++warp) total += from[warp * Tile::kPart];
  return total;
}

}  // namespace tfmem
