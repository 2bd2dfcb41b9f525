// How CTAs of a thread-block cluster (compute capability 9.0) start, and wait for each other's
// stores into their shared memory.
#pragma once

#include "common.cuh"

namespace tfmem {

__device__ __forceinline__ void store_async(unsigned to, float4 value, unsigned barrier) {
  store_async(to,
              make_uint4(__float_as_uint(value.x), __float_as_uint(value.y),
                         __float_as_uint(value.z), __float_as_uint(value.w)),
              barrier);
}

// All threads call it, after the barriers' init and before any CTA sends.
__device__ __forceinline__ void start_cluster() {
  publish_barriers();
  __syncthreads();
  cluster_barrier();
}

// A cluster runs all at once or not at all, so this ends. The bound is for unforeseen faults: the
// launch then fails, and neither hangs the GPU nor gives wrong numbers.
__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
  int polls = kPolls;
  while (!try_wait(barrier, parity)) {
    if (--polls == 0) trap();
  }
  __syncwarp();
}

}  // namespace tfmem
