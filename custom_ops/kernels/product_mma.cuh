// Products on the tensor cores in TF32: mma.m16n8k8.
//
// Three products (high * high, high * low, low * high) keep 22 bits of each factor, which is
// float32's accuracy but for the last bits.
#pragma once

#include "product_tensor.cuh"

namespace tfmem {

// value = high + low, each with at most 11 significant bits (the rest of `low` is cut by the tensor
// core). A number that is not finite has no low part, or infinity would become NaN.
template <int COUNT>
__device__ __forceinline__ void split(const float* value, unsigned* high, unsigned* low) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    high[i] = tf32_bits(value[i]);
    const float rest = value[i] - __uint_as_float(high[i]);
    low[i] = (high[i] & 0x7f800000u) == 0x7f800000u ? 0u : __float_as_uint(rest);
  }
}

// Weights as they are, split when they are used. A piece is the fragment of one of two
// instructions.
template <class Shape>
struct Tf32 {
  static constexpr int kTiles = Shape::kThreadColumns;
  static constexpr int kPieces = 2;
  using Operand = float4;

  // Separate sums of the large and the small products, and of the two instructions of a chunk where
  // there are few rows to alternate between.
  static constexpr int kChains = Shape::kBlock * kTiles > 1 ? 2 : 4;

  template <class Source>
  __device__ void measure(const Source&, int, int) {}

  template <class Column>
  __device__ uint4 piece(const Column& upper, const Column& lower, int, int k, int piece) const {
    const int first = k + piece * 2;
    return make_uint4(__float_as_uint(upper.one(first)), __float_as_uint(lower.one(first)),
                      __float_as_uint(upper.one(first + 1)), __float_as_uint(lower.one(first + 1)));
  }

  __device__ float scaled(float sum, int, int) const { return sum; }

  template <class Sums>
  __device__ __forceinline__ static void multiply(const float4* operands, const uint4 (*w)[kPieces],
                                                  Sums& sum) {
    unsigned x_high[Shape::kBlock][4], x_low[Shape::kBlock][4];
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block) {
      const float4 x = operands[block];
      const float value[4] = {x.x, x.y, x.z, x.w};
      split<4>(value, x_high[block], x_low[block]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 a = w[tile][half];
        const float value[4] = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z),
                                __uint_as_float(a.w)};
        unsigned high[4], low[4];
        split<4>(value, high, low);
        // One kind of product after the other: those that add to the same sum wait for each other.
        if constexpr (Shape::kSplit) {
          each(sum[tile], half * 2 % kChains + 1, low, x_high, half);
          each(sum[tile], half * 2 % kChains + 1, high, x_low, half);
        }
        each(sum[tile], half * 2 % kChains, high, x_high, half);
      }
    }
  }

 private:
  __device__ __forceinline__ static void each(float (*sum)[kChains][4], int chain,
                                              const unsigned* weights, const unsigned (*x)[4],
                                              int half) {
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block)
      mma_tf32(sum[block][chain], weights, x[block] + 2 * half);
  }
};

template <class Shape>
using MmaProduct = TensorProduct<Shape, Tf32<Shape>>;

}  // namespace tfmem
