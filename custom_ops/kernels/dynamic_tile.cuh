// Tiles of products by tensor cores: of many nodes that meet at one matrix, and of gradients.
//
// Each number is split into two of TF32, and three of the four products of the parts are summed, so
// that 22 bits of each factor count. Sums of kTileDepth products are added to a tile's in float32:
// tensor cores round towards zero, which over thousands of terms would be seen.
#pragma once

#include "dynamic.cuh"
#include "product_mma.cuh"

namespace tfmem {

constexpr int kTile = 64;       // rows and columns of a tile
constexpr int kTileDepth = 32;  // terms of its sums that come at a time
constexpr int kTileStages = 3;  // such steps that are in shared memory
constexpr int kMostOperands = 8;
constexpr int kTileWarps = 8;  // which multiply; those of a larger CTA help to copy

// kTile rows or columns by kTileDepth terms in shared memory: a row after the other, or all rows of
// a term after each other. The strides let the lanes of a fragment read from different banks.
template <bool BY_TERM>
struct Slab {
  static constexpr int kStride = BY_TERM ? kTile + 8 : kTileDepth + 4;
  __device__ static constexpr int at(int row, int term) {
    return BY_TERM ? term * kStride + row : row * kStride + term;
  }
};
constexpr int kSlab = kTile * (kTileDepth + 4);
static_assert(kSlab == kTileDepth * (kTile + 8));

// Where the sums lie when all is added, in front of the staging memory.
constexpr int kSumStride = kTile + 4;
static_assert(kTile * kSumStride <= 2 * kTileStages * kSlab);

// Four numbers to shared memory, of which those outside are 0: `at(j)` is the j-th; `from` points
// to the first if all are inside.
template <class At>
__device__ __forceinline__ void copy_four(float* to, const float* from, bool inside, const At& at) {
  if (inside && reinterpret_cast<Word>(from) % 16 == 0) {
    copy_async(shared_address(to), from, true);
    return;
  }
#pragma unroll 1
  for (int j = 0; j < 4; ++j) to[j] = at(j);
}

// value = high + low, two numbers of TF32 that have the same sign, so that the products of an
// infinite number with the parts of another are all the same infinity, and not NaN. So `low` of a
// number that has none is one far behind the last bit, and what is not finite is its own.
template <int COUNT>
__device__ __forceinline__ void split_alike(const float (&value)[COUNT], unsigned (&high)[COUNT],
                                            unsigned (&low)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    high[i] = tf32_bits(value[i]);  // nearer to zero
    const float upper = __uint_as_float(high[i]);
    const float rest = fmaf(upper, 1.4551915e-11f, value[i] - upper);  // 2 to -36
    low[i] = rest == rest ? __float_as_uint(rest) : high[i];
  }
}

// What a warp has of a tile: 16 rows of each half and 16 columns. The left factor's slab is of
// rows, the right one's of columns.
template <bool LEFT_BY_TERM, bool RIGHT_BY_TERM>
struct TileSums {
  float sum[2][2][4] = {};

  __device__ static int row(int half) {
    return half * (kTile / 2) + threadIdx.x / kWarp / 4 * 16 + threadIdx.x % kWarp / 4;
  }
  __device__ static int column(int n) { return (threadIdx.x / kWarp % 4 * 2 + n) * 8; }

  // The products of a step, of all rows or of the first half (M: 1).
  template <int M>
  __device__ __forceinline__ void add(const float* left, const float* right) {
    if (threadIdx.x >= kTileWarps * kWarp) return;
    const int group = threadIdx.x % kWarp / 4, quarter = threadIdx.x % 4;
    float part[M][2][4] = {};
#pragma unroll
    for (int step = 0; step < kTileDepth; step += 8) {
      unsigned a_high[M][4], a_low[M][4], b_high[2][2], b_low[2][2];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = left[Slab<LEFT_BY_TERM>::at(row(m) + i % 2 * 8, step + quarter + i / 2 * 4)];
        }
        split_alike(a, a_high[m], a_low[m]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          b[i] = right[Slab<RIGHT_BY_TERM>::at(column(n) + group, step + quarter + i * 4)];
        }
        split_alike(b, b_high[n], b_low[n]);
      }
      // One kind of product after the other: those that add to the same sum wait for each other.
      each(part, a_low, b_high);
      each(part, a_high, b_low);
      each(part, a_high, b_high);
    }
#pragma unroll
    for (int i = 0; i < M * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
  }

  // The sums, kSumStride numbers a row.
  __device__ __forceinline__ void put(float* to) const {
    if (threadIdx.x >= kTileWarps * kWarp) return;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[(row(m) + i / 2 * 8) * kSumStride + column(n) + threadIdx.x % 4 * 2 + i % 2] =
              sum[m][n][i];
        }
      }
    }
  }

 private:
  template <int M>
  __device__ __forceinline__ static void each(float (&part)[M][2][4], const unsigned (&a)[M][4],
                                              const unsigned (&b)[2][2]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_tf32(part[m][n], a[m], b[n]);
    }
  }
};

// Adds `steps` steps, which `copy(left, right)` brings one after the other, and puts the sums in
// front of the staging memory, where all threads see them. Not `whole`: of the first half's rows.
template <class Sizes, class Sums, class Copy>
__device__ __forceinline__ void sum_steps(const Net<Sizes>& net, Sums& sums, int steps, bool whole,
                                          Copy copy) {
  static_assert(Sizes::kWarps >= kTileWarps);
  const auto slab = [&](int step) { return net.staging + step % kTileStages * 2 * kSlab; };
  constexpr int kAhead = kTileStages - 1;
  __syncthreads();
#pragma unroll 1
  for (int step = -kAhead; step < steps; ++step) {
    if (step >= 0) {
      wait_for_groups_but<kAhead - 1>();
      __syncthreads();  // no thread still reads where the next slab is copied to
    }
    if (step + kAhead < steps) copy(slab(step + kAhead), slab(step + kAhead) + kSlab);
    end_group_of_copies();
    if (step < 0) continue;
    if (whole) {
      sums.template add<2>(slab(step), slab(step) + kSlab);
    } else {
      sums.template add<1>(slab(step), slab(step) + kSlab);
    }
  }
  wait_for_groups_but<0>();
  __syncthreads();
  sums.put(net.staging);
  __syncthreads();
}

// A product as tiles compute it: what View and Matrix (dynamic_product.cuh) say, and which vectors
// lie side by side: each ends at ends[i] of the depth.
struct TileProduct {
  int parameter;  // word of the kernel's parameter
  int columns, start, depth, first, outputs;
  int operands;
  int ends[kMostOperands];
};

// Where the vectors of a tile's nodes lie, behind the slabs: kTile for each operand.
template <class Sizes>
__device__ __forceinline__ const float** places_of(const Net<Sizes>& net) {
  return reinterpret_cast<const float**>(net.staging + kTileStages * 2 * kSlab);
}

// Outputs [output, output + kTile) of up to `rows` nodes, kTile or half of that. What of an address
// is the same in each step is computed once: the copies of a step are issued before its products.
template <class Sizes, bool TRANSPOSED>
__device__ __noinline__ void sum_tile(const Net<Sizes>& net, const TileProduct& of, int output,
                                      int rows) {
  using Left = Slab<false>;
  using Right = Slab<!TRANSPOSED>;
  constexpr int kFours = kTileDepth / 4;                      // of a row in a step
  constexpr int kOwnFours = TRANSPOSED ? kFours : kTile / 4;  // of what lies together of the matrix
  static_assert(Sizes::kThreads % kFours == 0 && Sizes::kThreads % kOwnFours == 0);
  const float** places = places_of(net);
  const int depth = of.depth, outputs = of.outputs - output, columns = of.columns;
  // This thread's vectors: the first term of four, and the operand that has it.
  const int left_term = threadIdx.x % kFours * 4;
  int operand = 0, from = 0, end = of.ends[0], begin = 0;
  const auto vectors = [&](float* left) {
    const int k = begin + left_term;
    while (k < depth && k >= end) from = end, end = of.ends[++operand];
    for (int i = threadIdx.x; i < rows * kFours; i += Sizes::kThreads) {
      const int row = i / kFours;
      const float* place = k < depth ? places[operand * kTile + row] : nullptr;
      copy_four(left + Left::at(row, left_term), place + (k - from),
                place != nullptr && k + 4 <= end, [&](int j) {
                  if (k + j >= depth) return 0.0f;
                  int which = operand, start = from;
                  while (k + j >= of.ends[which]) start = of.ends[which++];
                  const float* at = places[which * kTile + row];
                  return at != nullptr ? at[k + j - start] : 0.0f;
                });
    }
  };
  // This thread's weights: places along a row of the matrix, where four lie side by side.
  const int along = threadIdx.x % kOwnFours * 4, across = threadIdx.x / kOwnFours;
  const int row = TRANSPOSED ? of.first + output : of.start;
  const int column = TRANSPOSED ? of.start : of.first + output;
  const float* own =
      net.parameter(of.parameter) + static_cast<long long>(row + across) * columns + column + along;
  const auto weights = [&](float* right) {
    const float* from = own;
    for (int i = threadIdx.x; i < kTile * kFours; i += Sizes::kThreads) {
      const int of_row = i / kOwnFours;
      const int o = TRANSPOSED ? of_row : along, term = TRANSPOSED ? along : of_row;
      const int k = begin + term;
      const bool inside =
          TRANSPOSED ? o < outputs && k + 4 <= depth : o + 4 <= outputs && k < depth;
      copy_four(right + Right::at(o, term), from, inside, [&](int j) {
        const bool there = TRANSPOSED ? o < outputs && k + j < depth : o + j < outputs && k < depth;
        return there ? from[j] : 0.0f;
      });
      from += static_cast<long long>(Sizes::kThreads / kOwnFours) * columns;
    }
    own += TRANSPOSED ? kTileDepth : static_cast<long long>(kTileDepth) * columns;
  };
  TileSums<false, !TRANSPOSED> sums;
  sum_steps(net, sums, (depth + kTileDepth - 1) / kTileDepth, rows == kTile,
            [&](float* left, float* right) {
              vectors(left);
              weights(right);
              begin += kTileDepth;
            });
}

// Multiplies a tile of nodes [first, first + rows) of a kind. `place(operand, row)` is a vector's
// address, `store(row, o, sum)` takes an output.
template <bool TRANSPOSED, class Sizes, class Place, class Store>
__device__ __forceinline__ void multiply_tile(const Net<Sizes>& net, const TileProduct& of,
                                              int first, int rows, int output, const Place& place,
                                              const Store& store) {
  __syncthreads();
  const float** places = places_of(net);
#pragma unroll 1
  for (int i = threadIdx.x; i < of.operands * kTile; i += Sizes::kThreads) {
    places[i] = i % kTile < rows ? place(i / kTile, first + i % kTile) : nullptr;
  }
  sum_tile<Sizes, TRANSPOSED>(net, of, output, rows > kTile / 2 ? kTile : kTile / 2);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * kTile; i += Sizes::kThreads) {
    const int row = i / kTile, o = i % kTile;
    if (output + o < of.outputs) {
      store(first + row, output + o, net.staging[row * kSumStride + o]);
    }
  }
}

}  // namespace tfmem
