// How operands lie where products read them: as float32, as pairs of float16, or as 16-bit numbers.
// The thread that makes an operand encodes it, once; its readers do not.
#pragma once

#include "ptx.cuh"

namespace tfmem {

// What `high` lacks of two numbers. A number that is not finite lacks nothing, or infinity would
// become NaN.
__device__ __forceinline__ unsigned rest_pair(float a, float b, unsigned high) {
  const float2 back = floats_of_half_pair(high);
  return half_pair(fabsf(back.x) <= 65504.0f ? a - back.x : 0.0f,
                   fabsf(back.y) <= 65504.0f ? b - back.y : 0.0f);
}

enum Form { kFloats, kPairs, kHalves, kBfloats };

// Four neighbours of a row in some form, always together.
template <int FORM>
struct Four;

template <>
struct Four<kFloats> {
  static constexpr int kWords = 4;
  using Words = uint4;

  __device__ __forceinline__ static Words encode(float4 four, float) {
    return make_uint4(__float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z),
                      __float_as_uint(four.w));
  }
};

// float32 as the sum of two float16, of all but its last two bits: the low parts of all four, then
// the high ones, for an instruction reads one or the other, from neighbouring registers.
template <>
struct Four<kPairs> {
  static constexpr int kWords = 4;
  using Words = uint4;

  __device__ __forceinline__ static Words encode(float4 four, float scale) {
    const float a = four.x * scale, b = four.y * scale, c = four.z * scale, d = four.w * scale;
    const unsigned first = half_pair(a, b), last = half_pair(c, d);
    return make_uint4(rest_pair(a, b, first), rest_pair(c, d, last), first, last);
  }
};

template <>
struct Four<kHalves> {
  static constexpr int kWords = 2;
  using Words = uint2;

  __device__ __forceinline__ static Words encode(float4 four, float scale) {
    return make_uint2(half_pair(four.x * scale, four.y * scale),
                      half_pair(four.z * scale, four.w * scale));
  }
};

template <>
struct Four<kBfloats> {
  static constexpr int kWords = 2;
  using Words = uint2;

  __device__ __forceinline__ static Words encode(float4 four, float) {
    return make_uint2(bfloat16_pair(four.x, four.y), bfloat16_pair(four.z, four.w));
  }
};

}  // namespace tfmem
