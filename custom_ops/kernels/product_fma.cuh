// A CTA's part of a matrix product on the ordinary cores, by subgroups, GRNN's work groups
// (section 6).
#pragma once

#include "common.cuh"

namespace tfmem {

// The sums of COUNT values over LANES lanes, a power of two. While a lane holds an even number of
// values it sends half of them, so that each lane ends with COUNT / LANES sums (or one) instead of
// all. TOGETHER: so many values stay in one lane.
template <int COUNT, int LANES, int TOGETHER = 1>
__device__ __forceinline__ void reduce_scatter(float* value, int lane) {
  if constexpr (LANES == 1) {
    return;
  } else {
    constexpr int kHalf = LANES / 2;
    const bool upper = lane & kHalf;
    const auto from_other_half = [](float sent) { return __shfl_xor_sync(kAllLanes, sent, kHalf); };
    if constexpr (COUNT / TOGETHER % 2 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const float sent = upper ? value[i] : value[i + COUNT / 2];
        const float kept = upper ? value[i + COUNT / 2] : value[i];
        value[i] = kept + from_other_half(sent);
      }
      reduce_scatter<COUNT / 2, kHalf, TOGETHER>(value, lane);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) value[i] += from_other_half(value[i]);
      reduce_scatter<COUNT, kHalf, TOGETHER>(value, lane);
    }
  }
}

// The first of the sums that a lane of a subgroup ends with; negative if it ends with none.
template <int COUNT, int LANES>
__device__ int scattered(int lane) {
  if constexpr (LANES == 1) {
    return 0;
  } else {
    const bool upper = lane >= LANES / 2;
    constexpr int kCount = COUNT % 2 == 0 ? COUNT / 2 : COUNT;
    const int first = scattered<kCount, LANES / 2>(lane % (LANES / 2));
    if (kCount == COUNT) return upper ? -1 : first;
    return first < 0 || !upper ? first : first + kCount;
  }
}

// How many values a lane holds after reduce_scatter.
__host__ __device__ constexpr int values_left(int count, int lanes) {
  if (lanes == 1) return count;
  return values_left(count % 2 == 0 ? count / 2 : count, lanes / 2);
}

// `results[partial][row][column]` = sum over k of `operands[row][k] * weight[k][column]`.
//
// Thread = (subgroup, lane). A subgroup of kLanes lanes owns kThreadColumns columns; lane l
// sums the chunks of 4 numbers l, l + kLanes, ... Weights stay in registers as far as kRegisters
// chunks, then in shared memory, then they are read from L2 each time, laid out so that
// neighbouring threads read neighbouring 16 bytes.
//
// Warps that make no whole subgroup are in one past the last, whose columns are past the last, too:
// their weights are 0, and no thread reads their sums.
template <class Shape>
struct FmaProduct {
  static constexpr int kStreamed = Shape::kChunks - Shape::kRegisters - Shape::kShared;
  static constexpr int kColumns = Shape::kThreadColumns;
  static constexpr int kWarpLanes = Shape::kLanes < kWarp ? Shape::kLanes : kWarp;
  // Sums of a lane, and whether wherever they begin they lie alike.
  static constexpr int kLeft = values_left(Shape::kBlock * kColumns, kWarpLanes);
  static constexpr bool kAlike = kLeft % kColumns == 0 || kColumns % kLeft == 0;

  float4 weight[Shape::kRegisters > 0 ? Shape::kRegisters : 1][kColumns];
  int first_operand;
  int first_sum;  // of a block of rows; negative if it has none
  float* first_result;

  // `source` is a WeightSource (weights.cuh), 0 outside the matrix. `lay_out`: what is streamed
  // does not lie in its place yet.
  template <class Source>
  __device__ void load(const Source& source, float4* shared, float4* streamed, float* results,
                       bool lay_out) {
    const int group = threadIdx.x / Shape::kLanes;
    const int lane = threadIdx.x % Shape::kLanes;
    const int sum = scattered<Shape::kBlock * kColumns, kWarpLanes>(lane % kWarpLanes);
    first_operand = settled(lane * 4);
    first_sum = settled(group * kColumns < Shape::kColumns ? sum : -1);
    first_result = settled(results + lane / kWarp * Shape::kRows * Shape::kResultStride +
                           group * kColumns + (kAlike ? place_of(sum) : 0));
    const auto depth = [lane](int i) { return (i * Shape::kLanes + lane) * 4; };
    const auto chunk = [&](int i, int column) {
      return source.column(group * kColumns + column).four(depth(i));
    };
    if constexpr (kColumns % 4 == 0) {
#pragma unroll
      for (int column = 0; column < kColumns; column += 4) {
        source.four_columns(group * kColumns + column, [&](const auto& four_by_four) {
#pragma unroll
          for (int i = 0; i < Shape::kRegisters; ++i) four_by_four(depth(i), weight[i] + column);
        });
      }
    } else {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const auto numbers = source.column(group * kColumns + column);
#pragma unroll
        for (int i = 0; i < Shape::kRegisters; ++i) weight[i][column] = numbers.four(depth(i));
      }
    }
#pragma unroll 1
    for (int i = 0; i < Shape::kShared * kColumns; ++i) {
      shared[i * Shape::kThreads + threadIdx.x] =
          chunk(Shape::kRegisters + i / kColumns, i % kColumns);
    }
#pragma unroll 1
    for (int i = 0; lay_out && i < kStreamed * kColumns; ++i) {
      streamed[i * Shape::kThreads + threadIdx.x] =
          chunk(Shape::kRegisters + Shape::kShared + i / kColumns, i % kColumns);
    }
  }

  __device__ __forceinline__ void run(const float* operands, const float4* shared,
                                      const float4* streamed) const {
    const int lane = threadIdx.x % Shape::kLanes;
    const float* base = operands + first_operand;
    float* results = first_result;
#pragma unroll 1
    for (int row = 0; row < Shape::kRows; row += Shape::kBlock) {
      float sum[Shape::kBlock * kColumns] = {};
      multiply_all(base, shared, streamed, sum);
      reduce_scatter<Shape::kBlock * kColumns, kWarpLanes>(sum, lane);
      if (first_sum >= 0) {
#pragma unroll
        for (int i = 0; i < kLeft; ++i) results[place_of(kAlike ? i : first_sum + i)] = sum[i];
      }
      base += Shape::kBlock * Shape::kStride;
      results += Shape::kBlock * Shape::kResultStride;
    }
  }

  // The product where a subgroup has all columns of one unit, and all rows are a block: each lane
  // ends with the sums of one row.
  __device__ __forceinline__ void run_own(const float* operands, const float4* shared,
                                          const float4* streamed, float (&own)[kColumns]) const {
    const int lane = threadIdx.x % Shape::kLanes;
    float sum[Shape::kRows * kColumns] = {};
    multiply_all(operands + lane * 4, shared, streamed, sum);
    reduce_scatter<Shape::kRows * kColumns, Shape::kLanes, kColumns>(sum, lane);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) own[i] = sum[i];
  }

 private:
  // Where a sum of a block goes, from where the block's first goes.
  __device__ __forceinline__ static int place_of(int sum) {
    return sum / kColumns * Shape::kResultStride + sum % kColumns;
  }

  __device__ __forceinline__ void multiply_all(const float* base, const float4* shared,
                                               const float4* streamed, float* sum) const {
#pragma unroll
    for (int i = 0; i < Shape::kRegisters; ++i) multiply(base, i, weight[i], sum);
    multiply_from(shared, Shape::kRegisters, Tag<Shape::kShared>(), base, sum);
    multiply_from(streamed, Shape::kRegisters + Shape::kShared, Tag<kStreamed>(), base, sum);
  }

  template <int COUNT>
  __device__ __forceinline__ static void multiply_from(const float4* weights, int chunk, Tag<COUNT>,
                                                       const float* base, float* sum) {
#pragma unroll 2
    for (int i = 0; i < COUNT; ++i) {
      float4 w[kColumns];
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        w[column] = weights[(i * kColumns + column) * Shape::kThreads + threadIdx.x];
      }
      multiply(base, chunk + i, w, sum);
    }
  }

  __device__ __forceinline__ static void multiply(const float* base, int chunk, const float4* w,
                                                  float* sum) {
#pragma unroll
    for (int row = 0; row < Shape::kBlock; ++row) {
      const float* place = base + row * Shape::kStride + chunk * (Shape::kLanes * 4);
      const float4 x = *reinterpret_cast<const float4*>(place);
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        float& s = sum[row * kColumns + column];
        s = fmaf(x.x, w[column].x, s);
        s = fmaf(x.y, w[column].y, s);
        s = fmaf(x.z, w[column].z, s);
        s = fmaf(x.w, w[column].w, s);
      }
    }
  }
};

}  // namespace tfmem
