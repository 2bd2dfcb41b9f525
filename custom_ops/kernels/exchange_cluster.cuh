// Exchange within a thread-block cluster (compute capability 9.0): every CTA stores its numbers
// straight into the shared memory of all others with `st.async`, which counts the bytes on the
// receiver's mbarrier. Data and signal take one hop, and there is no barrier.
//
// Two copies of each buffer, by the parity of the step, are enough: a CTA sends for step t + 2 only
// after it received all of step t + 1, which every CTA sent after it had read all of step t. The
// same holds for reuse of the mbarriers.
#pragma once

#include "exchange.cuh"

namespace tfmem {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ unsigned address_in(unsigned address, int cta) {
  unsigned result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(cta));
  return result;
}

__device__ __forceinline__ void store_async(unsigned to, float4 value, unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(to), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned to, float value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               :
               : "r"(to), "f"(value), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

__device__ __forceinline__ bool try_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

template <class Plan>
class ClusterExchange {
 public:
  __device__ explicit ClusterExchange(const Place& place) : place_(place) {
    const unsigned base = shared_address(place.shared);
#pragma unroll
    for (int i = 0; i < kPeers; ++i) {
      // Each CTA starts with another peer.
      peer_[i] = address_in(base, (place.cta + threadIdx.x % 4 + i * 4) % Plan::kCtas);
    }
  }

  template <int B, class Initial>
  __device__ void begin(const Initial& initial) {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      fill_states<Plan, B>(operands<B>(pass, 0), pass * Plan::kRows, initial);
      if (threadIdx.x == 0) {
        for (int copy = 0; copy < 2; ++copy) {
          const unsigned address = barrier<B>(pass, copy);
          asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
        }
        // States of step 0 are here already.
        constexpr int kStates = count_bits(kBuffer.states);
        expect(barrier<B>(pass, 0), kBytes<B> / kBuffer.operands * (kBuffer.operands - kStates));
        expect(barrier<B>(pass, 1), kBytes<B>);
      }
    }
  }

  __device__ void start() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    cluster_barrier();
  }

  template <int B, class Initial>
  __device__ __forceinline__ void wait(int pass, int step, const Initial&) {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    const unsigned address = barrier<B>(pass, step % 2);
    const unsigned parity = step / 2 % 2;
    // A cluster runs all at once or not at all, so this ends. The bound is for what nobody thought
    // of: an error of the launch, and neither a hung GPU nor wrong numbers.
    int polls = kPolls;
    while (!__all_sync(kAllLanes, try_wait(address, parity))) {
      if (--polls == 0) asm volatile("trap;");
    }
    if (threadIdx.x == 0) expect(address, kBytes<B>);
  }

  template <int B>
  __device__ float* operands(int pass, int step) const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    return reinterpret_cast<float*>(place_.shared + kBuffer.offset) +
           (step % 2 * Plan::kPasses + pass) * (Plan::kPaddedRows * kBuffer.stride);
  }

  template <int B, int O>
  __device__ __forceinline__ void send(int pass, int step, int row, int unit, bool valid,
                                       float value) const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    // A quad of lanes has 4 units of one row: each of its lanes sends all 4, to every fourth peer.
    const float4 four =
        make_float4(__shfl_sync(kAllLanes, value, 0, 4), __shfl_sync(kAllLanes, value, 1, 4),
                    __shfl_sync(kAllLanes, value, 2, 4), __shfl_sync(kAllLanes, value, 3, 4));
    const int number =
        ((step % 2 * Plan::kPasses + pass) * Plan::kPaddedRows + row) * kBuffer.stride +
        (O * Plan::kCtas + place_.cta) * kBuffer.width + unit / 4 * 4;
    const unsigned to = kBuffer.offset + number * 4;
    const unsigned barrier = kBuffer.barrier + (pass * 2 + step % 2) * 8;
    if (valid) {
#pragma unroll
      for (int i = 0; i < kPeers; ++i) {
        if (threadIdx.x % 4 + i * 4 < Plan::kCtas)
          store_async(peer_[i] + to, four, peer_[i] + barrier);
      }
    }
  }

  template <int B, int O>
  __device__ void send_sum(int pass, int step, int row, float value) const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    const int lane = threadIdx.x % kWarp;
    if (lane < Plan::kCtas) {
      const unsigned base = address_in(shared_address(place_.shared), lane);
      const int number =
          ((step % 2 * Plan::kPasses + pass) * Plan::kPaddedRows + row) * kBuffer.stride +
          O * Plan::kCtas + place_.cta;
      store_async(base + kBuffer.offset + number * 4, value,
                  base + kBuffer.barrier + (pass * 2 + step % 2) * 8);
    }
  }

  __device__ void end_of_stage() const {}
  __device__ void finish() const { cluster_barrier(); }

 private:
  static constexpr int kPeers = (Plan::kCtas + 3) / 4;  // of one lane

  // Of one step, from all CTAs.
  template <int B>
  static constexpr int kBytes = Plan::template buffer<B>().operands *
                                Plan::template buffer<B>().width * Plan::kCtas * Plan::kRows * 4;

  __host__ __device__ static constexpr int count_bits(int mask) {
    return mask == 0 ? 0 : mask % 2 + count_bits(mask / 2);
  }

  template <int B>
  __device__ unsigned barrier(int pass, int copy) const {
    return shared_address(place_.shared) + Plan::template buffer<B>().barrier +
           (pass * 2 + copy) * 8;
  }

  __device__ static void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }

  Place place_;
  unsigned peer_[kPeers];
};

#endif

}  // namespace tfmem
