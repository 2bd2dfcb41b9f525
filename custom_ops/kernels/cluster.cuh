// What CTAs of a thread-block cluster need to reach each other (compute capability 9.0): stores
// into each other's shared memory that count their bytes on the receiver's mbarrier.
#pragma once

#include "common.cuh"

namespace tfmem {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ unsigned address_in(unsigned address, int cta) {
  unsigned result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(cta));
  return result;
}

__device__ __forceinline__ void store_async(unsigned to, uint4 value, unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned to, uint2 value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               :
               : "r"(to), "r"(value.x), "r"(value.y), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(unsigned to, float4 value, unsigned barrier) {
  store_async(to,
              make_uint4(__float_as_uint(value.x), __float_as_uint(value.y),
                         __float_as_uint(value.z), __float_as_uint(value.w)),
              barrier);
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

__device__ __forceinline__ void init_barrier(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// By all threads, after the barriers' init and before anybody sends.
__device__ __forceinline__ void start_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  cluster_barrier();
}

__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// A cluster runs all at once or not at all, so this ends. The bound is for what nobody thought of:
// an error of the launch, and neither a hung GPU nor wrong numbers.
__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
  int polls = kPolls;
  while (!try_wait(barrier, parity)) {
    if (--polls == 0) asm volatile("trap;");
  }
  __syncwarp();
}

}  // namespace tfmem
