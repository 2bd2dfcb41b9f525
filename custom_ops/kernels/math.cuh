// Elementwise functions with stated errors. None depends on a fast-math flag; NaN propagates.
#pragma once

#include "common.cuh"

namespace tfmem {

// Within 5 ulp where the result is above 1e-38. exp(-x) is 2 to -x / ln 2, in two parts, so that
// its rounding does not grow with |x|: the lower one is a factor near 1, made while the other is on
// its way. The bounds keep that finite where x is not, or is far out.
__device__ inline float sigmoid(float x) {
  constexpr float kLog2E = 1.44269502e+0f;
  constexpr float kLog2ELow = 1.92596303e-8f;
  constexpr float kLn2 = 6.93147182e-1f;
  const float high = -x * kLog2E;
  const float low = fmaf(-x, kLog2ELow, fmaf(-x, kLog2E, -high));
  const float factor = fmaf(fminf(fmaxf(low, -1e-4f), 1e-4f), kLn2, 1.0f);
  return reciprocal_approximate(fmaf(exp2_approximate(high), factor, 1.0f));
}

// Within 3 ulp: an odd polynomial (a minimax fit, 1e-8 relative) below 0.55, else 1 - 2 /
// (exp(2|x|) + 1), where the rounding of the exponent does not matter.
__device__ inline float hyperbolic_tangent(float x) {
  const float magnitude = fabsf(x);
  const float power = exp2_approximate(magnitude * 2.88539004e+0f);  // 2 / ln 2
  const float large = fmaf(-2.0f, reciprocal_approximate(power + 1.0f), 1.0f);
  const float square = x * x;
  float series = -6.198669784e-03f;
  series = fmaf(series, square, 2.102051675e-02f);
  series = fmaf(series, square, -5.384051055e-02f);
  series = fmaf(series, square, 1.333248019e-01f);
  series = fmaf(series, square, -3.333331347e-01f);
  const float small = fmaf(magnitude * square, series, magnitude);
  return copysignf(magnitude < 0.55f ? small : large, x);  // of -0 it is -0
}

__device__ inline float softplus(float x) {
  // log(1 + exp(x)) without overflow; a NaN passes through fabsf.
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) + (x != x ? x : 0.0f);
}

__device__ inline float elu(float x) { return x > 0.0f ? x : expm1f(x); }

__device__ inline float selu(float x) {
  return x < 0.0f ? 1.75809934f * expm1f(x) : 1.05070099f * x;
}

// NaN-keeping, unlike fmaxf and fminf.
template <class T>
__device__ inline T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}
template <class T>
__device__ inline T minimum(T a, T b) {
  return a < b || a != a ? a : b;
}

__device__ inline float floor_mod(float x, float y) {
  const float rest = fmodf(x, y);
  return rest != 0.0f && (y < 0.0f) != (rest < 0.0f) ? rest + y : rest;
}
__device__ inline float absolute(float x) { return fabsf(x); }

template <class T>
__device__ inline T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x + T(0);  // of -0 it is 0, of NaN it is NaN
}

// Functions of doubles, whose time has limited no kernel so far, and of integers.
__device__ inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }
__device__ inline double softplus(double x) {
  return fmax(x, 0.0) + log1p(exp(-fabs(x))) + (x != x ? x : 0.0);
}
__device__ inline double elu(double x) { return x > 0.0 ? x : expm1(x); }
__device__ inline double selu(double x) {
  return x < 0.0 ? 1.7580993408473769 * expm1(x) : 1.0507009873554805 * x;
}
__device__ inline double floor_mod(double x, double y) {
  const double rest = fmod(x, y);
  return rest != 0.0 && (y < 0.0) != (rest < 0.0) ? rest + y : rest;
}
__device__ inline double absolute(double x) { return fabs(x); }
// The least integer has no absolute value but itself.
__device__ inline int absolute(int x) {
  return x < 0 ? static_cast<int>(0u - static_cast<unsigned>(x)) : x;
}
__device__ inline long long absolute(long long x) {
  return x < 0 ? static_cast<long long>(Word(0) - static_cast<Word>(x)) : x;
}

// The nearest number of storage type T.
template <class T>
__device__ inline float rounded(float value) {
  T stored;
  from_float(value, &stored);
  return to_float(stored);
}

}  // namespace tfmem
