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

template <class Plan>
class GridExchange {
 public:
  static constexpr int kCopies = 1;

  __device__ explicit GridExchange(const Place& place) : place_(place) {}

  template <int B, class Initial>
  __device__ void begin(const Initial&) {}

  __device__ void start() { __syncthreads(); }

  template <int B, class Initial>
  __device__ __forceinline__ void wait(int pass, int step, const Initial& initial) {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    constexpr int kRow = kBuffer.operands * Plan::kCtas * kBuffer.width;
    if (step == 0 && kBuffer.states != 0) {
      fill_states<Plan, B>(operands<B>(pass, 0), pass * Plan::kRows, initial);
    }
    if (step > 0 || kBuffer.states != (1 << kBuffer.operands) - 1) {
      if constexpr (kRow % 4 == 0) {
        receive<B, uint4>(pass, step);
      } else {
        receive<B, unsigned>(pass, step);
      }
    }
    __syncthreads();
  }

  template <int B>
  __device__ float* operands(int, int) const {
    return reinterpret_cast<float*>(place_.shared + Plan::template buffer<B>().offset);
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
  __device__ void finish() const {}

 private:
  template <int B>
  __device__ static unsigned epoch(int step, int operand) {
    const int first = Plan::template buffer<B>().states >> operand & 1;
    return (step - first) / 2 % 2 == 0;
  }

  template <int B>
  __device__ unsigned* words(int pass, int step, int row) const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    constexpr int kRow = kBuffer.operands * Plan::kCtas * kBuffer.width;
    return reinterpret_cast<unsigned*>(place_.scratch + kBuffer.exchanged) +
           ((step % 2 * Plan::kPasses + pass) * Plan::kRows + row) * kRow;
  }

  // All words of one buffer, from all CTAs, into shared memory.
  template <int B, class Words>
  __device__ __forceinline__ void receive(int pass, int step) {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    constexpr int kWords = sizeof(Words) / 4;
    constexpr int kRow = kBuffer.operands * Plan::kCtas * kBuffer.width / kWords;
    constexpr int kTotal = Plan::kRows * kRow;
    constexpr int kOnce = (kTotal + Plan::kThreads - 1) / Plan::kThreads;
    constexpr int kFlight = kOnce < 8 ? kOnce : 8;  // loads of a thread on their way
    const unsigned* from = words<B>(pass, step, 0);
    float* to = operands<B>(pass, step);
    // Each CTA starts elsewhere, so that they do not all ask the same slice of L2.
    const int shift = place_.cta * kBuffer.width / kWords;
#pragma unroll 1
    for (int first = threadIdx.x; first < kTotal; first += Plan::kThreads * kFlight) {
      Words value[kFlight];
      int place[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        place[i] = first + i * Plan::kThreads + shift;
        place[i] -= place[i] >= kTotal ? kTotal : 0;
        if (first + i * Plan::kThreads < kTotal) load_relaxed(from + place[i] * kWords, &value[i]);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (first + i * Plan::kThreads >= kTotal) break;
        const int operand = place[i] % kRow / (Plan::kCtas * kBuffer.width / kWords);
        const bool state = kBuffer.states >> operand & 1;
        if (step == 0 && state) continue;
        const unsigned epoch_now = epoch<B>(step, operand);
        int polls = failed_ ? 0 : kPolls;
        while (!is_of(value[i], epoch_now) && polls > 0) {
          load_relaxed(from + place[i] * kWords, &value[i]);
          --polls;
          if (polls % 1024 == 0 && *reinterpret_cast<volatile int*>(place_.status) != 0) polls = 0;
        }
        if (polls == 0) {
          failed_ = true;
          *place_.status = 1;
        }
        put(to + place[i] / kRow * kBuffer.stride + place[i] % kRow * kWords, value[i]);
      }
    }
  }

  Place place_;
  bool failed_ = false;
};

}  // namespace tfmem
