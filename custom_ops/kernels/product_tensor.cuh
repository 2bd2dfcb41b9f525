// A CTA's part of a matrix product on the tensor cores, for tiles of 8 batch rows and more.
//
// The weights are A (16 columns of the result), resident as fragments; the batch rows are B, read
// from shared memory four numbers at a time. What a number is made of, and so what a fragment
// holds, is for `Numbers` to say:
//   Operand                four numbers of an operand, as they are stored
//   kPieces, kChains       16-byte pieces of a fragment of depth 16; sums that do not wait for each
//                          other
//   measure(source, ...)   looks at the weights first, if it has to
//   piece(upper, ...)      a piece of a fragment, from two columns
//   multiply(x, w, sum)    adds products of depth 16 to the sums
//   scaled(sum, ...)       a result from a sum
#pragma once

#include "common.cuh"

namespace tfmem {

// As FmaProduct. Warp = (group, part): a group owns kThreadColumns tiles of 16 columns, its kLanes
// / 32 warps split the sum. Within 16 numbers k of an operand, lane quarter q holds 4 q .. 4 q + 3:
// the sum may take them in any order, and so one load is all that a lane needs of 16.
template <class Shape, class Numbers>
struct TensorProduct {
  static constexpr int kStreamed = Shape::kChunks - Shape::kRegisters - Shape::kShared;
  static constexpr int kTiles = Shape::kThreadColumns;
  static constexpr int kPieces = Numbers::kPieces;
  static constexpr int kChains = Numbers::kChains;
  static constexpr int kParts = Shape::kLanes / kWarp;
  static constexpr int kPaddedRows = (Shape::kRows + 7) / 8 * 8;
  using Operand = typename Numbers::Operand;
  static constexpr int kWords = sizeof(Operand) / 4;  // of four numbers

  // Whether all warps have columns, those too that make no whole group; the results
  // have space for columns up to a whole tile.
  static constexpr int kGroups = (Shape::kThreads + Shape::kLanes - 1) / Shape::kLanes;
  static constexpr bool kAllHave = kGroups * kTiles <= (Shape::kColumns + 15) / 16;

  uint4 weight[Shape::kRegisters > 0 ? Shape::kRegisters : 1][kTiles][kPieces];
  Numbers numbers;
  int first_operand;  // in words
  int first_column;
  float* first_result;

  // `source` is a WeightSource (weights.cuh), 0 outside the matrix. `lay_out`: what is streamed
  // does not lie in its place yet.
  template <class Source>
  __device__ void load(const Source& source, float4* shared, float4* streamed, float* results,
                       bool lay_out) {
    const int lane = threadIdx.x % kWarp;
    const int part = threadIdx.x / kWarp % kParts;
    const int first_k = part * Shape::kChunks * 16 + lane % 4 * 4;
    first_column = settled(static_cast<int>(threadIdx.x) / kWarp / kParts * kTiles * 16 + lane / 4);
    first_operand =
        settled(lane / 4 * Shape::kStride + (part * Shape::kChunks * 4 + lane % 4) * kWords);
    first_result = settled(results + (part * kPaddedRows + lane % 4 * 2) * Shape::kResultStride +
                           first_column);
    numbers.measure(source, first_column, first_k);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto upper = source.column(first_column + tile * 16);
      const auto lower = source.column(first_column + tile * 16 + 8);
      const auto piece = [&](int i, int p) {
        return numbers.piece(upper, lower, tile, first_k + i * 16, p);
      };
#pragma unroll
      for (int i = 0; i < Shape::kRegisters; ++i) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) weight[i][tile][p] = piece(i, p);
      }
      const auto store = [&](float4* to, int count, int first) {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
#pragma unroll
          for (int p = 0; p < kPieces; ++p) {
            reinterpret_cast<uint4*>(
                to)[((i * kTiles + tile) * kPieces + p) * Shape::kThreads + threadIdx.x] =
                piece(first + i, p);
          }
        }
      };
      store(shared, Shape::kShared, Shape::kRegisters);
      if (lay_out) store(streamed, kStreamed, Shape::kRegisters + Shape::kShared);
    }
  }

  __device__ __forceinline__ void run(const float* operands, const float4* shared,
                                      const float4* streamed) const {
    const float* base = operands + first_operand;
    float* results = first_result;
#pragma unroll 1
    for (int row = 0; row < kPaddedRows; row += 8 * Shape::kBlock) {
      Sums sum = {};
#pragma unroll
      for (int i = 0; i < Shape::kRegisters; ++i) multiply(base, i, weight[i], sum);
      multiply_from(shared, Shape::kRegisters, Tag<Shape::kShared>(), base, sum);
      multiply_from(streamed, Shape::kRegisters + Shape::kShared, Tag<kStreamed>(), base, sum);
      base += 8 * Shape::kBlock * Shape::kStride;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (!kAllHave && first_column + tile * 16 >= (Shape::kColumns + 15) / 16 * 16) continue;
#pragma unroll
        for (int block = 0; block < Shape::kBlock; ++block) {
          float* to = results + block * 8 * Shape::kResultStride + tile * 16;
          float s[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            s[j] = sum[tile][block][0][j];
#pragma unroll
            for (int chain = 1; chain < kChains; ++chain) s[j] += sum[tile][block][chain][j];
            s[j] = numbers.scaled(s[j], tile, j / 2);
          }
          to[0] = s[0];
          to[Shape::kResultStride] = s[1];
          to[8] = s[2];
          to[8 + Shape::kResultStride] = s[3];
        }
      }
      results += 8 * Shape::kBlock * Shape::kResultStride;
    }
  }

 private:
  using Sums = float[kTiles][Shape::kBlock][kChains][4];

  template <int COUNT>
  __device__ __forceinline__ static void multiply_from(const float4* weights, int chunk, Tag<COUNT>,
                                                       const float* base, Sums& sum) {
#pragma unroll 2
    for (int i = 0; i < COUNT; ++i) {
      uint4 w[kTiles][kPieces];
#pragma unroll
      for (int j = 0; j < kTiles * kPieces; ++j) {
        w[j / kPieces][j % kPieces] = reinterpret_cast<const uint4*>(
            weights)[(i * kTiles * kPieces + j) * Shape::kThreads + threadIdx.x];
      }
      multiply(base, chunk + i, w, sum);
    }
  }

  __device__ __forceinline__ static void multiply(const float* base, int chunk,
                                                  const uint4 (*w)[kPieces], Sums& sum) {
    Operand x[Shape::kBlock];
#pragma unroll
    for (int block = 0; block < Shape::kBlock; ++block) {
      const float* place = base + block * 8 * Shape::kStride + chunk * 4 * kWords;
      x[block] = *reinterpret_cast<const Operand*>(place);
    }
    Numbers::multiply(x, w, sum);
  }
};

}  // namespace tfmem
