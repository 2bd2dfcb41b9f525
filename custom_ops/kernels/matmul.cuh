// Products of float32 matrices on tensor cores, as accurate as float32's own: C = A B + bias.
//
// Both operands are pairs of float16 (matmul_split.cuh). Three products, high * high, high * low
// and low * high, keep float32's accuracy but for the last bits.
//
// Tensor cores cut off what they add up, always towards zero. A sum of 64 products at most stays
// in them; such sums are added as float32 is, to the nearest.
//
// Where the result has few tiles, several CTAs share one, each with a part of the depth (split-K).
#pragma once

#include "common.cuh"
#include "matmul_split.cuh"
#include "product_half.cuh"

namespace tfmem {
namespace matmul {

// A CTA's tile of the result, and that of each of its warps.
template <int TILE, int WARP_ROWS, int WARP_COLUMNS, int STAGES>
struct Tiling {
  static constexpr int kStages = STAGES;  // lines of its rows and columns that are under way
  static constexpr int kTile = TILE;      // rows, and columns
  static constexpr int kWarpRows = WARP_ROWS, kWarpColumns = WARP_COLUMNS;
  static constexpr int kRowTiles = WARP_ROWS / 16, kColumnTiles = WARP_COLUMNS / 8;
  static constexpr int kRowWarps = TILE / WARP_ROWS;
  static constexpr int kThreads = kRowWarps * (TILE / WARP_COLUMNS) * kWarp;
  static constexpr int kStageWords = 2 * TILE * kLine;  // rows of A, then columns of B
  static constexpr int kResultStride = TILE + 8;        // so that a warp's rows use all banks
};
using Large = Tiling<128, 64, 32, 3>;
using Small = Tiling<64, 32, 32, 4>;  // where large tiles would leave multiprocessors without work
using Hopper = Tiling<128, 16, 128, 6>;  // large ones there (matmul_hopper.cuh)

// Where a tile begins: 8 tiles of rows at a time, so that CTAs share what they read in L2.
template <class Tiling>
__device__ __forceinline__ int2 tile_of(const Arguments& arguments, int index) {
  constexpr int kBand = 8, kTile = Tiling::kTile;
  const int row_tiles = (arguments.rows + kTile - 1) / kTile;
  const int column_tiles = (arguments.columns + kTile - 1) / kTile;
  const int band = index / (kBand * column_tiles), rest = index % (kBand * column_tiles);
  const int height = min(kBand, row_tiles - band * kBand);
  return make_int2((band * kBand + rest % height) * kTile, rest / height * kTile);
}

// Rows and columns that are not all finite are multiplied as they are; a thread's are those that it
// has just put out.
template <class Tiling>
__device__ __noinline__ void multiply_exactly(const Arguments& arguments, int2 tile) {
  const int lane = threadIdx.x % kWarp, end = min(tile.x + Tiling::kTile, arguments.rows);
  for (int row = tile.x + threadIdx.x / kWarp; row < end; row += Tiling::kThreads / kWarp) {
    const float* a = arguments.left_floats + row * static_cast<long long>(arguments.left_row);
    for (int column = tile.y + lane; column < min(tile.y + Tiling::kTile, arguments.columns);
         column += kWarp) {
      if (arguments.unscale_rows[row] != kNotFinite &&
          arguments.unscale_columns[column] != kNotFinite) {
        continue;
      }
      const float* b =
          arguments.right_floats + column * static_cast<long long>(arguments.right_column);
      float sum = 0.0f;
      for (int k = 0; k < arguments.depth; ++k) {
        sum = fmaf(a[k * static_cast<long long>(arguments.left_depth)],
                   b[k * static_cast<long long>(arguments.right_depth)], sum);
      }
      const float bias = arguments.bias == nullptr ? 0.0f : arguments.bias[column];
      arguments.result[row * static_cast<long long>(arguments.columns) + column] = sum + bias;
    }
  }
}

// Multiplies by the inverse scales and adds the bias. A warp takes a row at a time.
template <class Tiling>
__device__ __forceinline__ void put_out(const Arguments& arguments, int2 tile,
                                        const float* results) {
  constexpr int kWarps = Tiling::kThreads / kWarp, kRows = Tiling::kTile / kWarps;
  constexpr int kPerLane = Tiling::kTile / kWarp;
  static_assert(kRows <= kWarp, "a lane keeps a row's inverse scale");
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float bias[kPerLane], unscale[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int column = tile.y + i * kWarp + lane;
    const bool inside = column < arguments.columns;
    bias[i] = inside && arguments.bias != nullptr ? arguments.bias[column] : 0.0f;
    unscale[i] = inside ? arguments.unscale_columns[column] : 0.0f;
  }
  const int row_of_lane = tile.x + warp + lane % kRows * kWarps;
  const float unscale_of_lane =
      row_of_lane < arguments.rows ? arguments.unscale_rows[row_of_lane] : 0.0f;
  bool all_finite = true;
#pragma unroll 4
  for (int j = 0; j < kRows; ++j) {
    const int row = warp + j * kWarps;
    const float unscale_row = __shfl_sync(kAllLanes, unscale_of_lane, j);
    float* to = arguments.result + (tile.x + row) * static_cast<long long>(arguments.columns);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int column = tile.y + i * kWarp + lane;
      // The smaller one first: what is between must not overflow.
      const float least = fminf(unscale_row, unscale[i]), most = fmaxf(unscale_row, unscale[i]);
      const float sum = results[row * Tiling::kResultStride + i * kWarp + lane];
      all_finite = all_finite && least >= 0.0f;
      if (tile.x + row < arguments.rows && column < arguments.columns) {
        to[column] = sum * least * most + bias[i];
      }
    }
  }
  if (!all_finite) multiply_exactly<Tiling>(arguments, tile);
}

// Leaves a part's results where those of the other parts are. Says whether they are all there: then
// the results are the sums of all parts, in their order whichever came last.
template <class Tiling>
__device__ __forceinline__ bool gather(const Arguments& arguments, int index, int part,
                                       float* results) {
  constexpr int kFours = Tiling::kTile * Tiling::kTile / 4, kAtOnce = 4;
  constexpr int kFoursOfRow = Tiling::kTile / 4;
  static_assert(kFours % (Tiling::kThreads * kAtOnce) == 0, "threads have as many numbers each");
  const int split_k = arguments.split_k;
  float4* const all =
      reinterpret_cast<float4*>(arguments.sums) + index * static_cast<long long>(split_k) * kFours;
  const auto place = [&](int four) {
    return reinterpret_cast<float4*>(results + four / kFoursOfRow * Tiling::kResultStride) +
           four % kFoursOfRow;
  };
  for (int i = threadIdx.x; i < kFours; i += Tiling::kThreads) all[part * kFours + i] = *place(i);
  __threadfence();
  __syncthreads();
  const unsigned others = split_k - 1;
  if (!__syncthreads_or(threadIdx.x == 0 && atomicAdd(arguments.arrived + index, 1) == others)) {
    return false;
  }
  __threadfence();
#pragma unroll 1
  for (int i = threadIdx.x; i < kFours; i += Tiling::kThreads * kAtOnce) {
    float4 sum[kAtOnce] = {};
#pragma unroll 4
    for (int other = 0; other < split_k; ++other) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float4 more = load_from_l2(all + other * kFours + i + j * Tiling::kThreads);
        sum[j].x += more.x;
        sum[j].y += more.y;
        sum[j].z += more.z;
        sum[j].w += more.w;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) *place(i + j * Tiling::kThreads) = sum[j];
  }
  __syncthreads();
  return true;
}

// How the sums of a warp's tile get their products, here by warps' own instructions.
template <class Tiling>
struct Sums {
  static constexpr int kLinesAtOnce = 1;  // between two barriers
  static constexpr int kRowTiles = Tiling::kRowTiles, kColumnTiles = Tiling::kColumnTiles;

  // Adds those of a line. `stage_of`: where a line's operands lie in shared memory.
  template <class StageOf>
  __device__ __forceinline__ static void add(float (&sum)[kRowTiles][kColumnTiles][4], int line,
                                             const StageOf& stage_of) {
    // ldmatrix: lane i gives the address of a row of 16 bytes. Of A: rows 0 to 15, the first half
    // of a depth of 16, then the second; of B both halves of columns 0 to 7, then of 8 to 15.
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int row_of_lane = warp % Tiling::kRowWarps * Tiling::kWarpRows + lane % 16;
    const int column_of_lane =
        Tiling::kTile + warp / Tiling::kRowWarps * Tiling::kWarpColumns + lane / 16 * 8 + lane % 8;
    const unsigned stage = stage_of(line);
    const auto matrices = [&](int row, int at) {
      return load_matrices(stage + (row * kLine + (at ^ row % kLine)) * 16);
    };
#pragma unroll
    for (int step = 0; step < 2; ++step) {  // of 16 along the depth
      unsigned b[2][kColumnTiles][2];       // high, low
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
#pragma unroll
        for (int i = 0; i < kColumnTiles; i += 2) {
          const int at = piece * 4 + step * 2 + lane / 8 % 2;
          const uint4 four = matrices(column_of_lane + i * 8, at);
          b[piece][i][0] = four.x;
          b[piece][i][1] = four.y;
          b[piece][i + 1][0] = four.z;
          b[piece][i + 1][1] = four.w;
        }
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const uint4 low = matrices(row_of_lane + i * 16, 4 + step * 2 + lane / 16);
        const uint4 high = matrices(row_of_lane + i * 16, step * 2 + lane / 16);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) mma_half<false>(sum[i][j], low, b[0][j]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) mma_half<false>(sum[i][j], high, b[1][j]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) mma_half<false>(sum[i][j], high, b[0][j]);
      }
    }
  }
};

// One tile of the result, or a part of its depth.
template <class Tiling>
__device__ inline void multiply(const Arguments& arguments, uint4* shared) {
  constexpr int kTile = Tiling::kTile, kRowTiles = Tiling::kRowTiles;
  constexpr int kColumnTiles = Tiling::kColumnTiles, kStages = Tiling::kStages;
  constexpr int kAtOnce = Sums<Tiling>::kLinesAtOnce, kAhead = kStages - kAtOnce;
  const int index = blockIdx.x % arguments.tiles, part = blockIdx.x / arguments.tiles;
  const int2 tile = tile_of<Tiling>(arguments, index);
  const int pairs_of_part = (arguments.lines / 2 + arguments.split_k - 1) / arguments.split_k;
  const int first_line = part * pairs_of_part * 2;
  const int end = min(first_line + pairs_of_part * 2, arguments.lines);
  const unsigned base = shared_address(shared);
  const auto stage_of = [&](int line) {
    return base + line % kStages * (Tiling::kStageWords * 16);
  };

  // A thread copies one word of a line, of several rows of A and columns of B. Words of a line
  // change places, so that rows of a matrix lie in different banks.
  constexpr int kRowsAtOnce = Tiling::kThreads / kLine;
  constexpr int kCopies = kTile / kRowsAtOnce;
  const int word = threadIdx.x % kLine, first_row = threadIdx.x / kLine;
  const int to = (first_row * kLine + (word ^ first_row % kLine)) * 16;
  const auto first_of = [&](const uint4* pairs, int row) {
    return pairs + row * static_cast<long long>(arguments.lines) * kLine + word;
  };
  const uint4* const left = first_of(arguments.left, tile.x + first_row);
  const uint4* const right = first_of(arguments.right, tile.y + first_row);
  const long long stride = static_cast<long long>(kRowsAtOnce) * arguments.lines * kLine;
  const auto fetch = [&](int line) {
    const unsigned stage = stage_of(line) + to;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      const bool more = line < end;
      const long long at = i * stride + line * kLine;
      constexpr int kBytes = kRowsAtOnce * kLine * 16;
      copy_async(stage + i * kBytes, left + at, more && tile.x + row < arguments.rows);
      copy_async(stage + (kCopies + i) * kBytes, right + at,
                 more && tile.y + row < arguments.columns);
    }
    end_group_of_copies();
  };

  float total[kRowTiles][kColumnTiles][4] = {};
#pragma unroll
  for (int line = 0; line < kAhead; ++line) fetch(first_line + line);
#pragma unroll 1
  for (int pair = first_line; pair < end; pair += 2) {
    float sum[kRowTiles][kColumnTiles][4] = {};
#pragma unroll
    for (int line = pair; line < pair + 2; line += kAtOnce) {
      wait_for_groups_but<kAhead - kAtOnce>();
      if constexpr (kAtOnce == 2) fence_async_proxy();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) fetch(line + kAhead + i);
      Sums<Tiling>::add(sum, line, stage_of);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * kColumnTiles * 4; ++i) {
      (&total[0][0][0])[i] += (&sum[0][0][0])[i];
    }
  }

  // Results take the place of the operands. Lane i has columns i % 4 * 2 and the next, of rows
  // i / 4 and 8 further on.
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_row = warp % Tiling::kRowWarps * Tiling::kWarpRows;
  const int warp_column = warp / Tiling::kRowWarps * Tiling::kWarpColumns;
  wait_for_groups_but<0>();
  __syncthreads();
  float* results = reinterpret_cast<float*>(shared);
  float* first =
      results + (warp_row + lane / 4) * Tiling::kResultStride + warp_column + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const float* two = total[i / 2][j] + i % 2 * 2;
      *reinterpret_cast<float2*>(first + i * 8 * Tiling::kResultStride + j * 8) =
          make_float2(two[0], two[1]);
    }
  }
  __syncthreads();
  if (arguments.split_k > 1 && !gather<Tiling>(arguments, index, part, results)) return;
  put_out<Tiling>(arguments, tile, results);
}

}  // namespace matmul
}  // namespace tfmem
