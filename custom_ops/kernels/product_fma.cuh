// A CTA's part of a matrix product on the ordinary cores, by GRNN's work groups of any size
// (section 6).
#pragma once

#include "common.cuh"

namespace tfmem {

// The sums of COUNT values over LANES lanes. While a lane holds an even number of values it sends
// half of them, so that each lane ends with COUNT / LANES sums (or one) instead of all. Where lanes
// cannot be halved, the last one hands its values to the first. Returns the index of the first sum;
// `owner` is false for lanes that hold none of their own. All lanes of the warp take part, whatever
// they hold: a lane reads from its own work group alone as long as its sums are wanted. TOGETHER:
// so many values stay in one lane. ALIGNED: a work group begins at a multiple of its size, a power
// of two.
template <int COUNT, int LANES, int TOGETHER = 1, bool ALIGNED = (LANES & (LANES - 1)) == 0>
__device__ __forceinline__ int reduce_scatter(float* value, int lane, bool* owner) {
  if constexpr (LANES == 1) {
    return 0;
  } else if constexpr (LANES % 2 != 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float last = __shfl_down_sync(kAllLanes, value[i], LANES - 1);
      if (lane == 0) value[i] += last;
    }
    *owner = *owner && lane < LANES - 1;
    return reduce_scatter<COUNT, LANES - 1, TOGETHER, false>(value, lane, owner);
  } else {
    constexpr int kHalf = LANES / 2;
    const bool upper = ALIGNED ? lane & kHalf : lane >= kHalf;
    const auto from_other_half = [upper](float sent) {
      if constexpr (ALIGNED) return __shfl_xor_sync(kAllLanes, sent, kHalf);
      return __shfl_sync(kAllLanes, sent, threadIdx.x + (upper ? -kHalf : kHalf));
    };
    if constexpr (!ALIGNED) lane -= upper ? kHalf : 0;
    if constexpr (COUNT / TOGETHER % 2 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const float sent = upper ? value[i] : value[i + COUNT / 2];
        const float kept = upper ? value[i + COUNT / 2] : value[i];
        value[i] = kept + from_other_half(sent);
      }
      return (upper ? COUNT / 2 : 0) +
             reduce_scatter<COUNT / 2, kHalf, TOGETHER, ALIGNED>(value, lane, owner);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) value[i] += from_other_half(value[i]);
      *owner = *owner && !upper;
      return reduce_scatter<COUNT, kHalf, TOGETHER, ALIGNED>(value, lane, owner);
    }
  }
}

// How many values a lane holds after reduce_scatter.
__host__ __device__ constexpr int values_left(int count, int lanes) {
  if (lanes == 1) return count;
  if (lanes % 2 != 0) return values_left(count, lanes - 1);
  return values_left(count % 2 == 0 ? count / 2 : count, lanes / 2);
}

// `results[partial][row][column]` = sum over k of `operands[row][k] * weight[k][column]`.
//
// Thread = (work group, lane). A work group of kLanes lanes owns kThreadColumns columns; lane l
// sums the chunks of 4 numbers l, l + kLanes, ... Weights stay in registers as far as kRegisters
// chunks, then in shared memory, then they are read from L2 each time, laid out so that
// neighbouring threads read neighbouring 16 bytes.
//
// Work groups below a warp's size lie within warps. Threads that make no whole work group are in
// one past the last, whose columns are past the last, too: their weights are 0, and their sums
// nobody's.
template <class Shape>
struct FmaProduct {
  static constexpr int kStreamed = Shape::kChunks - Shape::kRegisters - Shape::kShared;
  static constexpr int kColumns = Shape::kThreadColumns;
  static constexpr int kWarpLanes = Shape::kLanes < kWarp ? Shape::kLanes : kWarp;
  static constexpr bool kFillsWarps = kWarp % kWarpLanes == 0;

  float4 weight[Shape::kRegisters > 0 ? Shape::kRegisters : 1][kColumns];

  // `source(column, k)` is a weight, or 0 outside the matrix.
  template <class Source>
  __device__ void load(const Source& source, float4* shared, float4* streamed) {
    const int group = kFillsWarps ? threadIdx.x / Shape::kLanes : group_within_warp();
    const int lane = (kFillsWarps ? threadIdx.x : threadIdx.x % kWarp) % Shape::kLanes;
    const auto chunk = [&](int i, int column) {
      const int k = (i * Shape::kLanes + lane) * 4;
      return source.four(group * kColumns + column, k);
    };
#pragma unroll
    for (int i = 0; i < Shape::kRegisters; ++i) {
      if constexpr (kColumns % 4 == 0) {
        const int k = (i * Shape::kLanes + lane) * 4;
#pragma unroll
        for (int column = 0; column < kColumns; column += 4) {
          source.four_by_four(group * kColumns + column, k, weight[i] + column);
        }
      } else {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) weight[i][column] = chunk(i, column);
      }
    }
#pragma unroll 1
    for (int i = 0; i < Shape::kShared * kColumns; ++i) {
      shared[i * Shape::kThreads + threadIdx.x] =
          chunk(Shape::kRegisters + i / kColumns, i % kColumns);
    }
#pragma unroll 1
    for (int i = 0; i < kStreamed * kColumns; ++i) {
      streamed[i * Shape::kThreads + threadIdx.x] =
          chunk(Shape::kRegisters + Shape::kShared + i / kColumns, i % kColumns);
    }
  }

  __device__ __forceinline__ void run(const float* operands, const float4* shared,
                                      const float4* streamed, float* results) const {
    const int group = kFillsWarps ? threadIdx.x / Shape::kLanes : group_within_warp();
    const int lane = (kFillsWarps ? threadIdx.x : threadIdx.x % kWarp) % Shape::kLanes;
#pragma unroll 1
    for (int row = 0; row < Shape::kRows; row += Shape::kBlock) {
      float sum[Shape::kBlock * kColumns] = {};
      multiply_all(operands + row * Shape::kStride + lane * 4, shared, streamed, sum);
      bool owner = true;
      const int first = reduce_scatter<Shape::kBlock * kColumns, kWarpLanes>(sum, lane, &owner);
      float* to =
          results + (lane / kWarp * Shape::kRows + row) * Shape::kResultStride + group * kColumns;
      if (owner && group * kColumns < Shape::kColumns) {
#pragma unroll
        for (int i = 0; i < values_left(Shape::kBlock * kColumns, kWarpLanes); ++i) {
          to[(first + i) / kColumns * Shape::kResultStride + (first + i) % kColumns] = sum[i];
        }
      }
    }
  }

  // The same where a work group has all columns of one unit, and all rows are a block: each lane
  // ends with the sums of one row.
  __device__ __forceinline__ void run_own(const float* operands, const float4* shared,
                                          const float4* streamed, float (&own)[kColumns]) const {
    const int lane = threadIdx.x % Shape::kLanes;
    float sum[Shape::kRows * kColumns] = {};
    multiply_all(operands + lane * 4, shared, streamed, sum);
    bool owner = true;
    reduce_scatter<Shape::kRows * kColumns, Shape::kLanes, kColumns>(sum, lane, &owner);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) own[i] = sum[i];
  }

 private:
  __device__ __forceinline__ void multiply_all(const float* base, const float4* shared,
                                               const float4* streamed, float* sum) const {
#pragma unroll
    for (int i = 0; i < Shape::kRegisters; ++i) multiply(base, i, weight[i], sum);
    multiply_from(shared, Shape::kRegisters, Tag<Shape::kShared>(), base, sum);
    multiply_from(streamed, Shape::kRegisters + Shape::kShared, Tag<kStreamed>(), base, sum);
  }

  // Where work groups leave threads of a warp over.
  __device__ __forceinline__ static int group_within_warp() {
    constexpr int kGroups = kWarp / kWarpLanes;
    const int group = threadIdx.x % kWarp / kWarpLanes;
    return group < kGroups ? threadIdx.x / kWarp * kGroups + group
                           : Shape::kThreads / kWarp * kGroups;
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
