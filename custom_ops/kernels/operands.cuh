// How operands lie where products read them: as float32, as pairs of float16, or as 16-bit numbers.
// Who makes an operand encodes it, once; who reads it does not.
#pragma once

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
