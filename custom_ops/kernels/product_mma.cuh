// A CTA's part of a matrix product on the tensor cores, for tiles of 8 batch rows and more.
//
// mma.m16n8k8 in TF32: the weights are A (16 columns of the result), resident in registers as
// fragments; the batch rows are B, read from shared memory 16 bytes at a time. Three products (high
// * high, high * low, low * high) keep 22 bits of each factor, which is float32's accuracy but for
// the last bits.
#pragma once

#include "common.cuh"

namespace tfmem {

__device__ __forceinline__ void mma_tf32(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// value = high + low, each with at most 11 significant bits (the rest of `low` is cut by the tensor
// core). A number that is not finite has no low part, or infinity would become NaN.
template <int COUNT>
__device__ __forceinline__ void split(const float* value, unsigned* high, unsigned* low) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    // As volatile assembly: the parts of a resident weight are the same in every step, and the
    // compiler would keep them in registers that are not there.
    asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(high[i]) : "r"(__float_as_uint(value[i])));
    const float rest = value[i] - __uint_as_float(high[i]);
    low[i] = (high[i] & 0x7f800000u) == 0x7f800000u ? 0u : __float_as_uint(rest);
  }
}

// As FmaProduct. Warp = (group, part): a group owns kThreadColumns tiles of 16 columns, its kLanes
// / 32 warps split the sum. Within 16 numbers k of an operand, lane quarter q holds 4 q .. 4 q + 3:
// the sum may take them in any order, and so one 16-byte load feeds two instructions.
template <class Shape>
struct MmaProduct {
  static constexpr int kStreamed = Shape::kChunks - Shape::kRegisters - Shape::kShared;
  static constexpr int kTiles = Shape::kThreadColumns;
  static constexpr int kParts = Shape::kLanes / kWarp;
  static constexpr int kPaddedRows = (Shape::kRows + 7) / 8 * 8;

  // Sums that do not wait for each other: of the large and the small products, and of the two
  // instructions of a chunk where there are few rows to alternate between.
  static constexpr int kChains = Shape::kBlock * kTiles > 1 ? 2 : 4;

  // The fragments of two instructions for each tile, 8 floats: [instruction][register].
  float4 weight[Shape::kRegisters > 0 ? Shape::kRegisters : 1][kTiles][2];

  template <class Source>
  __device__ void load(const Source& source, float4* shared, float4* streamed) {
    const auto fragment = [&](int i, int tile, int half) {
      const int lane = threadIdx.x % kWarp;
      const int warp = threadIdx.x / kWarp;
      const int k = ((warp % kParts) * Shape::kChunks + i) * 16 + lane % 4 * 4 + half * 2;
      const int column = (warp / kParts * kTiles + tile) * 16 + lane / 4;
      return make_float4(source(column, k), source(column + 8, k), source(column, k + 1),
                         source(column + 8, k + 1));
    };
#pragma unroll
    for (int i = 0; i < Shape::kRegisters; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        weight[i][tile][0] = fragment(i, tile, 0);
        weight[i][tile][1] = fragment(i, tile, 1);
      }
    }
#pragma unroll 1
    for (int i = 0; i < Shape::kShared * kTiles * 2; ++i) {
      shared[i * Shape::kThreads + threadIdx.x] =
          fragment(Shape::kRegisters + i / (2 * kTiles), i / 2 % kTiles, i % 2);
    }
#pragma unroll 1
    for (int i = 0; i < kStreamed * kTiles * 2; ++i) {
      streamed[i * Shape::kThreads + threadIdx.x] =
          fragment(Shape::kRegisters + Shape::kShared + i / (2 * kTiles), i / 2 % kTiles, i % 2);
    }
  }

  __device__ __forceinline__ void run(const float* operands, const float4* shared,
                                      const float4* streamed, float* results) const {
    const int lane = threadIdx.x % kWarp;
    const int part = threadIdx.x / kWarp % kParts;
    const int group = threadIdx.x / kWarp / kParts;
    const float* base =
        operands + lane / 4 * Shape::kStride + part * Shape::kChunks * 16 + lane % 4 * 4;
#pragma unroll 1
    for (int row = 0; row < kPaddedRows; row += 8 * Shape::kBlock) {
      Sums sum = {};
#pragma unroll
      for (int i = 0; i < Shape::kRegisters; ++i) {
        multiply(base, i, weight[i], sum);
      }
      multiply_from(shared, Shape::kRegisters, Tag<Shape::kShared>(), base, sum);
      multiply_from(streamed, Shape::kRegisters + Shape::kShared, Tag<kStreamed>(), base, sum);
      base += 8 * Shape::kBlock * Shape::kStride;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int column = (group * kTiles + tile) * 16 + lane / 4;
#pragma unroll
        for (int block = 0; block < Shape::kBlock; ++block) {
          float* to = results +
                      (part * kPaddedRows + row + block * 8 + lane % 4 * 2) * Shape::kResultStride;
          float s[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            s[j] = sum[tile][block][0][j] + sum[tile][block][1][j];
            if constexpr (kChains == 4) s[j] += sum[tile][block][2][j] + sum[tile][block][3][j];
          }
          if (column < Shape::kColumns) {
            to[column] = s[0];
            to[column + Shape::kResultStride] = s[1];
          }
          if (column + 8 < Shape::kColumns) {
            to[column + 8] = s[2];
            to[column + 8 + Shape::kResultStride] = s[3];
          }
        }
      }
    }
  }

 private:
  using Sums = float[kTiles][Shape::kBlock][kChains][4];

  template <int COUNT>
  __device__ __forceinline__ static void multiply_from(const float4* weights, int chunk, Tag<COUNT>,
                                                       const float* base, Sums& sum) {
#pragma unroll 2
    for (int i = 0; i < COUNT; ++i) {
      float4 w[kTiles][2];
#pragma unroll
      for (int j = 0; j < kTiles * 2; ++j) {
        w[j / 2][j % 2] = weights[(i * kTiles * 2 + j) * Shape::kThreads + threadIdx.x];
      }
      multiply(base, chunk + i, w, sum);
    }
  }

  __device__ __forceinline__ static void multiply(const float* base, int chunk,
                                                  const float4 (*w)[2], Sums& sum) {
    unsigned x_high[Shape::kBlock][4], x_low[Shape::kBlock][4];
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block) {
      const float4 x =
          *reinterpret_cast<const float4*>(base + block * 8 * Shape::kStride + chunk * 16);
      const float value[4] = {x.x, x.y, x.z, x.w};
      split<4>(value, x_high[block], x_low[block]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 a = w[tile][half];
        const float value[4] = {a.x, a.y, a.z, a.w};
        unsigned high[4], low[4];
        split<4>(value, high, low);
#pragma unroll
        for (int block = 0; block < Shape::kBlock; ++block) {
          float (*s)[4] = sum[tile][block] + half * 2 % kChains;
          if constexpr (Shape::kSplit) {
            mma_tf32(s[1], low, x_high[block] + 2 * half);
            mma_tf32(s[1], high, x_low[block] + 2 * half);
          }
          mma_tf32(s[0], high, x_high[block] + 2 * half);
        }
      }
    }
  }
};

}  // namespace tfmem
