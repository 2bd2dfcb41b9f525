// Products of a dynamic net: each processor has some outputs of every matrix.
#pragma once

#include "dynamic.cuh"

namespace tfmem {

// A view of a matrix and who has which of its outputs: block b of ROWS belongs to processor
// (FIRST + b) % processors, and there to one warp after the other.
template <class Sizes, int DEPTH, int OUTPUTS, int ROWS, int SLOTS, int FIRST>
struct View {
  static constexpr int kDepth = DEPTH, kOutputs = OUTPUTS, kRows = ROWS, kSlots = SLOTS;
  static constexpr int kOwned = ROWS * SLOTS;
  static constexpr int kSteps = (DEPTH + kWarp - 1) / kWarp;  // numbers of an output in a lane
  static constexpr int kGroup = kOwned < 8 ? kOwned : 8;      // outputs of a warp at a time
  static constexpr int kNodes = kGroup <= 4 ? 4 : 2;          // nodes at a time

  __device__ static int output(int own) {
    const int turn = (cta_in_grid() - FIRST + Sizes::kProcessors) % Sizes::kProcessors;
    const int warp = threadIdx.x / kWarp;
    const int block = (own / ROWS * Sizes::kWarps + warp) * Sizes::kProcessors + turn;
    return block * ROWS + own % ROWS;
  }
};

// Where the view's weight of output `o` (of the view) and depth `k` lies in its matrix.
template <bool TRANSPOSED, int COLUMNS, int START, int FIRST>
struct Matrix {
  __device__ static long long at(int o, int k) {
    return TRANSPOSED ? static_cast<long long>(FIRST + o) * COLUMNS + START + k
                      : static_cast<long long>(START + k) * COLUMNS + FIRST + o;
  }
};

// Weights in registers: all indices have to be known when the kernel is compiled.
template <class V, class M>
struct InRegisters {
  float weight[V::kOwned * V::kSteps];

  __device__ __forceinline__ void load(const float* matrix, float*) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int own = 0; own < V::kOwned; ++own) {
      const int o = V::output(own);
#pragma unroll
      for (int i = 0; i < V::kSteps; ++i) {
        const int k = lane + i * kWarp;
        weight[own * V::kSteps + i] = o < V::kOutputs && k < V::kDepth ? matrix[M::at(o, k)] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ float get(int own, int i) const { return weight[own * V::kSteps + i]; }
};

template <class V, class M>
struct InShared {
  float* weight;  // of this lane

  __device__ __forceinline__ void load(const float* matrix, float* place) {
    const int lane = threadIdx.x % kWarp;
    weight = place + threadIdx.x / kWarp * (V::kOwned * V::kSteps * kWarp) + lane;
    for (int own = 0; own < V::kOwned; ++own) {
      const int o = V::output(own);
      for (int i = 0; i < V::kSteps; ++i) {
        const int k = lane + i * kWarp;
        weight[(own * V::kSteps + i) * kWarp] =
            o < V::kOutputs && k < V::kDepth ? matrix[M::at(o, k)] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ float get(int own, int i) const {
    return weight[(own * V::kSteps + i) * kWarp];
  }
};

template <class V, class M>
struct Streamed {
  const float* matrix;

  __device__ __forceinline__ void load(const float* from, float*) { matrix = from; }
  __device__ __forceinline__ float get(int own, int i) const {
    const int o = V::output(own), k = threadIdx.x % kWarp + i * kWarp;
    return o < V::kOutputs && k < V::kDepth ? matrix[M::at(o, k)] : 0.0f;
  }
};

// The outputs that this processor has, for nodes [first, first + rows) of a kind. `load(row, k)` is
// what is multiplied, `store(row, o, sum)` takes an output.
template <class V, bool UNROLLED, class Sizes, class Weights, class Load, class Store>
__device__ __forceinline__ void multiply(const Net<Sizes>& net, const Weights& weights, int first,
                                         int rows, const Load& load, const Store& store) {
  constexpr int kNodes = V::kNodes, kGroup = V::kGroup;
  constexpr int kPasses = (V::kOwned + kGroup - 1) / kGroup;
  static_assert(kNodes * kGroup <= kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int begin = 0; begin < rows; begin += kNodes) {
    const int count = rows - begin < kNodes ? rows - begin : kNodes;
    __syncthreads();
    for (int i = threadIdx.x; i < count * V::kDepth; i += Sizes::kThreads) {
      net.staging[i] = load(first + begin + i / V::kDepth, i % V::kDepth);
    }
    __syncthreads();
#pragma unroll(UNROLLED ? kPasses : 1)
    for (int pass = 0; pass < kPasses; ++pass) {
      if (V::output(pass * kGroup) >= V::kOutputs) continue;  // nor has the warp any behind it
      float sum[kNodes][kGroup] = {};
#pragma unroll(UNROLLED ? V::kSteps : 4)
      for (int i = 0; i < V::kSteps; ++i) {
        const int k = lane + i * kWarp;
        float x[kNodes];
#pragma unroll
        for (int node = 0; node < kNodes; ++node) {
          x[node] = node < count && k < V::kDepth ? net.staging[node * V::kDepth + k] : 0.0f;
        }
#pragma unroll
        for (int own = 0; own < kGroup; ++own) {
          if (pass * kGroup + own >= V::kOwned) continue;
          const float weight = weights.get(pass * kGroup + own, i);
#pragma unroll
          for (int node = 0; node < kNodes; ++node) {
            sum[node][own] = fmaf(weight, x[node], sum[node][own]);
          }
        }
      }
      float mine = 0.0f;
#pragma unroll
      for (int node = 0; node < kNodes; ++node) {
        if (node >= count) continue;
#pragma unroll
        for (int own = 0; own < kGroup; ++own) {
          float total = sum[node][own];
#pragma unroll
          for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
            total += __shfl_xor_sync(kAllLanes, total, lanes);
          }
          if (lane == node * kGroup + own) mine = total;
        }
      }
      const int own = pass * kGroup + lane % kGroup, node = lane / kGroup;
      if (node < count && own < V::kOwned) {
        const int o = V::output(own);
        if (o < V::kOutputs) store(first + begin + node, o, mine);
      }
    }
  }
}

}  // namespace tfmem
