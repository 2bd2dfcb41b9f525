// What a dynamic net's batch ends with: gradients of parameters, losses, results.
#pragma once

#include "dynamic_tile.cuh"

namespace tfmem {

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

// Takes the sums of a tile, four rows and columns in each of 256 threads.
template <class Sizes>
__device__ __forceinline__ void take_tile(const Net<Sizes>& net, int parameter, int row, int column,
                                          int rows, int columns) {
  constexpr int kSide = kTile / 4;
  if (threadIdx.x >= kSide * kSide) return;
  const int y = threadIdx.x / kSide * 4, x = threadIdx.x % kSide * 4;
  if (row + y >= rows || column + x >= columns) return;
  const float* sums = net.staging + y * kSumStride + x;
  const long long first = static_cast<long long>(row + y) * columns + column + x;
  if (columns % 4 == 0 && net.aligned(parameter)) {
    float sum[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(sums + i * kSumStride);
      sum[i][0] = four.x, sum[i][1] = four.y, sum[i][2] = four.z, sum[i][3] = four.w;
    }
    net.take_fours(parameter, first, columns, rows - row - y < 4 ? rows - row - y : 4, sum);
    return;
  }
  // Copies of this for each number would take the compiler longer than all products together.
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int of_row = i / 4, of_column = i % 4;
    const long long at = first + of_row * columns + of_column;
    if (row + y + of_row < rows && column + x + of_column < columns) {
      net.take(parameter, at, at, sums[of_row * kSumStride + of_column]);
    }
  }
}

// One tile of a parameter's gradient, which begins at `row` and `column`, written or applied: a
// term of its sums is a node.
template <class Sizes>
__device__ __noinline__ void take_gradient(const Net<Sizes>& net, const GradientStep* steps,
                                           int count, int parameter, int row, int column, int rows,
                                           int columns) {
  using Rows = Slab<true>;
  const auto nodes_of = [&](const GradientStep& step) {
    if (step.kind == kOuter && (row >= step.first_row + step.rows || row + kTile <= step.first_row))
      return 0;
    if (column >= step.first_column + step.columns || column + kTile <= step.first_column) return 0;
    return static_cast<int>(net.table[step.nodes]);
  };
  int all = 0;
  for (int i = 0; i < count; ++i) all += (nodes_of(steps[i]) + kTileDepth - 1) / kTileDepth;
  // What of an address is the same for all nodes of a step is computed once.
  constexpr int kFours = kTile / 4;
  static_assert(Sizes::kThreads % kFours == 0);
  const int at = threadIdx.x % kFours * 4;
  int which = -1, begin = 0, nodes = 0, y = 0, x = 0, a_stride = 0, b_stride = 0;
  bool outer = false, a_inside = false, b_inside = false;
  const float *a = nullptr, *b = nullptr;
  TileSums<true, true> sums;
  sum_steps(net, sums, all, true, [&](float* left, float* right) {
    begin += kTileDepth;
    while (begin >= nodes) {
      const GradientStep& step = steps[++which];
      nodes = nodes_of(step);
      begin = 0;
      y = row + at - step.first_row, x = column + at - step.first_column;
      a_stride = stride_of(step.rows), b_stride = stride_of(step.columns);
      outer = step.kind == kOuter;
      a_inside = outer && y >= 0 && y + 4 <= step.rows;
      b_inside = x >= 0 && x + 4 <= step.columns;
      a = net.memory + net.table[step.a] + y;
      b = net.memory + net.table[step.b] + x;
    }
    for (int i = threadIdx.x; i < kTileDepth * kFours; i += Sizes::kThreads) {
      const int term = i / kFours, node = begin + term;
      const bool there = node < nodes;
      const float* of_a = a + static_cast<long long>(node) * a_stride;
      const float* of_b = b + static_cast<long long>(node) * b_stride;
      copy_four(left + Rows::at(at, term), of_a, there && a_inside, [&](int j) {
        const GradientStep& step = steps[which];
        if (!there) return 0.0f;
        if (outer) return y + j >= 0 && y + j < step.rows ? of_a[j] : 0.0f;
        const int one = step.kind == kLookup ? net.index(step.a, node) : 0;
        return row + at + j == one ? 1.0f : 0.0f;
      });
      copy_four(right + Rows::at(at, term), of_b, there && b_inside, [&](int j) {
        return there && x + j >= 0 && x + j < steps[which].columns ? of_b[j] : 0.0f;
      });
    }
  });
  take_tile(net, parameter, row, column, rows, columns);
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
    // Four are on their way at a time: a row that many nodes look up would wait for each.
    for (unsigned e = begins[index]; e < begins[index + 1]; e += 4) {
      float four[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (e + j >= begins[index + 1]) continue;
        const unsigned* entry = entries + 3 * (e + j);  // its place, first column and width
        const int at = column - static_cast<int>(entry[1]);
        if (at >= 0 && at < static_cast<int>(entry[2]))
          four[j] = net.memory[entry[0] + static_cast<long long>(at)];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) total += four[j];
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
