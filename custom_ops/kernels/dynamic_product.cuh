// Products of a dynamic net: each processor has some outputs of every matrix.
#pragma once

#include "dynamic_tile.cuh"

namespace tfmem {

constexpr int kEverywhere = -1;

// A view of a matrix and which processor has which outputs: block b of ROWS belongs to processor
// (FIRST + b) % processors, and there to one warp after the other; or every processor has all, if
// FIRST is kEverywhere. STAGED vectors come into shared memory at a time.
template <class Sizes, int DEPTH, int OUTPUTS, int ROWS, int SLOTS, int FIRST, int STAGED>
struct View {
  static constexpr int kStaged = STAGED;
  static constexpr int kDepth = DEPTH, kOutputs = OUTPUTS, kRows = ROWS, kSlots = SLOTS;
  static constexpr int kOwned = ROWS * SLOTS;
  static constexpr int kSteps = (DEPTH + kWarp - 1) / kWarp;  // numbers of an output in a lane
  static constexpr int kGroup = kOwned < 8 ? kOwned : 8;      // outputs of a warp at a time
  static constexpr int kNodes = kGroup <= 4 ? 4 : 2;          // nodes at a time
  static_assert(STAGED % kNodes == 0);

  __device__ static int output(int own) {
    const int warp = threadIdx.x / kWarp, in_warp = own / ROWS * Sizes::kWarps + warp;
    if (FIRST == kEverywhere) return in_warp * ROWS + own % ROWS;
    const int turn = (cta_in_grid() - FIRST + Sizes::kProcessors) % Sizes::kProcessors;
    return (in_warp * Sizes::kProcessors + turn) * ROWS + own % ROWS;
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

// Sums of COUNT numbers over the lanes of a warp, by halves: of two numbers each lane goes on with
// one, so that all sums take about as many shuffles as there are numbers, where one after the other
// each would take five. Returns the sum of number `lane / (32 / COUNT)`. COUNT: a power of two.
template <int COUNT>
__device__ __forceinline__ float sum_of_lanes(float (&values)[COUNT]) {
  static_assert(COUNT <= kWarp && (COUNT & (COUNT - 1)) == 0);
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const int left = COUNT * lanes / kWarp;  // numbers that remain of each lane; 0: it has one
    if (left == 0) {
      values[0] += __shfl_xor_sync(kAllLanes, values[0], lanes);
      continue;
    }
    const bool upper = lane & lanes;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = upper ? values[i + left] : values[i];
      const float sent = upper ? values[i] : values[i + left];
      values[i] = kept + __shfl_xor_sync(kAllLanes, sent, lanes);
    }
  }
  return values[0];
}

constexpr int power_of_two(int least) {
  int found = 1;
  while (found < least) found *= 2;
  return found;
}

// How a product's vectors are read: a number at a time, or four that follow each other, of which
// the first lies at a multiple of 16 bytes or may not.
enum Reading { kNumbers, kFours, kAlignedFours };

// Vectors of `count` nodes to shared memory. `source(row, k)` is a number, or a pointer to four:
// copies that are on their way while products are computed. Processors begin at different places,
// so that not all ask the same part of L2 at once.
template <class V, Reading READING, class Sizes, class Source>
__device__ __forceinline__ void stage(float* to, int first, int count, const Source& source) {
  if constexpr (READING != kNumbers) {
    const int fours = count * (V::kDepth / 4), shift = fours / Sizes::kProcessors * cta_in_grid();
#pragma unroll 4
    for (int i = threadIdx.x; i < fours; i += Sizes::kThreads) {
      const int turned = i + shift, at = turned < fours ? turned : turned - fours;
      const float* from = source(first + at / (V::kDepth / 4), at % (V::kDepth / 4) * 4);
      if constexpr (READING == kAlignedFours) {
        copy_async(shared_address(to + at * 4), from, true);
      } else {
        copy_four(to + at * 4, from, true, [&](int j) { return from[j]; });
      }
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < count * V::kDepth; i += Sizes::kThreads) {
      to[i] = source(first + i / V::kDepth, i % V::kDepth);
    }
  }
  end_group_of_copies();
}

// The outputs that this processor has, for nodes [first, first + rows) of a kind. `source` is what
// is multiplied, `store(row, o, sum)` takes an output. While products with the vectors of some
// nodes are computed, those of the next come to the other half of the staging memory.
template <class V, bool UNROLLED, Reading READING, class Sizes, class Weights, class Source,
          class Store>
__device__ __forceinline__ void multiply(const Net<Sizes>& net, const Weights& weights, int first,
                                         int rows, const Source& source, const Store& store) {
  constexpr int kNodes = V::kNodes, kGroup = V::kGroup;
  constexpr int kPasses = (V::kOwned + kGroup - 1) / kGroup;
  constexpr int kSums = power_of_two(kNodes * kGroup), kLanes = kWarp / kSums;
  constexpr int kParts = V::kStaged >= 2 * kNodes ? 2 : 1;  // of the staging memory
  constexpr int kPart = V::kStaged / kParts / kNodes * kNodes;
  const int lane = threadIdx.x % kWarp;
  constexpr int kAhead = (kParts - 1) * kPart;
  const auto part = [&](int begin) {
    return net.staging + begin / kPart % kParts * (kPart * V::kDepth);
  };
  __syncthreads();
#pragma unroll 1
  for (int begin = -kAhead; begin < rows; begin += kPart) {
    const int next = begin + kAhead, left = rows - next < kPart ? rows - next : kPart;
    stage<V, READING, Sizes>(part(next), first + next, left, source);
    if (begin < 0) continue;
    const int staged = rows - begin < kPart ? rows - begin : kPart;
    wait_for_groups_but<kParts - 1>();
    __syncthreads();
    const float* staging = part(begin);
#pragma unroll(UNROLLED ? kPasses : 1)
    for (int pass = 0; pass < kPasses; ++pass) {
      if (V::output(pass * kGroup) >= V::kOutputs) continue;  // nor has the warp any behind it
#pragma unroll 1
      for (int from = 0; from < staged; from += kNodes) {
        // Past the last node, a warp sums whatever lies there; no thread reads those sums.
        const float* vectors = staging + from * V::kDepth + lane;
        float sum[kSums] = {};
#pragma unroll(UNROLLED ? V::kSteps : 4)
        for (int i = 0; i < V::kSteps; ++i) {
          float x[kNodes];
#pragma unroll
          for (int node = 0; node < kNodes; ++node) {
            const bool inside = V::kDepth % kWarp == 0 || lane + i * kWarp < V::kDepth;
            x[node] = inside ? vectors[node * V::kDepth + i * kWarp] : 0.0f;
          }
#pragma unroll
          for (int own = 0; own < kGroup; ++own) {
            if (pass * kGroup + own >= V::kOwned) continue;
            const float weight = weights.get(pass * kGroup + own, i);
#pragma unroll
            for (int node = 0; node < kNodes; ++node) {
              sum[node * kGroup + own] = fmaf(weight, x[node], sum[node * kGroup + own]);
            }
          }
        }
        const float mine = sum_of_lanes(sum);
        const int number = lane / kLanes, own = pass * kGroup + number % kGroup;
        const int node = from + number / kGroup;
        if (lane % kLanes == 0 && number < kNodes * kGroup && node < staged && own < V::kOwned) {
          const int o = V::output(own);
          if (o < V::kOutputs) store(first + begin + node, o, mine);
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace tfmem
