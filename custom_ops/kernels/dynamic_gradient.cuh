// What a dynamic net's batch ends with: gradients of parameters, losses, results.
#pragma once

#include "dynamic.cuh"

namespace tfmem {

// A tile of a gradient: so many of its rows and columns, of so many nodes at a time.
constexpr int kTile = 64, kTileDepth = 32;

// What a kind of nodes adds to the gradient of a parameter: transpose(a) @ b over all of its nodes.
// A row of `b` is a kept value; one of `a` is, too, or has a 1 where an argument says (kLookup) or
// in row 0 (kRow), and else 0.
enum GradientKind { kOuter, kLookup, kRow };
struct GradientStep {
  int kind;
  int nodes;               // where the table says how many
  int a, first_row, rows;  // where it says where `a` lies, or the argument; rows it has
  int b, first_column, columns;
};

__device__ constexpr int stride_of(int width) { return width == 1 ? 1 : (width + 15) / 16 * 16; }

// Sums of a tile, 4 x 4 in each of 256 threads; what remains of a larger CTA helps to load.
template <class Sizes>
struct GradientTile {
  static constexpr int kSide = kTile / 4;
  static constexpr int kLoads = (kTile * kTileDepth + Sizes::kThreads - 1) / Sizes::kThreads;
  float sum[4][4];

  // Adds one step; `row` and `column` are where the tile begins.
  __device__ void add(const Net<Sizes>& net, const GradientStep& step, int row, int column) {
    if (step.kind == kOuter && (row >= step.first_row + step.rows || row + kTile <= step.first_row))
      return;
    if (column >= step.first_column + step.columns || column + kTile <= step.first_column) return;
    float* left = net.staging;
    float* right = left + kTile * kTileDepth;
    const int nodes = static_cast<int>(net.table[step.nodes]);
    const int a_stride = stride_of(step.rows), b_stride = stride_of(step.columns);
    const float* a = net.memory + net.table[step.a];
    const float* b = net.memory + net.table[step.b];
    float l[kLoads], r[kLoads];
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int place = threadIdx.x + i * Sizes::kThreads;
        const int node = begin + place / kTile, at = place % kTile;
        l[i] = r[i] = 0.0f;
        if (node >= nodes || place >= kTile * kTileDepth) continue;
        const int y = row + at - step.first_row, x = column + at - step.first_column;
        if (x >= 0 && x < step.columns) r[i] = b[static_cast<long long>(node) * b_stride + x];
        if (step.kind == kOuter) {
          if (y >= 0 && y < step.rows) l[i] = a[static_cast<long long>(node) * a_stride + y];
        } else {
          l[i] = row + at == (step.kind == kLookup ? net.index(step.a, node) : 0) ? 1.0f : 0.0f;
        }
      }
    };
    load(0);
    for (int begin = 0; begin < nodes; begin += kTileDepth) {
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
      if (begin + kTileDepth < nodes)
        load(begin + kTileDepth);  // on their way while these are added
      if (threadIdx.x >= kSide * kSide) continue;
      const int depth = nodes - begin < kTileDepth ? nodes - begin : kTileDepth;
      const int y = threadIdx.x / kSide * 4, x = threadIdx.x % kSide * 4;
#pragma unroll 4
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

  __device__ void take(const Net<Sizes>& net, int parameter, int row, int column, int rows,
                       int columns) const {
    if (threadIdx.x >= kSide * kSide) return;
    const int y = row + threadIdx.x / kSide * 4, x = column + threadIdx.x % kSide * 4;
    if (x >= columns) return;
    const long long first = static_cast<long long>(y) * columns + x;
    if (columns % 4 == 0 && net.aligned(parameter)) {
      net.take_fours(parameter, first, columns, rows - y < 4 ? rows - y : 4, sum);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const long long at = first + i * columns + j;
        if (y + i < rows && x + j < columns) net.take(parameter, at, at, sum[i][j]);
      }
    }
  }
};

// One tile of a parameter's gradient, written or applied.
template <class Sizes>
__device__ __noinline__ void take_gradient(const Net<Sizes>& net, const GradientStep* steps,
                                           int count, int parameter, int row, int column, int rows,
                                           int columns) {
  GradientTile<Sizes> tile = {};
  for (int i = 0; i < count; ++i) tile.add(net, steps[i], row, column);
  tile.take(net, parameter, row, column, rows, columns);
}

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
