// What a dynamic net's batch ends with: gradients of parameters, losses, results.
#pragma once

#include "dynamic.cuh"

namespace tfmem {

// A tile of a gradient: so many of its rows and columns, of so many nodes at a time.
constexpr int kTile = 64, kTileDepth = 16;

// Sums of a tile, 4 x 4 in each of 256 threads; what remains of a larger CTA helps to load.
template <class Sizes>
struct GradientTile {
  static constexpr int kSide = kTile / 4;
  static constexpr int kLoads = (kTile * kTileDepth + Sizes::kThreads - 1) / Sizes::kThreads;
  float sum[4][4] = {};

  // Adds transpose(a) @ b over all nodes of a kind. `a(node, i)` and `b(node, j)` are what rows
  // and columns of the tile have of a node; 0 outside of them.
  template <class A, class B>
  __device__ __forceinline__ void add(const Net<Sizes>& net, int nodes, const A& a, const B& b) {
    float* left = net.staging;
    float* right = left + kTile * kTileDepth;
    for (int begin = 0; begin < nodes; begin += kTileDepth) {
      const int depth = nodes - begin < kTileDepth ? nodes - begin : kTileDepth;
      float l[kLoads], r[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int place = threadIdx.x + i * Sizes::kThreads;
        const int node = place / kTile, at = place % kTile;
        const bool inside = node < depth;
        l[i] = inside ? a(begin + node, at) : 0.0f;
        r[i] = inside ? b(begin + node, at) : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int place = threadIdx.x + i * Sizes::kThreads;
        if (place < kTile * kTileDepth) {
          left[place] = l[i];
          right[place] = r[i];
        }
      }
      __syncthreads();
      if (threadIdx.x >= kSide * kSide) continue;
      const int y = threadIdx.x / kSide * 4, x = threadIdx.x % kSide * 4;
      for (int node = 0; node < depth; ++node) {
        const float4 u = *reinterpret_cast<const float4*>(left + node * kTile + y);
        const float4 v = *reinterpret_cast<const float4*>(right + node * kTile + x);
        const float us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(us[i], vs[j], sum[i][j]);
        }
      }
    }
  }

  __device__ __forceinline__ void take(const Net<Sizes>& net, int parameter, int row, int column,
                                       int rows, int columns) const {
    if (threadIdx.x >= kSide * kSide) return;
    const int y = row + threadIdx.x / kSide * 4, x = column + threadIdx.x % kSide * 4;
    const bool fours = columns % 4 == 0 && net.aligned(parameter);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (y + i >= rows || x >= columns) continue;
      const long long at = static_cast<long long>(y + i) * columns + x;
      if (fours) {
        net.take_four(parameter, at, sum[i]);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (x + j < columns) net.take(parameter, at + j, at + j, sum[i][j]);
      }
    }
  }
};

// The gradient of rows of a table that the batch looked up; `words` is where the table says so.
template <class Sizes>
__device__ inline void sum_rows(const Net<Sizes>& net, int parameter, int words, int columns,
                                int first, int count) {
  const unsigned* rows = net.sent + net.table[words];
  const unsigned* begins = net.sent + net.table[words + 1];
  const unsigned* entries = net.sent + net.table[words + 2];
  for (int i = threadIdx.x; i < count * columns; i += Sizes::kThreads) {
    const int index = first + i / columns, column = i % columns;
    float total = 0.0f;
    for (unsigned e = begins[index]; e < begins[index + 1]; ++e) {
      const unsigned* entry = entries + 3 * e;  // its place, first column and width
      const int at = column - static_cast<int>(entry[1]);
      if (at >= 0 && at < static_cast<int>(entry[2]))
        total += net.memory[entry[0] + static_cast<long long>(at)];
    }
    net.take(parameter, static_cast<long long>(rows[index]) * columns + column,
             static_cast<long long>(index) * columns + column, total);
  }
}

// Rows from anywhere to a tensor, 0 where there is none.
template <class Sizes>
__device__ inline void gather(const Net<Sizes>& net, int pointer, int width, unsigned list,
                              int first, int count) {
  float* target = reinterpret_cast<float*>(net.p.word[pointer]);
  for (int i = threadIdx.x; i < count * width; i += Sizes::kThreads) {
    const int node = first + i / width;
    const unsigned place = net.sent[list + node];
    target[static_cast<long long>(node) * width + i % width] =
        place == kNowhere ? 0.0f : net.memory[place + static_cast<long long>(i % width)];
  }
}

// The loss of an example is the sum over its nodes, in their order.
template <class Sizes>
__device__ inline void sum_losses(const Net<Sizes>& net, int first_node, int losses, int first,
                                  int count) {
  const unsigned* begins = net.sent + net.table[first_node];
  const unsigned* places = net.sent + net.table[losses];
  float* target = reinterpret_cast<float*>(net.p.word[kLossSums]);
  for (int example = first + threadIdx.x; example < first + count; example += Sizes::kThreads) {
    float total = 0.0f;
    for (unsigned node = begins[example]; node < begins[example + 1]; ++node) {
      if (places[node] != kNowhere) total += net.memory[places[node]];
    }
    target[example] = total;
  }
}

}  // namespace tfmem
