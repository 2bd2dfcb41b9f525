// A CTA's part of a matrix product on the tensor cores, in 16-bit numbers: mma.m16n8k16.
//
// Three kinds. With kSplit a number is the sum of two float16, 22 bits together; three products
// (high * high, high * low, low * high) keep float32's accuracy but for the last bits, at half the
// instructions of three TF32 products, since one takes twice the depth. The resident weights are
// pairs already and take the room that they took before. Without, weights are stored in 16 bits,
// half the room: in float16, which rounds as TF32 does, or with kBfloat16.
//
// float16 is for operands that are known to stay in [-1, 1] (custom_ops/bounds.py): an LSTM's and a
// GRU's states. They are scaled by kOperandScale, and each column of weights by a power of two of
// its own, so that both fill float16's range: what is lost is below 2^-38 of the largest.
#pragma once

#include "common.cuh"

namespace tfmem {

__device__ __forceinline__ unsigned half_pair(float a, float b) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ unsigned bfloat16_pair(float a, float b) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

// What `high` lacks of two numbers. A number that is not finite lacks nothing, or infinity would
// become NaN.
__device__ __forceinline__ unsigned rest_pair(float a, float b, unsigned high) {
  float back_a, back_b;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(back_a), "=f"(back_b)
      : "r"(high));
  return half_pair(fabsf(back_a) <= 65504.0f ? a - back_a : 0.0f,
                   fabsf(back_b) <= 65504.0f ? b - back_b : 0.0f);
}

template <bool BFLOAT16>
__device__ __forceinline__ void mma_half(float* d, const uint4& a, const unsigned* b) {
  if constexpr (BFLOAT16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
  }
}

// As MmaProduct, chunk for chunk; a chunk of weights is a fragment of high parts, and one of low
// parts if there are any.
template <class Shape>
struct HalfProduct {
  static constexpr int kStreamed = Shape::kChunks - Shape::kRegisters - Shape::kShared;
  static constexpr int kTiles = Shape::kThreadColumns;
  static constexpr int kParts = Shape::kLanes / kWarp;
  static constexpr int kPaddedRows = (Shape::kRows + 7) / 8 * 8;

  // Sums that do not wait for each other.
  static constexpr int kChains = Shape::kBlock * kTiles < 4 ? 2 : 1;

  static constexpr int kPieces = Shape::kSplit ? 2 : 1;  // high, low

  uint4 weight[Shape::kRegisters > 0 ? Shape::kRegisters : 1][kTiles][kPieces];
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
        scale[tile][half] = unscale[tile][half] = 1.0f;
        if constexpr (Shape::kBfloat16) continue;
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
        // Its products with low parts would be NaN.
        if (Shape::kSplit && !(largest <= 3.4e38f)) source.fail();
        // The largest becomes a number in [2^14, 2^15).
        const unsigned exponent = __float_as_uint(largest) >> 23;
        const bool plain = exponent > 40 && exponent < 235;
        scale[tile][half] = plain ? __uint_as_float((254 + 14 - exponent) << 23) : 1.0f;
        unscale[tile][half] = 1.0f / (scale[tile][half] * Shape::kOperandScale);
      }
    }
    const auto fragments = [&](int i, int tile, int piece) {
      const int column = (warp / kParts * kTiles + tile) * 16 + lane / 4;
      const float4 upper = source.four(column, first_k + i * 16);
      const float4 lower = source.four(column + 8, first_k + i * 16);
      const float s = scale[tile][0], t = scale[tile][1];
      return make_uint4(
          part_of(upper.x * s, upper.y * s, piece), part_of(lower.x * t, lower.y * t, piece),
          part_of(upper.z * s, upper.w * s, piece), part_of(lower.z * t, lower.w * t, piece));
    };
    const auto store = [&](float4* to, int i, int tile, int place) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        reinterpret_cast<uint4*>(to)[(place * kPieces + piece) * Shape::kThreads + threadIdx.x] =
            fragments(i, tile, piece);
      }
    };
#pragma unroll
    for (int i = 0; i < Shape::kRegisters; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          weight[i][tile][piece] = fragments(i, tile, piece);
        }
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
      uint4 w[kTiles][kPieces];
#pragma unroll
      for (int j = 0; j < kTiles * kPieces; ++j) {
        w[j / kPieces][j % kPieces] = reinterpret_cast<const uint4*>(
            weights)[(i * kTiles * kPieces + j) * Shape::kThreads + threadIdx.x];
      }
      multiply(base, chunk + i, w, sum);
    }
  }

  // The high part of two numbers, or the low one.
  __device__ __forceinline__ static unsigned part_of(float a, float b, int piece) {
    if constexpr (Shape::kBfloat16) return bfloat16_pair(a, b);
    const unsigned high = half_pair(a, b);
    return piece == 0 ? high : rest_pair(a, b, high);
  }

  __device__ __forceinline__ static void multiply(const float* base, int chunk,
                                                  const uint4 (*w)[kPieces], Sums& sum) {
    unsigned x[Shape::kBlock][kPieces][2];
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block) {
      constexpr float kScale = Shape::kBfloat16 ? 1 : Shape::kOperandScale;
      const float4 four =
          *reinterpret_cast<const float4*>(base + block * 8 * Shape::kStride + chunk * 16);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        x[block][piece][0] = part_of(four.x * kScale, four.y * kScale, piece);
        x[block][piece][1] = part_of(four.z * kScale, four.w * kScale, piece);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int block = 0; block < Shape::kBlock; ++block) {
        float (*s)[4] = sum[tile][block];
        if constexpr (kPieces == 2) {
          mma_half<false>(s[kChains - 1], w[tile][1], x[block][0]);
          mma_half<false>(s[kChains - 1], w[tile][0], x[block][1]);
        }
        mma_half<Shape::kBfloat16>(s[0], w[tile][0], x[block][0]);
      }
    }
  }
};

}  // namespace tfmem
