// Exchange between CTAs anywhere on the device, through L2: no barrier, no fence, no flag.
//
// What is sent carries its own epoch in its lowest bit, in each 64 bits that are stored and loaded
// as one, so a reader knows of all it reads whether it is of this step. That costs the last bit of
// one number in two or in four (of float32 a relative error of 6e-8, of a pair less; the CTA that
// owns a state keeps all of it), and no bandwidth. Two copies by the parity of the step, as in the
// cluster's exchange; a copy's epoch flips every second step. Scratch is zero before a launch, so
// the first words of either copy must have epoch 1: states are sent from step 1 on (those of step 0
// are given), all else from step 0 on.
#pragma once

#include "cluster.cuh"
#include "epoch.cuh"
#include "exchange.cuh"

namespace tfmem {

// Where there are several slices (slices.cuh), a CTA reads only the numbers of its share of the
// CTAs.
template <class Sizes>
class GridExchange {
 public:
  __device__ explicit GridExchange(const Place& place) : place_(place) {}

  template <int B, class Initial>
  __device__ void begin(const Initial&) {}

  __device__ void start() {
    if constexpr (Sizes::kSlices > 1) {
      start_cluster();
    } else {
      __syncthreads();
    }
  }

  template <int B, class Initial>
  __device__ __forceinline__ void wait(int step, const Initial& initial) {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    if (step == 0 && kBuffer.states != 0) {
      fill_states<Sizes, B>(operands<B>(0), initial, first_part<B>() * kBuffer.width);
    }
    if (step > 0 || !kStatesOnly<B>) receive<B>(step);
    __syncthreads();
  }

  template <int B>
  __device__ float* operands(int step) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    const int copy = kInRegisters<Sizes> ? step % 2 : 0;
    return reinterpret_cast<float*>(place_.shared + kBuffer.offset) +
           copy * (Sizes::kPaddedRows * kBuffer.stride);
  }

  template <int B, int O>
  __device__ __forceinline__ void send(int step, int row, int unit, bool valid, float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    using Senders = Neighbours<Sizes>;
    const auto numbers =
        with_epoch<kBuffer.form>(Senders::template encoded<B>(value), epoch<B>(step, O));
    if (valid && Senders::rank() == 0) {
      store_relaxed(words<B>(step, row) +
                        words_of<Sizes, B>((O * Sizes::kCtas + place_.cta) * kBuffer.width + unit),
                    numbers);
    }
  }

  template <int B, int O>
  __device__ void send_sum(int step, int row, float value) const {
    if (threadIdx.x % kWarp == 0) {
      store_relaxed(words<B>(step, row) + O * Sizes::kCtas + place_.cta,
                    without_last_bit<kFloats>(__float_as_uint(value)) | epoch<B>(step, O));
    }
  }

  __device__ void end_of_stage() const {}

  __device__ void finish() const {
    if constexpr (Sizes::kSlices > 1) cluster_barrier();
  }

 private:
  template <int B>
  static constexpr bool kStatesOnly =
      Sizes::template buffer<B>().states == (1 << Sizes::template buffer<B>().operands) - 1;

  // Words of a row, of all CTAs and of those that this one reads; how many words a thread moves at
  // a time, in how many pieces a buffer comes.
  template <int B>
  static constexpr int kRow = words_of<Sizes, B>(Sizes::template buffer<B>().operands *
                                                 Sizes::kCtas * Sizes::template buffer<B>().width);
  template <int B>
  static constexpr int kOperand =
      words_of<Sizes, B>(Sizes::template buffer<B>().parts * Sizes::template buffer<B>().width);
  template <int B>
  static constexpr int kRead = Sizes::template buffer<B>().operands * kOperand<B>;
  template <int B>
  static constexpr int kWords = Sizes::template buffer<B>().width == 1 ? 1  // sums, each sent alone
                                : kRow<B> % 4 == 0 && kOperand<B> % 4 == 0 ? 4
                                : FourOf<Sizes, B>::kWords == 2            ? 2
                                                                           : 1;
  template <int B>
  static constexpr int kPieces = Sizes::kRows * kRead<B> / kWords<B>;

  // The first CTA whose numbers this one reads.
  template <int B>
  __device__ int first_part() const {
    constexpr int kParts = Sizes::template buffer<B>().parts;
    return kParts == Sizes::kCtas ? 0 : place_.cta % Sizes::kSlices * kParts;
  }

  template <int B>
  __device__ static unsigned epoch(int step, int operand) {
    const int first = Sizes::template buffer<B>().states >> operand & 1;
    return (step - first) / 2 % 2 == 0;
  }

  template <int B>
  __device__ unsigned* words(int step, int row) const {
    return reinterpret_cast<unsigned*>(place_.scratch + Sizes::template buffer<B>().exchanged) +
           (step % 2 * Sizes::kRows + row) * kRow<B>;
  }

  // Where the pieces of a thread are. Each CTA starts elsewhere, so that they do not all ask the
  // same slice of L2. Where whole rows fit the threads, a thread stays in its column: its pieces
  // are equally far apart, and cost no arithmetic.
  template <int B>
  struct Pieces {
    static constexpr int kOfRow = kRead<B> / kWords<B>;
    static constexpr bool kEven = Sizes::kThreads % kOfRow == 0;
    static constexpr int kStride = Sizes::template buffer<B>().stride;

    // The pieces with the numbers index + i * kThreads.
    __device__ __forceinline__ Pieces(const GridExchange& exchange, int step, int index)
        : exchange(exchange), index(index) {
      words = exchange.words<B>(step, 0);
      numbers = exchange.operands<B>(step);
      if constexpr (kEven) move_to(index / kOfRow, (index + exchange.place_.cta * 8) % kOfRow);
    }

    // From now on only the i-th.
    __device__ __forceinline__ Pieces at(int i) const {
      Pieces piece = *this;
      if constexpr (kEven) {
        piece.words += i * (Sizes::kThreads / kOfRow) * kRow<B>;
        piece.numbers += i * (Sizes::kThreads / kOfRow) * kStride;
      } else {
        const int place = index + i * Sizes::kThreads;
        const int shifted = place + exchange.place_.cta * (kPieces<B> / Sizes::kCtas);
        const int wrapped = shifted >= kPieces<B> ? shifted - kPieces<B> : shifted;
        piece.move_to(wrapped / kOfRow, wrapped % kOfRow);
      }
      return piece;
    }

    __device__ __forceinline__ void move_to(int row, int column) {
      const int within = column * kWords<B>;
      operand = within / kOperand<B>;
      int word = within;
      if constexpr (kRead<B> != kRow<B>) {
        constexpr int kWidth = words_of<Sizes, B>(Sizes::template buffer<B>().width);
        word = (operand * Sizes::kCtas + exchange.first_part<B>()) * kWidth + within % kOperand<B>;
      }
      words += row * kRow<B> + word;
      numbers += row * kStride + within;
    }

    // Whether it comes in `step`; the states of step 0 are here already.
    __device__ __forceinline__ bool comes(int step) const {
      return step > 0 || !(Sizes::template buffer<B>().states >> operand & 1);
    }

    const GridExchange& exchange;
    int index;
    const unsigned* words;  // where it is sent
    float* numbers;         // where it is read
    int operand = 0;
  };

  // All words of one buffer, from all CTAs, into shared memory.
  //
  // A thread that has many polls for its first piece until it has come; by then most others have,
  // too. Polling for all of them again and again would take L2's bandwidth from the CTAs that
  // send.
  template <int B>
  __device__ __forceinline__ void receive(int step) {
    constexpr int kOnce = (kPieces<B> + Sizes::kThreads - 1) / Sizes::kThreads;
    if constexpr (kOnce > kFew) {
      take<B, 1>(step, 0, Sizes::kThreads);
      take<B, in_flight(kOnce - 1)>(step, Sizes::kThreads, kPieces<B>);
    } else {
      take<B, in_flight(kOnce)>(step, 0, kPieces<B>);
    }
  }

  static constexpr int kFew = 4;   // pieces of a thread
  static constexpr int kMost = 8;  // that it asks for at once

  // How many of so many pieces are in flight at a time, in turns of equal size.
  __host__ __device__ static constexpr int in_flight(int pieces) {
    const int turns = pieces > kMost ? (pieces + kMost - 1) / kMost : 1;
    return pieces > turns ? (pieces + turns - 1) / turns : 1;
  }

  // Waits for the pieces [begin, end) of this CTA.
  template <int B, int FLIGHT>
  __device__ __forceinline__ void take(int step, int begin, int end) {
    using Words = typename Vector<kWords<B>>::Type;
    constexpr int kForm = Sizes::template buffer<B>().form;
    const int lane = threadIdx.x % kWarp;
    // A warp stays together, in both loops: lanes that left a spin one by one went on to the
    // barrier alone (seen: a half warp read operands that had not arrived, and its shuffles lost
    // the other half).
#pragma unroll 1
    for (int first = begin + threadIdx.x; first - lane < end; first += Sizes::kThreads * FLIGHT) {
      const Pieces<B> pieces(*this, step, first);
      Words value[FLIGHT];
      unsigned old = 0;  // bit i: value[i] is not of this step yet
#pragma unroll
      for (int i = 0; i < FLIGHT; ++i) {
        const Pieces<B> piece = pieces.at(i);
        const bool wanted = first + i * Sizes::kThreads < end && piece.comes(step);
        if (wanted) load_relaxed(piece.words, &value[i]);
        old |= wanted << i;
      }
      // All that are old are asked for at once, or their latencies would add up.
      for (int polls = failed_ ? 0 : kPolls; __any_sync(kAllLanes, old != 0); --polls) {
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
          const Pieces<B> piece = pieces.at(i);
          if ((old >> i & 1) && (polls == 0 || is_of(value[i], epoch<B>(step, piece.operand)))) {
            *reinterpret_cast<Words*>(piece.numbers) = without_epoch<kForm>(value[i]);
            old &= ~(1u << i);
          }
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
          if (old >> i & 1) load_relaxed(pieces.at(i).words, &value[i]);
        }
        if (polls == 0) fail();
        if (polls % 1024 == 1) {
          const bool elsewhere = *reinterpret_cast<volatile int*>(place_.status) != 0;
          if (__any_sync(kAllLanes, elsewhere)) polls = 1;
        }
      }
    }
  }

  // A spin ran out: later ones end at once, and the fallback computes everything again.
  __device__ void fail() {
    failed_ = true;
    *place_.status = 1;
  }

  Place place_;
  bool failed_ = false;
};

}  // namespace tfmem
