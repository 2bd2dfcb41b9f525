// Numbers of TensorFlow's stateless random ops: Philox 4x32-10 (custom_ops/expr/philox.py is the
// definition).
#pragma once

#include "fusion.cuh"

namespace tfmem {

// Four words of a counter.
struct Group {
  unsigned at[4];
};

// Philox of the state's counter plus `group`. A round is two products of 64 bits and four exclusive
// ors.
__device__ __forceinline__ Group philox(const Word* key, const Word* counter, Word group) {
  const Word low = counter[0] + group;
  const Word high = counter[1] + (low < group ? 1 : 0);
  unsigned a = static_cast<unsigned>(low), b = static_cast<unsigned>(low >> 32);
  unsigned c = static_cast<unsigned>(high), d = static_cast<unsigned>(high >> 32);
  unsigned key0 = static_cast<unsigned>(key[0]), key1 = static_cast<unsigned>(key[0] >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const Word first = Word(a) * 0xd2511f53u, second = Word(c) * 0xcd9e8d57u;
    a = static_cast<unsigned>(second >> 32) ^ b ^ key0;
    c = static_cast<unsigned>(first >> 32) ^ d ^ key1;
    b = static_cast<unsigned>(second);
    d = static_cast<unsigned>(first);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{a, b, c, d}};
}

// The state that TensorFlow makes of a seed of two numbers: four words of a generator whose counter
// the seed is.
struct Seeded {
  Word key, counter[2];
  __device__ __forceinline__ explicit Seeded(const long long* seed) {
    const Word scramble = 0x02461e293ec8f720ull;
    const Word numbers[2] = {static_cast<Word>(seed[0]), static_cast<Word>(seed[1])};
    const Group group = philox(&scramble, numbers, 0);
    key = Word(group.at[1]) << 32 | group.at[0];
    counter[0] = 0;
    counter[1] = Word(group.at[3]) << 32 | group.at[2];
  }
};

// For storage type T: how many numbers a group gives, what is computed with, and number `lane`.
// The mantissa's bits are random, and 1 is subtracted, which is exact.
template <class T>
struct Draws {  // of half types: what they store is what float holds
  using Number = float;
  static constexpr int kGroup = 4;
  __device__ static float number(const Group& group, int lane);
};

__device__ __forceinline__ float one_to_two(unsigned mantissa) {
  return __uint_as_float(0x3f800000u | mantissa) - 1.0f;
}
template <>
__device__ __forceinline__ float Draws<float>::number(const Group& group, int lane) {
  return one_to_two(group.at[lane] & 0x7fffffu);
}
template <>
__device__ __forceinline__ float Draws<Half>::number(const Group& group, int lane) {
  return one_to_two((group.at[lane] & 0x3ffu) << 13);
}
template <>
__device__ __forceinline__ float Draws<Bfloat16>::number(const Group& group, int lane) {
  return one_to_two((group.at[lane] & 0x7fu) << 16);
}

template <>
struct Draws<double> {
  using Number = double;
  static constexpr int kGroup = 2;
  __device__ static double number(const Group& group, int lane) {
    const double high = static_cast<double>(group.at[2 * lane] & 0xfffffu);
    const double low = static_cast<double>(group.at[2 * lane + 1]);
    return high * 9.5367431640625e-7 + low * 2.220446049250313e-16;  // 2^-20 and 2^-52: exact
  }
};

template <>
struct Draws<int> {
  using Number = int;
  static constexpr int kGroup = 4;
  __device__ static int number(const Group& group, int lane) {
    return static_cast<int>(group.at[lane]);
  }
};

template <>
struct Draws<long long> {
  using Number = long long;
  static constexpr int kGroup = 2;
  __device__ static long long number(const Group& group, int lane) {
    return static_cast<long long>(Word(group.at[2 * lane + 1]) << 32 | group.at[2 * lane]);
  }
};

// WIDTH numbers from `first` on, a multiple of WIDTH: those of one group are drawn at once.
template <class T, int WIDTH>
__device__ __forceinline__ Pack<typename Draws<T>::Number, WIDTH> drawn(const Word* key,
                                                                        const Word* counter,
                                                                        Word first) {
  constexpr int kGroup = Draws<T>::kGroup, kAtOnce = WIDTH < kGroup ? WIDTH : kGroup;
  Pack<typename Draws<T>::Number, WIDTH> numbers;
#pragma unroll
  for (int from = 0; from < WIDTH; from += kAtOnce) {
    const Group group = philox(key, counter, (first + from) / kGroup);
    const int skip = static_cast<int>((first + from) % kGroup);
#pragma unroll
    for (int lane = 0; lane < kGroup; ++lane) {  // no index of registers that is a value
      const typename Draws<T>::Number number = Draws<T>::number(group, lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (kAtOnce == kGroup ? lane == i : lane == skip + i) numbers.at[from + i] = number;
      }
    }
  }
  return numbers;
}

template <class T>
__device__ __forceinline__ typename Draws<T>::Number drawn(const Word* key, const Word* counter,
                                                           Word number) {
  return drawn<T, 1>(key, counter, number).at[0];
}

template <class T, int WIDTH>
__device__ __forceinline__ Pack<typename Draws<T>::Number, WIDTH> drawn(const long long* seed,
                                                                        Word first) {
  const Seeded state(seed);
  return drawn<T, WIDTH>(&state.key, state.counter, first);
}

template <class T>
__device__ __forceinline__ typename Draws<T>::Number drawn(const long long* seed, Word number) {
  return drawn<T, 1>(seed, number).at[0];
}

}  // namespace tfmem
