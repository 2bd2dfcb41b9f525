// Cluster reduction: sums that the CTAs of a cluster make together, in a group that exchanges
// through L2.
//
// Where every CTA reads all operands, L2 gives each of them the same numbers: its bandwidth bounds
// a step of many rows. With slices a CTA reads its share of the operands only, multiplies it with
// the weights of all units of its cluster, and stores each CTA's part of the sums in that CTA's
// shared memory. As many weights for each, fewer numbers by the number of slices through L2, and a
// hop within the cluster more.
//
// Two copies by the parity of the step are enough: a CTA sends for step t + 2 after it received
// operands of step t + 2, which were sent after their CTAs had the sums of step t + 1; among these
// are parts from every slice, so every CTA of the group had sent operands of step t + 1, and was
// done with the sums of step t.
#pragma once

#include "cluster.cuh"
#include "exchange.cuh"

namespace tfmem {

struct ReceivedShape {
  int columns;  // of one CTA: a multiple of 4
  int stride;   // floats between rows of the results
  int partials;
  int offset;
  int barrier;
};

template <class Sizes>
class Slices {
 public:
  __device__ Slices(char* shared, int cta) : shared_(shared), rank_(cta % Sizes::kSlices) {}

  // By all threads, before the cluster starts.
  template <int GEMM>
  __device__ void begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        const unsigned barrier = shared_address(shared_) + Sizes::template received<GEMM>().barrier;
        init_barrier(barrier + i * 8);
        expect(barrier + i * 8, kBytes<GEMM>);
      }
    }
  }

  // Sends this CTA's part of the sums, and waits for the parts that other CTAs send to it.
  template <int GEMM>
  __device__ __forceinline__ void reduce(const float* results, int step) const {
    constexpr ReceivedShape kReceived = Sizes::template received<GEMM>();
    constexpr int kFours = kReceived.columns / 4;
    const unsigned base = shared_address(shared_);
    const unsigned barrier = kReceived.barrier + step % 2 * 8;
    const unsigned received = kReceived.offset + copy<GEMM>(step, rank_) * 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < Sizes::kSlices * Sizes::kRows * kFours; i += Sizes::kThreads) {
      const int row = i / kFours % Sizes::kRows;
      const int column = i % kFours * 4;
      // Each CTA starts with another one.
      const int owner = (i / (kFours * Sizes::kRows) + rank_) % Sizes::kSlices;
      const float* from = results + row * kReceived.stride + owner * kReceived.columns + column;
      float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
      for (int partial = 1; partial < kReceived.partials; ++partial) {
        const float4 more = *reinterpret_cast<const float4*>(
            from + partial * (Sizes::kPaddedRows * kReceived.stride));
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
      const unsigned peer = address_in(base, owner);
      store_async(peer + received + (row * kReceived.columns + column) * 4, sum, peer + barrier);
    }
    wait_for(base + barrier, step / 2 % 2);
    if (threadIdx.x == 0) expect(base + barrier, kBytes<GEMM>);
  }

  // One sum, from all parts in the same order.
  template <int GEMM>
  __device__ __forceinline__ float sum(int step, int row, int column) const {
    constexpr ReceivedShape kReceived = Sizes::template received<GEMM>();
    const float* from = reinterpret_cast<const float*>(shared_ + kReceived.offset) +
                        copy<GEMM>(step, 0) + row * kReceived.columns + column;
    float sum = from[0];
#pragma unroll
    for (int slice = 1; slice < Sizes::kSlices; ++slice) {
      sum += from[slice * (Sizes::kRows * kReceived.columns)];
    }
    return sum;
  }

 private:
  template <int GEMM>
  static constexpr int kBytes =
      Sizes::kSlices * Sizes::kRows * Sizes::template received<GEMM>().columns * 4;

  // Where the parts of a slice begin.
  template <int GEMM>
  __device__ static int copy(int step, int slice) {
    constexpr int kPart = Sizes::kRows * Sizes::template received<GEMM>().columns;
    return (step % 2 * Sizes::kSlices + slice) * kPart;
  }

  char* shared_;
  int rank_;
};

}  // namespace tfmem
