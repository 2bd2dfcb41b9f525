// Cuts float32 matrices into pairs of float16, as `multiply` (matmul.cuh) reads them.
//
// A number is scaled and cut into two float16, 22 bits together. Each row of A and each column of B
// has its own scale, a power of two, so that its largest number fills float16's range: what is
// lost is below 2^-39 of that. Rows and columns that are not all finite become zeros, and are
// multiplied as they are.
//
// A split matrix has lines of 128 bytes, for 32 numbers along the depth: their high halves, then
// their low ones. Behind the depth there are zeros, up to a whole pair of lines.
#pragma once

#include "common.cuh"
#include "operands.cuh"

namespace tfmem {
namespace matmul {

// The kernels' parameter (benchmarks/matmul/multiplier.py lists the words).
struct Arguments {
  int rows, columns;
  int depth, lines;  // lines: of a row of a split matrix, even
  uint4 *left, *right;
  float *unscale_rows, *unscale_columns;
  const float* bias;  // [columns], or null
  float* result;      // [rows, columns]
  const float *left_floats, *right_floats;
  int left_row, left_depth;       // strides of `left_floats`; one of them is 1
  int right_column, right_depth;  // of `right_floats`
  int tiles, split_k;             // of the result, and of each along the depth
  float* sums;                    // of several parts: [tiles, parts, numbers of a tile]
  unsigned* arrived;              // [tiles], how many parts are there: none once `split` is over
};

constexpr int kLine = 8;  // 16-byte words of a line
constexpr int kLineNumbers = 32;
constexpr float kNotFinite = -1.0f;  // in place of the inverse scale

// One of the two operands, as `split` sees it: `rows` are the columns of B.
struct Operand {
  const float* floats;
  uint4* pairs;
  float* unscale;
  int rows, depth, lines;
  int row_stride, depth_stride;

  __device__ float at(int row, int k) const {
    if (row >= rows || k >= depth) return 0.0f;
    return floats[row * static_cast<long long>(row_stride) +
                  k * static_cast<long long>(depth_stride)];
  }
  __device__ float4 four(int row, int k) const {
    return make_float4(at(row, k), at(row, k + 1), at(row, k + 2), at(row, k + 3));
  }
  __device__ uint4* line(int row, int line) const {
    return pairs + (row * static_cast<long long>(lines) + line) * kLine;
  }
};

// The power of two that brings `largest` into [2^14, 2^15), or as close as a float can be; 0 where
// `largest` is not finite.
__device__ __forceinline__ float scale_of(float largest) {
  const int exponent = __float_as_uint(largest) >> 23;
  if (exponent == 255) return 0.0f;
  return __uint_as_float(static_cast<unsigned>(min(254, 254 + 14 - exponent)) << 23);
}

__device__ __forceinline__ float unscale_of(float scale) {
  return scale == 0.0f ? kNotFinite : 1.0f / scale;
}

// The larger one, or NaN if one of them is.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

// Puts four numbers into a line: their high parts at `place`, their low ones a half line behind.
// Without a scale zeros.
__device__ __forceinline__ void put_four(float4 four, float scale, uint2* place) {
  const uint4 pairs = scale == 0.0f ? make_uint4(0, 0, 0, 0) : Four<kPairs>::encode(four, scale);
  place[0] = make_uint2(pairs.z, pairs.w);
  place[kLine] = make_uint2(pairs.x, pairs.y);
}

// `split` runs in CTAs of 8 warps. A CTA takes 8 rows, and a thread up to 32 numbers at a time,
// of 1,024 along the depth: if those are all, it reads them once. 8 rows that lie side by side are
// as many as fill what memory gives at a time, 32 bytes: more would leave fewer CTAs.
constexpr int kSplitThreads = 256;
constexpr int kSplitRows = 8;
constexpr int kPiece = 1024;
constexpr int kFours = kPiece / 4 / kWarp;  // of a thread

__device__ __forceinline__ float largest_of(const float4* fours, float largest) {
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const float4 x = fours[i];
    largest = larger(larger(fabsf(x.x), fabsf(x.y)), largest);
    largest = larger(larger(fabsf(x.z), fabsf(x.w)), largest);
  }
  return largest;
}

// Rows whose depth is contiguous, one for each warp.
__device__ inline void split_along(const Operand& operand, int cta) {
  const int lane = threadIdx.x % kWarp;
  const int row = cta * kSplitRows + threadIdx.x / kWarp;
  if (row >= operand.rows) return;
  const float* first = operand.floats + row * static_cast<long long>(operand.row_stride);
  const bool whole = operand.depth % 4 == 0 && operand.row_stride % 4 == 0 &&
                     reinterpret_cast<Word>(operand.floats) % 16 == 0;
  float4 fours[kFours];
  const auto read = [&](int piece) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int k = piece + (i * kWarp + lane) * 4;
      fours[i] = whole && k < operand.depth ? *reinterpret_cast<const float4*>(first + k)
                                            : operand.four(row, k);
    }
  };
  float largest = 0.0f;
  for (int piece = 0; piece < operand.depth; piece += kPiece) {
    read(piece);
    largest = largest_of(fours, largest);
  }
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, mask));
  }
  const float scale = scale_of(largest);
  if (lane == 0) operand.unscale[row] = unscale_of(scale);
  uint2* to = reinterpret_cast<uint2*>(operand.line(row, 0));
  const int end = operand.lines * kLineNumbers;
  for (int piece = 0; piece < end; piece += kPiece) {
    if (end > kPiece) read(piece);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int k = piece + (i * kWarp + lane) * 4;
      if (k >= end) break;
      uint2* place = to + k / kLineNumbers * (kLine * 2) + k % kLineNumbers / 4;
      put_four(fours[i], scale, place);
    }
  }
}

// Rows that lie side by side: neighbouring threads read numbers of all of them, and what they make
// of these turns round in shared memory.
__device__ inline void split_across(const Operand& operand, int cta) {
  constexpr int kSlots = kSplitThreads / kSplitRows;  // of a row, each with four numbers of a line
  constexpr int kLines = kSlots * 4 / kLineNumbers;
  __shared__ float largest_of_slot[kSlots][kSplitRows];
  __shared__ uint2 turning[kLines][kSplitRows][2 * kLine + 2];
  const int in_cta = threadIdx.x % kSplitRows, slot = threadIdx.x / kSplitRows;
  const int row = cta * kSplitRows + in_cta;
  float4 fours[kFours];
  const auto read = [&](int piece) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      fours[i] = operand.four(row, piece + (i * kSlots + slot) * 4);
    }
  };
  float largest = 0.0f;
  for (int piece = 0; piece < operand.depth; piece += kPiece) {
    read(piece);
    largest = largest_of(fours, largest);
  }
  largest_of_slot[slot][in_cta] = largest;
  __syncthreads();
  for (int other = 0; other < kSlots; ++other) {
    largest = larger(largest_of_slot[other][in_cta], largest);
  }
  const float scale = scale_of(largest);
  if (slot == 0 && row < operand.rows) operand.unscale[row] = unscale_of(scale);
  const int to_line = threadIdx.x / (kSplitRows * kLine);
  const int to_row = threadIdx.x / kLine % kSplitRows, word = threadIdx.x % kLine;
  for (int piece = 0; piece < operand.lines * kLineNumbers; piece += kPiece) {
    if (operand.lines * kLineNumbers > kPiece) read(piece);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int line = piece / kLineNumbers + i * kLines;
      if (line >= operand.lines) break;
      uint2* place = turning[slot / kLine][in_cta] + slot % kLine;
      put_four(fours[i], scale, place);
      __syncthreads();
      const int row_of_cta = cta * kSplitRows + to_row;
      if (row_of_cta < operand.rows && line + to_line < operand.lines) {
        const uint2* from = turning[to_line][to_row] + 2 * word;
        operand.line(row_of_cta, line + to_line)[word] =
            make_uint4(from[0].x, from[0].y, from[1].x, from[1].y);
      }
      __syncthreads();
    }
  }
}

// Cuts both operands, and begins the count of the parts of a tile.
__device__ inline void split(const Arguments& arguments) {
  if (blockIdx.x == 0 && arguments.split_k > 1) {
    for (int i = threadIdx.x; i < arguments.tiles; i += kSplitThreads) arguments.arrived[i] = 0;
  }
  const int right_ctas = (arguments.columns + kSplitRows - 1) / kSplitRows;
  const bool of_right = blockIdx.x < right_ctas;
  const Operand operand =
      of_right ? Operand{arguments.right_floats, arguments.right,      arguments.unscale_columns,
                         arguments.columns,      arguments.depth,      arguments.lines,
                         arguments.right_column, arguments.right_depth}
               : Operand{arguments.left_floats, arguments.left,      arguments.unscale_rows,
                         arguments.rows,        arguments.depth,     arguments.lines,
                         arguments.left_row,    arguments.left_depth};
  const int cta = of_right ? blockIdx.x : blockIdx.x - right_ctas;
  if (operand.depth_stride == 1) {
    split_along(operand, cta);
  } else {
    split_across(operand, cta);
  }
}

}  // namespace matmul
}  // namespace tfmem
