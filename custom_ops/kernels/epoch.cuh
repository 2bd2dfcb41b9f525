// Numbers that say of which step they are (exchange_grid.cuh): an epoch in the lowest bit of each
// 64 bits, which one load or store moves as a whole.
#pragma once

#include "operands.cuh"

namespace tfmem {

// A word whose lowest bit is free: that of a float32, or of the first of two 16-bit numbers.
// Numbers are rounded to even, to one bit less, unless that made infinity of them; infinity and NaN
// (as conversions make it) stay what they are when the bit is dropped.
template <int FORM>
__device__ __forceinline__ unsigned without_last_bit(unsigned word) {
  constexpr unsigned kExponent = FORM == kFloats    ? 0x7f800000u
                                 : FORM == kBfloats ? 0x7f80u
                                                    : 0x7c00u;
  if (FORM == kFloats && (word & 0x7fffffffu) > kExponent) return 0x7ffffffeu;
  const unsigned rounded = word + (word >> 1 & word & 1u);
  return ((rounded | word) & kExponent) == kExponent ? word & ~1u : rounded & ~1u;
}

// In pairs each 64 bits are two numbers, low parts first: a high part keeps its last bit.
template <int FORM>
__device__ __forceinline__ uint4 with_epoch(uint4 four, unsigned epoch) {
  if constexpr (FORM == kPairs) four = make_uint4(four.x, four.z, four.y, four.w);
  four.x = without_last_bit<FORM>(four.x) | epoch;
  four.z = without_last_bit<FORM>(four.z) | epoch;
  return four;
}

template <int FORM>
__device__ __forceinline__ uint2 with_epoch(uint2 four, unsigned epoch) {
  four.x = without_last_bit<FORM>(four.x) | epoch;
  return four;
}

template <int FORM>
__device__ __forceinline__ uint4 without_epoch(uint4 words) {
  if constexpr (FORM == kPairs) return make_uint4(words.x & ~1u, words.z & ~1u, words.y, words.w);
  return make_uint4(words.x & ~1u, words.y, words.z & ~1u, words.w);
}

template <int FORM>
__device__ __forceinline__ uint2 without_epoch(uint2 words) {
  return make_uint2(words.x & ~1u, words.y);
}

template <int FORM>
__device__ __forceinline__ unsigned without_epoch(unsigned word) {
  return word & ~1u;
}

// So many words that are moved as one.
template <int WORDS>
struct Vector;
template <>
struct Vector<1> {
  using Type = unsigned;
};
template <>
struct Vector<2> {
  using Type = uint2;
};
template <>
struct Vector<4> {
  using Type = uint4;
};

__device__ __forceinline__ bool is_of(uint4 value, unsigned epoch) {
  return epoch ? (value.x & value.z & 1u) : !((value.x | value.z) & 1u);
}

__device__ __forceinline__ bool is_of(uint2 value, unsigned epoch) {
  return (value.x & 1u) == epoch;
}

__device__ __forceinline__ bool is_of(unsigned value, unsigned epoch) {
  return (value & 1u) == epoch;
}

}  // namespace tfmem
