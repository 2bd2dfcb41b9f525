// What every CTA of a group computes for all hidden units, so that no CTA has to send it: GRNN's
// single synchronisation for cells like the canonical GRU (section 5).
//
// Products of states that this takes are either made here, with all of their weights, or added up
// from parts: as soon as a CTA has its own units of the new states it multiplies them with their
// rows of the weights, for all units of the result, and sends that to all.
//
// `Sizes::Replica` is generated elementwise code, as `Cell` is
// (custom_ops/recurrent/codegen/replicated_source.py).
#pragma once

#include "port.cuh"

namespace tfmem {

// One (row, unit) of all units: a port whose CTA has all of them.
template <class Sizes, class Exchange, class Products, int WORDS>
struct ReplicaPort : Port<Sizes, Exchange, Products, WORDS> {
  static constexpr int kSpan = Sizes::kCtas * Sizes::kTile;

  // A state, as its CTA sent it.
  template <int B, int O>
  __device__ float operand() const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    return this->exchange.template operands<B>(
        this->step)[this->row * kBuffer.stride + O * kSpan + this->unit];
  }

  template <int B, int O>
  __device__ void keep(float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    if (this->valid) {
      local_operands<Sizes, B>(this->shared)[this->row * kBuffer.stride + O * kSpan + this->unit] =
          this->live ? value : 0.0f;
    }
  }

  template <int POINTER, int COLUMNS, int COLUMN>
  __device__ float sequence(int at) const {
    using Value = typename Sizes::Value;
    if (!this->live || at >= this->context.time) return 0.0f;
    const long long line = this->context.line_of(at, this->batch_row());
    const long long place =
        COLUMNS == 0 ? line : (line * COLUMNS + COLUMN) * Sizes::kUnits + this->unit;
    return to_float(this->context.template pointer<const Value>(POINTER)[place]);
  }
};

template <class Sizes, class Exchange, class Products, int WORDS,
          bool ANY = (Sizes::kReplicaItems > 0)>
class Replicas {
 public:
  __device__ Replicas(const Context<Sizes, WORDS>& context, const Exchange& exchange,
                      const Products& products, char* shared)
      : context_(context), exchange_(exchange), products_(products), shared_(shared) {
    context_.cta = 0;
  }

  __device__ void begin() {
    each([&](auto& element, int item) { Replica::begin(element, port(0, item)); });
  }

  // What step `next` reads, long before it is needed.
  __device__ void load(int next) {
    each([&](auto& element, int item) { Replica::load(element, port(next, item), next); });
  }

  // Before the products of STAGE: all threads have written what these read.
  template <int STAGE>
  __device__ __forceinline__ void ready() const {
    if constexpr (Replica::template waits<STAGE>()) __syncthreads();
  }

  // The states before step 0, of this CTA's units.
  template <class Sweeper>
  __device__ void begin_parts(const Sweeper& sweeper, int cta) const {
    Sizes::for_parts([&](auto, auto own, auto) { fill(sweeper, own, cta); });
  }

  // This CTA's parts of what step `next` reads.
  __device__ __forceinline__ void send_parts(int next) const {
    if constexpr (Sizes::kInParts) {
      if (next >= context_.time) return;
      __syncthreads();  // all units of the new states are here
      Sizes::for_parts([&](auto gemm, auto, auto) { products_.run_part(gemm, exchange_, next); });
      __syncthreads();
      Sizes::for_parts([&](auto gemm, auto, auto parts) { send<0>(gemm, parts, next); });
    }
  }

  template <int STAGE>
  __device__ __forceinline__ void stage(int step) {
#pragma unroll
    for (int item = 0; item < Sizes::kReplicaItems; ++item) {
      const At at = port(step, item);
      if (at.valid) Replica::stage(Tag<STAGE>(), elements_[item], at);
    }
  }

 private:
  using Replica = typename Sizes::Replica;
  using At = ReplicaPort<Sizes, Exchange, Products, WORDS>;

  template <class Sweeper, int OWN>
  __device__ void fill(const Sweeper& sweeper, Tag<OWN>, int cta) const {
    fill_states<Sizes, OWN>(local_operands<Sizes, OWN>(shared_), sweeper.template initial<OWN>(),
                            cta * Sizes::kTile);
  }

  // From product O on.
  template <int O, int GEMM, int B>
  __device__ __forceinline__ void send(Tag<GEMM> gemm, Tag<B> parts, int next) const {
    if constexpr (O < Sizes::template buffer<B>().operands) {
      constexpr int kCount = Sizes::kRows * At::kSpan;
#pragma unroll
      for (int begin = 0; begin < kCount; begin += Sizes::kThreads) {
        const int index = begin + threadIdx.x;
        if (index / kWarp * kWarp < kCount) {  // whole warps go in, for the shuffles of a send
          const bool valid = index < kCount;
          const int row = valid ? index / At::kSpan : 0, unit = index % At::kSpan;
          const float part = products_.template part<GEMM>(row, O * At::kSpan + unit);
          exchange_.template send<B, O>(next, row, unit, valid, part);
        }
      }
      send<O + 1>(gemm, parts, next);
    }
  }

  __device__ At port(int step, int item) const {
    const int index = item * Sizes::kThreads + threadIdx.x;
    const int row = index / At::kSpan;
    const int unit = index % At::kSpan;
    const bool valid = row < Sizes::kRows;
    const bool live = valid && unit < Sizes::kUnits && context_.first_row + row < context_.batch;
    return At{{context_, exchange_, products_, shared_, nullptr, step, valid ? row : 0, unit, valid,
               live}};
  }

  template <class Function>
  __device__ __forceinline__ void each(Function&& function) {
#pragma unroll
    for (int item = 0; item < Sizes::kReplicaItems; ++item) {
      function(elements_[item], item);
    }
  }

  Context<Sizes, WORDS> context_;
  const Exchange& exchange_;
  const Products& products_;
  char* shared_;
  typename Replica::template Element<Sizes> elements_[Sizes::kReplicaItems];
};

template <class Sizes, class Exchange, class Products, int WORDS>
class Replicas<Sizes, Exchange, Products, WORDS, false> {
 public:
  __device__ Replicas(const Context<Sizes, WORDS>&, const Exchange&, const Products&, char*) {}
  __device__ void begin() {}
  __device__ void load(int) {}
  template <class Sweeper>
  __device__ void begin_parts(const Sweeper&, int) const {}
  __device__ void send_parts(int) const {}
  template <int STAGE>
  __device__ void ready() const {}
  template <int STAGE>
  __device__ void stage(int) {}
};

}  // namespace tfmem
