// What all kernels share. No CUDA or C++ headers: NVRTC compiles these files as they are.
#pragma once

#include "ptx.cuh"

namespace tfmem {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The kernel's parameter (custom_ops/recurrent/gpu_program.py lists the words).
template <int WORDS>
struct Parameters {
  Word word[WORDS];
};

constexpr int kTimeAndBatch = 0;
constexpr int kGroups = 1;
constexpr int kScratch = 2;
constexpr int kStatus = 3;
constexpr int kReverse = 4;
constexpr int kStrides = 5;
constexpr int kTurn = 6;  // of a kernel for one stage of one step
constexpr int kPointers = 7;

template <int N>
struct Tag {};

constexpr int kAllStages = -1;

// Storage types; arithmetic is in float.
struct Half {
  unsigned short bits;
};
struct Bfloat16 {
  unsigned short bits;
};

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(Half value) { return half_to_float(value.bits); }

__device__ inline float to_float(Bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

__device__ inline void from_float(float value, float* result) { *result = value; }

__device__ inline void from_float(float value, Half* result) {
  result->bits = float_to_half(value);
}

__device__ inline void from_float(float value, Bfloat16* result) {
  const unsigned bits = __float_as_uint(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
  result->bits = static_cast<unsigned short>(nan ? 0x7fffu : rounded);
}

// Largest number of polls before a spin gives up: seconds, where an exchange takes about a
// microsecond.
constexpr int kPolls = 1 << 22;

}  // namespace tfmem
