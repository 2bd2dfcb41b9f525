// Numbers that the steps of a loop draw, each step by a separate key and counter: those of
// TensorFlow's stateless random ops. One launch draws for all steps.
#pragma once

#include "philox.cuh"

namespace tfmem {
namespace step_draws {

// What the table has for each step (custom_ops/ops/random/gpu_step_draws.cc writes it).
enum Column { kKey, kCounter, kCounterHigh, kLow, kRange, kColumns };

// The kernel's parameter.
struct Arguments {
  const Word* table;  // [steps, kColumns]
  void* to;           // [steps, numbers]
  long long steps;    // of the loop
  long long numbers;  // of a step
  long long seeded;   // whether kKey and kCounter are a seed of two numbers
};

__device__ __forceinline__ void put(double value, double* to) { *to = value; }
template <class T>
__device__ __forceinline__ void put(float value, T* to) {
  from_float(value, to);
}

// What a distribution makes of a group of words: kGroup numbers. All bits, or [0, 1).
template <class T>
struct Uniform {
  using Value = T;
  static constexpr int kGroup = Draws<T>::kGroup;
  __device__ static void draw(const Group& group, const Word*, Value* to) {
#pragma unroll
    for (int lane = 0; lane < kGroup; ++lane) put(Draws<T>::number(group, lane), to + lane);
  }
};

// [kLow, kLow + kRange), where the remainder may favour small numbers, as in TensorFlow.
template <class T, class Unsigned>
struct UniformInt {
  using Value = T;
  static constexpr int kGroup = Draws<T>::kGroup;
  __device__ static void draw(const Group& group, const Word* row, Value* to) {
    const Unsigned low = static_cast<Unsigned>(row[kLow]);
    const Unsigned range = static_cast<Unsigned>(row[kRange]);
#pragma unroll
    for (int lane = 0; lane < kGroup; ++lane) {
      const Unsigned bits = static_cast<Unsigned>(Draws<T>::number(group, lane));
      to[lane] = static_cast<Value>(low + bits % range);
    }
  }
};

template <class T>
struct FullInt {
  using Value = T;
  static constexpr int kGroup = Draws<T>::kGroup;
  __device__ static void draw(const Group& group, const Word*, Value* to) {
#pragma unroll
    for (int lane = 0; lane < kGroup; ++lane) to[lane] = Draws<T>::number(group, lane);
  }
};

// The transform of Box and Muller: two uniform numbers give two normal ones. The angle is a product
// of doubles, as TensorFlow writes it.
__device__ inline void box_muller(float first, float second, float* to) {
  const float angle = static_cast<float>(6.283185307179586 * second);
  const float radius = sqrtf(-2.0f * logf(first < 1.0e-7f ? 1.0e-7f : first));
  to[0] = sinf(angle) * radius;
  to[1] = cosf(angle) * radius;
}
__device__ inline void box_muller(double first, double second, double* to) {
  const double angle = 6.283185307179586 * second;
  const double radius = sqrt(-2.0 * log(first < 1.0e-7 ? 1.0e-7 : first));
  to[0] = sin(angle) * radius;
  to[1] = cos(angle) * radius;
}

// Half types have normal numbers of float, rounded.
template <class T>
struct Normal {
  using Value = T;
  using Number = typename Draws<T>::Number;
  static constexpr int kGroup = Draws<T>::kGroup;
  __device__ static void draw(const Group& group, const Word*, Value* to) {
#pragma unroll
    for (int lane = 0; lane < kGroup; lane += 2) {
      Number pair[2];
      box_muller(Draws<Number>::number(group, lane), Draws<Number>::number(group, lane + 1), pair);
      put(pair[0], to + lane);
      put(pair[1], to + lane + 1);
    }
  }
};

template <class Kind>
__device__ void draw(const Arguments& arguments) {
  using Value = typename Kind::Value;
  const long long groups = (arguments.numbers + Kind::kGroup - 1) / Kind::kGroup;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; at < arguments.steps * groups; at += threads) {
    const long long step = at / groups, place = at % groups, first = place * Kind::kGroup;
    const Word* row = arguments.table + step * kColumns;
    Word key = row[kKey], counter[2] = {row[kCounter], row[kCounterHigh]};
    if (arguments.seeded != 0) {
      const long long seed[2] = {static_cast<long long>(key), static_cast<long long>(counter[0])};
      const Seeded state(seed);
      key = state.key;
      counter[0] = state.counter[0];
      counter[1] = state.counter[1];
    }
    Value numbers[Kind::kGroup];
    Kind::draw(philox(&key, counter, static_cast<Word>(place)), row, numbers);
    Value* to = static_cast<Value*>(arguments.to) + step * arguments.numbers + first;
#pragma unroll
    for (int lane = 0; lane < Kind::kGroup; ++lane) {
      if (first + lane < arguments.numbers) to[lane] = numbers[lane];
    }
  }
}

}  // namespace step_draws
}  // namespace tfmem
