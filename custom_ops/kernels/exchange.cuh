// What CTAs of a group send each other, and the exchange that needs no other CTA.
//
// An exchange has buffers; a buffer has operands; a row of an operand holds `width` numbers of each
// CTA. All exchanges have these members (`step` counts from 0; operands of a
// buffer are what the products of one step read):
//   begin<B>(initial)             the states before step 0 come from initial(operand, row, place)
//   start()                       after all begin: no CTA sends before all CTAs are ready
//   wait<B>(step, initial)        until the operands of `step` are there
//   operands<B>(step)             then they are here
//   send<B, O>(...)               this CTA's number of one (row, unit), from all lanes of a warp,
//                                 for the reader's `step`
//   send_sum<B, O>(...)           this CTA's part of a row's sum, from all lanes of a warp
//   end_of_stage()                all threads, after the sends of a stage
//   finish()                      no CTA exits while others may still send to it
#pragma once

#include "common.cuh"
#include "operands.cuh"

namespace tfmem {

struct BufferShape {
  int operands;
  int width;
  int parts;   // CTAs whose numbers this one reads
  int stride;  // words between rows
  int offset;
  int barrier;
  int exchanged;
  int states;  // bit o: operand o is a state
  int form;    // in which products read its numbers
  bool local;  // no CTA sends it: each makes all of it
};

// Where an exchange keeps its data, and which CTA it is.
struct Place {
  char* shared;
  char* scratch;  // of this group
  int* status;
  int cta;
};

// Four numbers of a row, as the products of buffer B read them.
template <class Sizes, int B>
using FourOf = Four<Sizes::template buffer<B>().form>;

template <class Sizes, int B>
__device__ __forceinline__ typename FourOf<Sizes, B>::Words encode(float4 four) {
  return FourOf<Sizes, B>::encode(four, Sizes::kOperandScale);
}

// Words of so many numbers.
template <class Sizes, int B>
__host__ __device__ constexpr int words_of(int numbers) {
  return numbers * FourOf<Sizes, B>::kWords / 4;
}

// The numbers of a quad of lanes.
__device__ __forceinline__ float4 of_quad(float value) {
  return make_float4(__shfl_sync(kAllLanes, value, 0, 4), __shfl_sync(kAllLanes, value, 1, 4),
                     __shfl_sync(kAllLanes, value, 2, 4), __shfl_sync(kAllLanes, value, 3, 4));
}

// Whether sums stay in the registers of the subgroup that made them (product_fma.cuh): its
// `kUnitLanes` lanes have one unit, and each computes the cell for one row, `kSumLanes` lanes for
// the same. No warp is without units, or it could fall behind the others, which synchronise only
// by what they send.
template <class Sizes>
constexpr bool kInRegisters = Sizes::kSumLanes > 0;

// Neighbouring units of a row that lanes of one warp have: the most that one store can take. Each
// of `kLanes` lanes gets the numbers of all.
template <class Sizes>
struct Neighbours {
  static constexpr int kOfWarp = kInRegisters<Sizes> ? kWarp / Sizes::kUnitLanes : kWarp;
  static constexpr int kUnits = kOfWarp < 4 ? kOfWarp : 4;
  static constexpr int kLanes = kUnits * (kInRegisters<Sizes> ? Sizes::kSumLanes : 1);

  // Which of these lanes this is.
  __device__ __forceinline__ static int rank() {
    if constexpr (!kInRegisters<Sizes>) return threadIdx.x % 4;
    return threadIdx.x / Sizes::kUnitLanes % kUnits * Sizes::kSumLanes +
           threadIdx.x % Sizes::kSumLanes;
  }

  // The first of its numbers.
  __device__ __forceinline__ static int first(int unit) { return unit / kUnits * kUnits; }

  template <int B>
  __device__ __forceinline__ static auto encoded(float value) {
    if constexpr (!kInRegisters<Sizes>) {
      return encode<Sizes, B>(of_quad(value));
    } else {
      const int lane = threadIdx.x % kWarp;
      const int from = lane / (kUnits * Sizes::kUnitLanes) * (kUnits * Sizes::kUnitLanes) +
                       lane % Sizes::kUnitLanes;
      const auto word = [&](int unit) {
        return __shfl_sync(kAllLanes, __float_as_uint(value), from + unit * Sizes::kUnitLanes);
      };
      if constexpr (kUnits == 2) {
        return make_uint2(word(0), word(1));
      } else {
        return make_uint4(word(0), word(1), word(2), word(3));
      }
    }
  }
};

// Writes what is known before step 0; `first_place` is the unit where the parts that this
// CTA reads begin.
template <class Sizes, int B, class Initial>
__device__ inline void fill_states(float* to, const Initial& initial, int first_place = 0) {
  constexpr BufferShape kBuffer = Sizes::template buffer<B>();
  if constexpr (kBuffer.states != 0) {
    constexpr int kPlaces = kBuffer.parts * kBuffer.width;  // a multiple of 4
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < Sizes::kRows * kBuffer.operands * kPlaces;
         i += Sizes::kThreads * 4) {
      const int row = i / (kBuffer.operands * kPlaces);
      const int operand = i / kPlaces % kBuffer.operands;
      if (kBuffer.states >> operand & 1) {
        const int place = i % kPlaces;
        const auto one = [&](int next) {
          return initial(operand, row, first_place + place + next);
        };
        float* four = to + row * kBuffer.stride + words_of<Sizes, B>(operand * kPlaces + place);
        *reinterpret_cast<typename FourOf<Sizes, B>::Words*>(four) =
            encode<Sizes, B>(make_float4(one(0), one(1), one(2), one(3)));
      }
    }
  }
}

// One CTA: operands in shared memory; in one copy, since a stage's products are over when its
// elementwise part starts, or in two by the parity of the step, where that starts in each thread by
// itself. Those of the fallback are in global memory, in two copies, since its products are made as
// they are read. The fallback is slow, takes any size, and waits for no other CTA.
template <class Sizes>
class SingleExchange {
 public:
  __device__ explicit SingleExchange(const Place& place) : place_(place) {}

  template <int B, class Initial>
  __device__ void begin(const Initial& initial) {
    fill_states<Sizes, B>(operands<B>(0), initial);
  }

  __device__ void start() { __syncthreads(); }

  template <int B, class Initial>
  __device__ void wait(int, const Initial&) {}

  template <int B>
  __device__ float* operands(int step) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    const int copy = kInRegisters<Sizes> || Sizes::kFallback ? step % 2 : 0;
    char* base = Sizes::kFallback ? place_.scratch : place_.shared;
    return reinterpret_cast<float*>(base + kBuffer.offset) +
           copy * Sizes::kPaddedRows * kBuffer.stride;
  }

  template <int B, int O>
  __device__ void send(int step, int row, int unit, bool valid, float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    float* to = operands<B>(step) + row * kBuffer.stride;
    if constexpr (kBuffer.form == kFloats) {
      if (valid) to[O * kBuffer.width + unit] = value;
    } else {
      using Words = typename FourOf<Sizes, B>::Words;
      const Words four = encode<Sizes, B>(of_quad(value));
      to += words_of<Sizes, B>(O * kBuffer.width + unit);
      if (valid && threadIdx.x % 4 == 0) *reinterpret_cast<Words*>(to) = four;
    }
  }

  template <int B, int O>
  __device__ void send_sum(int step, int row, float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    if (threadIdx.x % kWarp == 0) operands<B>(step)[row * kBuffer.stride + O] = value;
  }

  __device__ void end_of_stage() const { __syncthreads(); }
  __device__ void finish() const {}

 private:
  Place place_;
};

}  // namespace tfmem
