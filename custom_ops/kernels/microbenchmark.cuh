// What a step of a recurrence is made of, each part alone: the measured parameters of GRNN's
// performance model (Holmes et al., EuroSys 2019, Figure 10) and of what a cluster adds to it.
//
// Every kernel does the same work `iterations` times, so that the difference between two counts is
// the cost of one. All have one signature; custom_ops/recurrent/search/microbenchmark.py launches
// them.
#pragma once

#include "exchange_cluster.cuh"
#include "exchange_grid.cuh"
#include "math.cuh"
#include "product_mma.cuh"

namespace tfmem {
namespace microbenchmark {

constexpr int kPositions = 32;       // of the state that a thread multiplies in one iteration
constexpr int kLoads = 8;            // of a thread in one iteration of shared_loads
constexpr int kFlight = 4;           // loads of a thread on their way, as in exchange_grid.cuh
constexpr int kSharedFloats = 8192;  // 32 KiB, what fits every device without asking
constexpr int kSpinLimit = 1 << 20;  // polls; a grid that is not resident gives up
constexpr float kNever =
    12345.0f;  // no result: what a kernel compares with, so that its work is not dropped

// Partial dot products (equations 11 and 12) as product_fma.cuh has them: weights of `kColumns`
// columns in registers, each number of the state used for all of them; `kRows` rows of the batch at
// a time, so that kColumns * kRows sums are independent. The state is in registers here:
// shared_loads prices what brings it there. One iteration is kPositions of the state; the same few
// numbers serve again and again.
template <int kColumns, int kRows>
__device__ void products(float* data, int iterations) {
  float state[kRows][8];
  float weights[8][kColumns];
  float sums[kRows][kColumns] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) state[row][k] = data[(threadIdx.x + k + row) & 1023];
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      weights[k][j] = data[(threadIdx.x + k * kColumns + j) & 1023];
  }
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int k = 0; k < kPositions; ++k)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          sums[row][j] = fmaf(state[row][k % 8], weights[k % 8][j], sums[row][j]);
  }
  float sum = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sum += sums[row][j];
  if (sum == kNever) data[threadIdx.x] = sum;  // keeps the sums
}

// One iteration: 8 loads of 16 bytes from shared memory by each thread, of which `lanes` of a warp
// differ.
__device__ inline void shared_loads(float* data, int iterations, int lanes) {
  __shared__ alignas(16) float state[1024];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) state[i] = data[i];
  __syncthreads();
  const unsigned base = shared_address(state);
  const unsigned place = base + (threadIdx.x & 31) % lanes * 16;
  float kept = 0;
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const float4 x = load_shared_volatile(place + load * 128);
      if (load == 0) kept += x.x;
    }
  }
  if (kept == kNever) data[threadIdx.x] = kept;
}

// One iteration: a sigmoid and a hyperbolic tangent, each of the one before.
__device__ inline void activations(float* data, int iterations) {
  float value = data[threadIdx.x & 1023];
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) value = hyperbolic_tangent(sigmoid(value));
  if (value == kNever) data[threadIdx.x] = value;
}

// One iteration: `kWidth` sums over the 32 lanes of a warp, five dependent shuffles each
// (equations 13 and 14).
template <int kWidth>
__device__ void reductions(float* data, int iterations) {
  float values[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = data[(threadIdx.x + j) & 1023];
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] += __shfl_xor_sync(kAllLanes, values[j], lane);
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum += values[j];
  if (sum == kNever) data[threadIdx.x] = sum;
}

// One iteration: `size` floats from the L2 cache to shared memory, by every CTA (equation 10).
__device__ inline void state_load(float* data, int iterations, int size) {
  __shared__ alignas(16) float state[kSharedFloats];
  const float4* source = reinterpret_cast<const float4*>(data);
  float4* target = reinterpret_cast<float4*>(state);
  const int vectors = min(size, kSharedFloats) / 4;
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    for (int first = threadIdx.x; first < vectors; first += kFlight * blockDim.x) {
      float4 four[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        const int v = first + f * blockDim.x;
        if (v < vectors) {
          four[f] = load_from_l2(source + v);
        }
      }
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        const int v = first + f * blockDim.x;
        if (v < vectors) target[v] = four[f];
      }
    }
    __syncthreads();
  }
  if (state[threadIdx.x] == kNever) data[threadIdx.x] = state[0];
}

// One iteration: a barrier of all threads of a CTA.
__device__ inline void block_barrier(float*, int iterations) {
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) __syncthreads();
}

// Each CTA starts elsewhere, at `first`.
__device__ __forceinline__ int place_of(int v, int first, int total) {
  return v + first - (v + first >= total ? total : 0);
}

// One iteration: the grid hands `size` numbers round, a slice from each CTA to all, as
// exchange_grid.cuh does. `data` has two copies, zeroed; every word carries its epoch.
__device__ inline void grid_exchange(float* data, int iterations, int size) {
  __shared__ alignas(16) float state[kSharedFloats];
  unsigned* words = reinterpret_cast<unsigned*>(data);
  const int slice = (size / 4 + gridDim.x - 1) / gridDim.x;
  const int first = blockIdx.x * slice;  // of what this CTA writes, if there is any left
  const int start = first % (size / 4);  // of what it reads
  int spins = 0;
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    unsigned* copy = words + i % 2 * size;
    const unsigned epoch = i / 2 % 2 == 0;
    for (int v = first + threadIdx.x; v < min(size / 4, first + slice); v += blockDim.x) {
      store_relaxed(copy + v * 4, make_uint4(epoch, epoch, epoch, epoch));
    }
    for (int v = threadIdx.x; v < size / 4; v += kFlight * blockDim.x) {
      uint4 value[kFlight];
#pragma unroll
      for (int f = 0; f < kFlight; ++f) {
        if (v + f * static_cast<int>(blockDim.x) < size / 4) {
          load_relaxed(copy + place_of(v + f * blockDim.x, start, size / 4) * 4, &value[f]);
        }
      }
      // All that are old are asked for at once. One that never comes is waited for once, not in
      // every iteration.
      for (; spins < kSpinLimit; ++spins) {
        bool old = false;
#pragma unroll
        for (int f = 0; f < kFlight; ++f) {
          const int w = v + f * blockDim.x;
          if (w >= size / 4) break;
          if (is_of(value[f], epoch)) {
            *reinterpret_cast<uint4*>(state + w * 4 % kSharedFloats) = value[f];
          } else {
            old = true;
            load_relaxed(copy + place_of(w, start, size / 4) * 4, &value[f]);
          }
        }
        if (!old) break;
      }
    }
    __syncthreads();
  }
  if (state[threadIdx.x] == kNever) data[threadIdx.x] = state[0];
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// One iteration: `kTiles` products of 16 x 8 weights in registers with 8 rows of the batch, in
// TF32.
template <int kTiles>
__device__ void tensor_products(float* data, int iterations) {
  unsigned weights[kTiles][4];
  float sums[kTiles][4] = {};
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      weights[t][k] = __float_as_uint(data[(threadIdx.x + 4 * t + k) & 1023]);
  const unsigned state[2] = {weights[0][0], weights[0][1]};
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) mma_tf32(sums[t], weights[t], state);
  }
  float sum = 0;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) sum += sums[t][0] + sums[t][1] + sums[t][2] + sums[t][3];
  if (sum == kNever) data[threadIdx.x] = sum;
}
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// One iteration: `size` numbers, a slice from each CTA into the shared memory of all, as
// exchange_cluster.cuh does.
__device__ inline void cluster_exchange(float* data, int iterations, int size) {
  __shared__ alignas(16) float state[2][kSharedFloats / 2];
  __shared__ alignas(8) unsigned long long arrived[2];
  const unsigned rank = rank_in_cluster(), ctas = ctas_of_cluster();
  const int slice = size / 4 / ctas;
  const int bytes = slice * static_cast<int>(ctas) * 16;
  if (threadIdx.x == 0) {
    for (int copy = 0; copy < 2; ++copy) {
      init_barrier(shared_address(&arrived[copy]));
      expect(shared_address(&arrived[copy]), bytes);
    }
  }
  start_cluster();
  const float4 four = *reinterpret_cast<const float4*>(data);
  // A quad of lanes sends the same 16 bytes, each of its lanes to every fourth peer.
  unsigned peer[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    peer[j] = address_in(shared_address(state), (threadIdx.x % 4 + 4 * j) % ctas);
  }
  const unsigned signal = shared_address(arrived) - shared_address(state);
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    const int copy = i % 2;
    for (int v = threadIdx.x / 4; v < slice; v += blockDim.x / 4) {
      const unsigned to = copy * kSharedFloats * 2 + (rank * slice + v) * 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (threadIdx.x % 4 + 4 * j < ctas) {
          store_async(peer[j] + to, four, peer[j] + signal + copy * 8);
        }
      }
    }
    int spin = 0;
    while (!try_wait(shared_address(&arrived[copy]), i / 2 % 2) && ++spin < kSpinLimit) {
    }
    __syncthreads();
    if (threadIdx.x == 0) expect(shared_address(&arrived[copy]), bytes);
  }
  cluster_barrier();
  if (state[0][threadIdx.x] == kNever) data[threadIdx.x] = state[1][0];
}
#endif

}  // namespace microbenchmark
}  // namespace tfmem
