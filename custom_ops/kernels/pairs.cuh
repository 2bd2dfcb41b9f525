// 16-bit numbers, two in a register, and float32 numbers as pairs of float16.
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

// Four numbers as the high parts of the first and the last two, then the low parts: what a product
// of pairs reads, in the room of four float32.
__device__ __forceinline__ float4 split_four(float4 four, float scale) {
  const float a = four.x * scale, b = four.y * scale, c = four.z * scale, d = four.w * scale;
  const unsigned high = half_pair(a, b), last = half_pair(c, d);
  return make_float4(__uint_as_float(high), __uint_as_float(last),
                     __uint_as_float(rest_pair(a, b, high)),
                     __uint_as_float(rest_pair(c, d, last)));
}

}  // namespace tfmem
