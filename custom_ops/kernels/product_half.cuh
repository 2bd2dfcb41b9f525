// A CTA's part of a matrix product on the tensor cores, in pairs of float16, for operands that are
// known to stay in [-1, 1] (custom_ops/bounds.py): an LSTM's and a GRU's states.
//
// A number is the sum of two float16, 22 bits together; three products (high * high, high * low,
// low * high) keep float32's accuracy but for the last bits, at half the instructions of three TF32
// products: mma.m16n8k16 takes twice the depth. The resident weights are pairs already and take the
// room that they took before. Operands are scaled by kOperandScale, and each column of weights by a
// power of two of its own, so that both fill float16's range: what is lost is below 2^-38 of the
// largest.
#pragma once

#include "common.cuh"

namespace tfmem {

// Two numbers as the sum of two pairs of float16. A number that is not finite has no low part, or
// infinity would become NaN.
__device__ __forceinline__ void split_pair(float a, float b, unsigned* high, unsigned* low) {
  float back_a, back_b;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*high) : "f"(b), "f"(a));
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(back_a), "=f"(back_b)
      : "r"(*high));
  const float rest_a = fabsf(back_a) <= 65504.0f ? a - back_a : 0.0f;
  const float rest_b = fabsf(back_b) <= 65504.0f ? b - back_b : 0.0f;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*low) : "f"(rest_b), "f"(rest_a));
}

__device__ __forceinline__ void mma_half(float* d, const uint4& a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
}

// As MmaProduct, chunk for chunk; a chunk of weights is a fragment of high and one of low parts.
template <class Shape>
struct HalfProduct {
  static constexpr int kStreamed = Shape::kChunks - Shape::kRegisters - Shape::kShared;
  static constexpr int kTiles = Shape::kThreadColumns;
  static constexpr int kParts = Shape::kLanes / kWarp;
  static constexpr int kPaddedRows = (Shape::kRows + 7) / 8 * 8;

  // Sums that do not wait for each other.
  static constexpr int kChains = Shape::kBlock * kTiles < 4 ? 2 : 1;

  uint4 weight[Shape::kRegisters > 0 ? Shape::kRegisters : 1][kTiles][2];  // high, low
  float unscale[kTiles][2];  // of a lane's two columns of a tile

  template <class Source>
  __device__ void load(const Source& source, float4* shared, float4* streamed) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int first_k = warp % kParts * Shape::kChunks * 16 + lane % 4 * 4;
    float scale[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (warp / kParts * kTiles + tile) * 16 + half * 8 + lane / 4;
        float largest = 0.0f;
#pragma unroll 4
        for (int i = 0; i < Shape::kChunks; ++i) {
          const float4 w = source.four(column, first_k + i * 16);
          largest =
              fmaxf(fmaxf(fmaxf(fabsf(w.x), fabsf(w.y)), fmaxf(fabsf(w.z), fabsf(w.w))), largest);
        }
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        if (!(largest <= 3.4e38f)) source.fail();  // its products with low parts would be NaN
        // The largest becomes a number in [2^14, 2^15).
        const unsigned exponent = __float_as_uint(largest) >> 23;
        const bool plain = exponent > 20 && exponent < 235;
        scale[tile][half] = plain ? __uint_as_float((254 + 14 - exponent) << 23) : 1.0f;
        unscale[tile][half] = 1.0f / (scale[tile][half] * Shape::kOperandScale);
      }
    }
    // A tile's fragments: of the high parts, or of the low ones.
    const auto fragments = [&](int i, int tile, uint4* high, uint4* low) {
      const int column = (warp / kParts * kTiles + tile) * 16 + lane / 4;
      const float4 upper = source.four(column, first_k + i * 16);
      const float4 lower = source.four(column + 8, first_k + i * 16);
      const float s = scale[tile][0], t = scale[tile][1];
      split_pair(upper.x * s, upper.y * s, &high->x, &low->x);
      split_pair(lower.x * t, lower.y * t, &high->y, &low->y);
      split_pair(upper.z * s, upper.w * s, &high->z, &low->z);
      split_pair(lower.z * t, lower.w * t, &high->w, &low->w);
    };
    const auto store = [&](float4* to, int i, int tile, int place) {
      uint4* pair = reinterpret_cast<uint4*>(to) + place * 2 * Shape::kThreads + threadIdx.x;
      fragments(i, tile, pair, pair + Shape::kThreads);
    };
#pragma unroll
    for (int i = 0; i < Shape::kRegisters; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        fragments(i, tile, &weight[i][tile][0], &weight[i][tile][1]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll 1
      for (int i = 0; i < Shape::kShared; ++i) {
        store(shared, Shape::kRegisters + i, tile, i * kTiles + tile);
      }
#pragma unroll 1
      for (int i = 0; i < kStreamed; ++i) {
        store(streamed, Shape::kRegisters + Shape::kShared + i, tile, i * kTiles + tile);
      }
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
      for (int i = 0; i < Shape::kRegisters; ++i) multiply(base, i, weight[i], sum);
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
          float* s = sum[tile][block][0];
          if constexpr (kChains == 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] += sum[tile][block][1][i];
          }
          if (column < Shape::kColumns) {
            to[column] = s[0] * unscale[tile][0];
            to[column + Shape::kResultStride] = s[1] * unscale[tile][0];
          }
          if (column + 8 < Shape::kColumns) {
            to[column + 8] = s[2] * unscale[tile][1];
            to[column + 8 + Shape::kResultStride] = s[3] * unscale[tile][1];
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
      uint4 w[kTiles][2];
#pragma unroll
      for (int j = 0; j < kTiles * 2; ++j) {
        w[j / 2][j % 2] = reinterpret_cast<const uint4*>(
            weights)[(i * kTiles * 2 + j) * Shape::kThreads + threadIdx.x];
      }
      multiply(base, chunk + i, w, sum);
    }
  }

  __device__ __forceinline__ static void multiply(const float* base, int chunk, const uint4 (*w)[2],
                                                  Sums& sum) {
    unsigned high[Shape::kBlock][2], low[Shape::kBlock][2];
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block) {
      const float4 x =
          *reinterpret_cast<const float4*>(base + block * 8 * Shape::kStride + chunk * 16);
      constexpr float kScale = Shape::kOperandScale;
      split_pair(x.x * kScale, x.y * kScale, &high[block][0], &low[block][0]);
      split_pair(x.z * kScale, x.w * kScale, &high[block][1], &low[block][1]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int block = 0; block < Shape::kBlock; ++block) {
        float (*s)[4] = sum[tile][block];
        mma_half(s[kChains - 1], w[tile][1], high[block]);
        mma_half(s[kChains - 1], w[tile][0], low[block]);
        mma_half(s[0], w[tile][0], high[block]);
      }
    }
  }
};

}  // namespace tfmem
