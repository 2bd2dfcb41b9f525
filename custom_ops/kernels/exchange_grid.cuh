// Exchange between CTAs anywhere on the device, through L2: no barrier, no fence, no flag.
//
// Every 32-bit word carries its own epoch in its lowest bit, so a reader knows of each word whether
// it is of this step. That costs the last bit of what is exchanged (a relative error of 6e-8; the
// CTA that owns a state keeps all of it), and no bandwidth. Two copies by the parity of the step,
// as in the cluster's exchange; a copy's epoch flips every second step. Scratch is zero before a
// launch, so the first words of either copy must have epoch 1: states are sent from step 1 on
// (those of step 0 are given), all else from step 0 on.
#pragma once

#include "exchange.cuh"

namespace tfmem {

__device__ __forceinline__ unsigned with_epoch(float value, unsigned epoch) {
  unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7ffffffeu | epoch;
  const unsigned largest = 0x7f7ffffeu | (bits & 0x80000000u);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  bits += bits >> 1 & bits & 1u;  // to nearest even, of the bit above
  bits &= ~1u;
  if (finite && (bits & 0x7f800000u) == 0x7f800000u) bits = largest;
  return bits | epoch;
}

__device__ __forceinline__ float without_epoch(unsigned bits) {
  return __uint_as_float(bits & ~1u);
}

__device__ __forceinline__ void store_relaxed(unsigned* to, uint4 value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
#endif
}

__device__ __forceinline__ void store_relaxed(unsigned* to, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void load_relaxed(const unsigned* from, uint4* value) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value->x), "=r"(value->y), "=r"(value->z), "=r"(value->w)
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ void load_relaxed(const unsigned* from, unsigned* value) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(*value) : "l"(from) : "memory");
}

template <bool CONDITION, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

__device__ __forceinline__ bool is_of(uint4 value, unsigned epoch) {
  return epoch ? (value.x & value.y & value.z & value.w & 1u)
               : !((value.x | value.y | value.z | value.w) & 1u);
}

__device__ __forceinline__ bool is_of(unsigned value, unsigned epoch) {
  return (value & 1u) == epoch;
}

__device__ __forceinline__ void put(float* to, uint4 value) {
  *reinterpret_cast<float4*>(to) = make_float4(without_epoch(value.x), without_epoch(value.y),
                                               without_epoch(value.z), without_epoch(value.w));
}

__device__ __forceinline__ void put(float* to, unsigned value) { *to = without_epoch(value); }

// 16 bytes of global memory (as L2 has them now) to shared memory, asynchronously.
__device__ __forceinline__ void copy_async(float* to, const unsigned* from) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  load_relaxed(from, reinterpret_cast<uint4*>(to));
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// With several passes, the operands of the next pass are copied while the products of this one run:
// there are two buffers in shared memory. A copied word may be old; then its thread asks for it
// again.
template <class Plan>
class GridExchange {
 public:
  static constexpr bool kAhead = Plan::kPasses > 1;

  __device__ explicit GridExchange(const Place& place) : place_(place) {}

  template <int B, class Initial>
  __device__ void begin(const Initial&) {}

  __device__ void start() { __syncthreads(); }

  template <int B, class Initial>
  __device__ __forceinline__ void wait(int pass, int step, const Initial& initial) {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    const bool first = step == 0 && pass == 0;
    if (step == 0 && kBuffer.states != 0) {
      fill_states<Plan, B>(operands<B>(pass, 0), pass * Plan::kRows, initial);
    }
    if (kAhead && !first) wait_for_copies();
    if (step > 0 || !kStatesOnly<B>) receive<B>(pass, step, kAhead && !first);
    __syncthreads();
    if constexpr (kAhead) {
      const bool last = pass + 1 == Plan::kPasses;
      const int next = last ? step + 1 : step;
      if (next > 0 || !kStatesOnly<B>) copy_ahead<B>(last ? 0 : pass + 1, next);
    }
  }

  template <int B>
  __device__ float* operands(int pass, int) const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    return reinterpret_cast<float*>(place_.shared + kBuffer.offset) +
           (kAhead ? pass % 2 : 0) * (Plan::kPaddedRows * kBuffer.stride);
  }

  template <int B, int O>
  __device__ __forceinline__ void send(int pass, int step, int row, int unit, bool valid,
                                       float value) const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    const unsigned word = with_epoch(value, epoch<B>(step, O));
    const uint4 four =
        make_uint4(__shfl_sync(kAllLanes, word, 0, 4), __shfl_sync(kAllLanes, word, 1, 4),
                   __shfl_sync(kAllLanes, word, 2, 4), __shfl_sync(kAllLanes, word, 3, 4));
    if (valid && threadIdx.x % 4 == 0) {
      store_relaxed(
          words<B>(pass, step, row) + (O * Plan::kCtas + place_.cta) * kBuffer.width + unit, four);
    }
  }

  template <int B, int O>
  __device__ void send_sum(int pass, int step, int row, float value) const {
    if (threadIdx.x % kWarp == 0) {
      store_relaxed(words<B>(pass, step, row) + O * Plan::kCtas + place_.cta,
                    with_epoch(value, epoch<B>(step, O)));
    }
  }

  __device__ void end_of_stage() const {}
  __device__ void finish() const { wait_for_copies(); }

 private:
  template <int B>
  static constexpr bool kStatesOnly =
      Plan::template buffer<B>().states == (1 << Plan::template buffer<B>().operands) - 1;

  // How many words a thread moves at a time, in how many pieces a buffer comes.
  template <int B>
  static constexpr int kRow =
      Plan::template buffer<B>().operands * Plan::kCtas * Plan::template buffer<B>().width;
  template <int B>
  static constexpr int kWords = kRow<B> % 4 == 0 ? 4 : 1;
  template <int B>
  static constexpr int kPieces = Plan::kRows * kRow<B> / kWords<B>;

  template <int B>
  __device__ static unsigned epoch(int step, int operand) {
    const int first = Plan::template buffer<B>().states >> operand & 1;
    return (step - first) / 2 % 2 == 0;
  }

  template <int B>
  __device__ unsigned* words(int pass, int step, int row) const {
    return reinterpret_cast<unsigned*>(place_.scratch + Plan::template buffer<B>().exchanged) +
           ((step % 2 * Plan::kPasses + pass) * Plan::kRows + row) * kRow<B>;
  }

  // The index-th piece of this CTA. Each CTA starts elsewhere, so that they do not all ask the same
  // slice of L2.
  template <int B>
  __device__ int piece(int index) const {
    const int shifted = index + place_.cta * (kPieces<B> / Plan::kCtas);
    return shifted >= kPieces<B> ? shifted - kPieces<B> : shifted;
  }

  template <int B>
  __device__ float* place_of(int pass, int piece) const {
    constexpr int kPiecesOfRow = kRow<B> / kWords<B>;
    return operands<B>(pass, 0) + piece / kPiecesOfRow * Plan::template buffer<B>().stride +
           piece % kPiecesOfRow * kWords<B>;
  }

  template <int B>
  __device__ __forceinline__ void copy_ahead(int pass, int step) const {
    if constexpr (kWords<B> == 4) {
      const unsigned* from = words<B>(pass, step, 0);
#pragma unroll 4
      for (int i = threadIdx.x; i < kPieces<B>; i += Plan::kThreads) {
        copy_async(place_of<B>(pass, piece<B>(i)), from + piece<B>(i) * 4);
      }
    }
  }

  // All words of one buffer, from all CTAs, into shared memory; `ahead` says that a copy of them is
  // there.
  template <int B>
  __device__ __forceinline__ void receive(int pass, int step, bool ahead) {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    using Words = typename Choose<kWords<B> == 4, uint4, unsigned>::Type;
    constexpr int kOnce = (kPieces<B> + Plan::kThreads - 1) / Plan::kThreads;
    constexpr int kFlight = kOnce < 8 ? kOnce : 8;  // loads of a thread on their way
    const unsigned* from = words<B>(pass, step, 0);
    const int lane = threadIdx.x % kWarp;
    // A warp stays together, in both loops: lanes that left a spin one by one went on to the
    // barrier alone (seen: a half warp read operands that had not arrived, and its shuffles lost
    // the other half).
#pragma unroll 1
    for (int first = threadIdx.x; first - lane < kPieces<B>; first += Plan::kThreads * kFlight) {
      Words value[kFlight];
      unsigned old = 0;  // bit i: value[i] is not of this step yet
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int index = first + i * Plan::kThreads;
        const int operand = piece<B>(index) * kWords<B> % kRow<B> / (Plan::kCtas * kBuffer.width);
        const bool wanted = index < kPieces<B> && !(step == 0 && (kBuffer.states >> operand & 1));
        if (wanted && ahead && kWords<B> == 4) {
          value[i] = *reinterpret_cast<Words*>(place_of<B>(pass, piece<B>(index)));
        } else if (wanted) {
          load_relaxed(from + piece<B>(index) * kWords<B>, &value[i]);
        }
        old |= wanted << i;
      }
      // All that are old are asked for at once, or their latencies would add up.
      for (int polls = failed_ ? 0 : kPolls; __any_sync(kAllLanes, old != 0); --polls) {
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          const int index = first + i * Plan::kThreads;
          const int operand = piece<B>(index) * kWords<B> % kRow<B> / (Plan::kCtas * kBuffer.width);
          if ((old >> i & 1) && (polls == 0 || is_of(value[i], epoch<B>(step, operand)))) {
            put(place_of<B>(pass, piece<B>(index)), value[i]);
            old &= ~(1u << i);
          }
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          const int index = first + i * Plan::kThreads;
          if (old >> i & 1) load_relaxed(from + piece<B>(index) * kWords<B>, &value[i]);
        }
        if (polls == 0) fail();
        if (polls % 1024 == 1) {
          const bool elsewhere = *reinterpret_cast<volatile int*>(place_.status) != 0;
          if (__any_sync(kAllLanes, elsewhere)) polls = 1;
        }
      }
    }
  }

  // A spin ran out: later ones end at once, and the fallback computes everything again.
  __device__ void fail() {
    failed_ = true;
    *place_.status = 1;
  }

  Place place_;
  bool failed_ = false;
};

}  // namespace tfmem
