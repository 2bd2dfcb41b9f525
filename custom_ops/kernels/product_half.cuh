// Products on the tensor cores in 16-bit numbers: mma.m16n8k16.
//
// Three kinds (operands.cuh). With kPairs a number is the sum of two float16, 22 bits together;
// three products (high * high, high * low, low * high) keep float32's accuracy but for the last
// bits, at half the instructions of three TF32 products, since one takes twice the depth. Weights
// and operands are pairs already, of float32's size. Without, both are stored in 16 bits: in
// float16, which rounds as TF32 does, or with kBfloats in bfloat16.
//
// float16 is for operands that are known to stay in [-1, 1] (custom_ops/recurrent/bounds.py): an
// LSTM's and a GRU's states. They are scaled by kOperandScale, and each column of weights by its
// own power of two, so that both fill float16's range: what is lost is below 2^-38 of the
// largest.
#pragma once

#include "operands.cuh"
#include "product_tensor.cuh"

namespace tfmem {

// A piece is a fragment of high parts, or one of low parts if there are any.
template <class Shape>
struct Sixteen {
  static constexpr int kTiles = Shape::kThreadColumns;
  static constexpr int kForm = Shape::kForm;
  static constexpr bool kBfloat16 = kForm == kBfloats;
  static constexpr int kPieces = kForm == kPairs ? 2 : 1;
  using Operand = typename Four<kForm>::Words;
  static constexpr int kChains = kPieces == 2 && Shape::kBlock * kTiles < 4 ? 3 : 1;

  float scale[kTiles][2];  // of a lane's two columns of a tile
  float unscale[kTiles][2];

  // Finds each column's scale.
  template <class Source>
  __device__ void measure(const Source& source, int first_column, int first_k) {
    float largest_of[kTiles][2] = {};
    if constexpr (!kBfloat16) {
#pragma unroll
      for (int j = 0; j < 2 * kTiles; ++j) {
        const auto column = source.column(first_column + j * 8);
#pragma unroll 4
        for (int i = 0; i < Shape::kChunks; ++i) {
          const float4 w = column.four(first_k + i * 16);
          float& largest = largest_of[j / 2][j % 2];
          largest =
              fmaxf(fmaxf(fmaxf(fabsf(w.x), fabsf(w.y)), fmaxf(fabsf(w.z), fabsf(w.w))), largest);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[tile][half] = unscale[tile][half] = 1.0f;
        if constexpr (kBfloat16) continue;
        float largest = largest_of[tile][half];
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        // Its products with low parts would be NaN.
        if (kPieces == 2 && !(largest <= 3.4e38f)) source.fail();
        // The largest becomes a number in [2^14, 2^15).
        const unsigned exponent = __float_as_uint(largest) >> 23;
        const bool plain = exponent > 40 && exponent < 235;
        scale[tile][half] = plain ? __uint_as_float((254 + 14 - exponent) << 23) : 1.0f;
        unscale[tile][half] = 1.0f / (scale[tile][half] * Shape::kOperandScale);
      }
    }
  }

  template <class Column>
  __device__ uint4 piece(const Column& upper, const Column& lower, int tile, int k,
                         int piece) const {
    const float4 a = upper.four(k), b = lower.four(k);
    const float s = scale[tile][0], t = scale[tile][1];
    return make_uint4(part_of(a.x * s, a.y * s, piece), part_of(b.x * t, b.y * t, piece),
                      part_of(a.z * s, a.w * s, piece), part_of(b.z * t, b.w * t, piece));
  }

  __device__ float scaled(float sum, int tile, int half) const { return sum * unscale[tile][half]; }

  template <class Sums>
  __device__ __forceinline__ static void multiply(const Operand* operands,
                                                  const uint4 (*w)[kPieces], Sums& sum) {
    unsigned x[Shape::kBlock][kPieces][2];
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block) {
      const Operand four = operands[block];
      if constexpr (kPieces == 2) {
        x[block][1][0] = four.x;
        x[block][1][1] = four.y;
        x[block][0][0] = four.z;
        x[block][0][1] = four.w;
      } else {
        x[block][0][0] = four.x;
        x[block][0][1] = four.y;
      }
    }
    // One kind of product after the other: those that add to the same sum wait for each other.
    if constexpr (kPieces == 2) {
      each(sum, kChains - 1,
           [&](float* s, int tile, int block) { mma_half<false>(s, w[tile][1], x[block][0]); });
      each(sum, kChains > 1 ? 1 : 0,
           [&](float* s, int tile, int block) { mma_half<false>(s, w[tile][0], x[block][1]); });
    }
    each(sum, 0,
         [&](float* s, int tile, int block) { mma_half<kBfloat16>(s, w[tile][0], x[block][0]); });
  }

 private:
  template <class Sums, class Product>
  __device__ __forceinline__ static void each(Sums& sum, int chain, const Product& product) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int block = 0; block < Shape::kBlock; ++block)
        product(sum[tile][block][chain], tile, block);
  }

  // The high part of two numbers, or the low one.
  __device__ __forceinline__ static unsigned part_of(float a, float b, int piece) {
    if constexpr (kBfloat16) return bfloat16_pair(a, b);
    const unsigned high = half_pair(a, b);
    return piece == 0 ? high : rest_pair(a, b, high);
  }
};

template <class Shape>
using HalfProduct = TensorProduct<Shape, Sixteen<Shape>>;

}  // namespace tfmem
