// Exchange within a thread-block cluster (compute capability 9.0): every CTA stores its numbers
// straight into the shared memory of all others with `st.async`, which counts the bytes on the
// receiver's mbarrier. Data and signal take one hop, and there is no barrier.
//
// Two copies of each buffer, by the parity of the step, are enough: a CTA sends for step t + 2 only
// after it received all of step t + 1, which every CTA sent after it had read all of step t. The
// same holds for reuse of the mbarriers.
#pragma once

#include "cluster.cuh"
#include "exchange.cuh"

namespace tfmem {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <class Sizes>
class ClusterExchange {
 public:
  __device__ explicit ClusterExchange(const Place& place) : place_(place) {
    const unsigned base = shared_address(place.shared);
#pragma unroll
    for (int i = 0; i < kPeers; ++i) {
      // Each CTA starts with another peer.
      peer_[i] =
          address_in(base, (place.cta + Senders::rank() + i * Senders::kLanes) % Sizes::kCtas);
    }
  }

  template <int B, class Initial>
  __device__ void begin(const Initial& initial) {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    fill_states<Sizes, B>(operands<B>(0), initial);
    if (threadIdx.x == 0) {
      for (int copy = 0; copy < 2; ++copy) {
        init_barrier(barrier<B>(copy));
      }
      // States of step 0 are here already.
      constexpr int kStates = count_bits(kBuffer.states);
      expect(barrier<B>(0), kBytes<B> / kBuffer.operands * (kBuffer.operands - kStates));
      expect(barrier<B>(1), kBytes<B>);
    }
  }

  __device__ void start() { start_cluster(); }

  template <int B, class Initial>
  __device__ __forceinline__ void wait(int step, const Initial&) {
    const unsigned address = barrier<B>(step % 2);
    wait_for(address, step / 2 % 2);
    if (threadIdx.x == 0) expect(address, kBytes<B>);
  }

  template <int B>
  __device__ float* operands(int step) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    return reinterpret_cast<float*>(place_.shared + kBuffer.offset) +
           step % 2 * (Sizes::kPaddedRows * kBuffer.stride);
  }

  template <int B, int O>
  __device__ __forceinline__ void send(int step, int row, int unit, bool valid, float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    // Lanes that have neighbouring units of one row: each sends all of these, to some of the peers.
    const auto numbers = Senders::template encoded<B>(value);
    const int word =
        (step % 2 * Sizes::kPaddedRows + row) * kBuffer.stride +
        words_of<Sizes, B>((O * Sizes::kCtas + place_.cta) * kBuffer.width + Senders::first(unit));
    const unsigned to = kBuffer.offset + word * 4;
    const unsigned barrier = kBuffer.barrier + step % 2 * 8;
    if (valid) {
#pragma unroll
      for (int i = 0; i < kPeers; ++i) {
        if (Senders::rank() + i * Senders::kLanes < Sizes::kCtas)
          store_async(peer_[i] + to, numbers, peer_[i] + barrier);
      }
    }
  }

  template <int B, int O>
  __device__ void send_sum(int step, int row, float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    const int lane = threadIdx.x % kWarp;
    if (lane < Sizes::kCtas) {
      const unsigned base = address_in(shared_address(place_.shared), lane);
      const int number =
          (step % 2 * Sizes::kPaddedRows + row) * kBuffer.stride + O * Sizes::kCtas + place_.cta;
      store_async(base + kBuffer.offset + number * 4, value, base + kBuffer.barrier + step % 2 * 8);
    }
  }

  __device__ void end_of_stage() const {}
  __device__ void finish() const { cluster_barrier(); }

 private:
  using Senders = Neighbours<Sizes>;
  static constexpr int kPeers =
      (Sizes::kCtas + Senders::kLanes - 1) / Senders::kLanes;  // of a lane

  // Bytes that arrive in one step, from all CTAs.
  template <int B>
  static constexpr int kBytes =
      words_of<Sizes, B>(Sizes::template buffer<B>().operands * Sizes::template buffer<B>().width *
                         Sizes::kCtas) *
      Sizes::kRows * 4;

  __host__ __device__ static constexpr int count_bits(int mask) {
    return mask == 0 ? 0 : mask % 2 + count_bits(mask / 2);
  }

  template <int B>
  __device__ unsigned barrier(int copy) const {
    return shared_address(place_.shared) + Sizes::template buffer<B>().barrier + copy * 8;
  }

  Place place_;
  unsigned peer_[kPeers];
};

#endif

}  // namespace tfmem
