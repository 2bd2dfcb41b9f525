// The sweep of a recurrent cell over a sequence: one launch, weights resident (GRNN, section 5).
//
// `Cell` is the generated elementwise code, `Sizes` the numbers, the products and the exchange of
// one kernel (custom_ops/recurrent/codegen/source.py writes both).
#pragma once

#include "exchange.cuh"
#include "math.cuh"
#include "port.cuh"
#include "replicas.cuh"
#include "weights.cuh"

namespace tfmem {

// The fallback's products: each thread makes its own sums, straight from the matrices.
template <class Cell, class Sizes, int WORDS>
struct DirectProducts {
  const Context<Sizes, WORDS>& context;

  template <int STAGE>
  __device__ void load(const Context<Sizes, WORDS>&, bool) const {}

  template <int STAGE, class Exchange>
  __device__ void run(const Exchange&, int) const {}

  template <int GEMM, int PRODUCT, class At>
  __device__ float result(const At& port) const {
    constexpr GemmShape kGemm = Sizes::template gemm<GEMM>();
    constexpr BufferShape kBuffer = Sizes::template buffer<GEMM>();
    const float* operands =
        port.exchange.template operands<GEMM>(port.step) + port.row * kBuffer.stride;
    const int unit = port.live ? port.unit : 0;
    float sum = 0.0f;
    for (int operand = 0; operand < kGemm.operands; ++operand) {
      const auto block = context.block(Cell::block(Tag<GEMM>(), PRODUCT, operand));
      for (int k = 0; k < Sizes::kUnits; ++k) {
        sum = fmaf(operands[operand * Sizes::kTile + k],
                   to_float(block.base[k * static_cast<long long>(block.row) +
                                       unit * static_cast<long long>(block.column)]),
                   sum);
      }
    }
    return sum;
  }
};

template <class Cell, class Sizes, class Exchange, class Products, int WORDS>
struct Sweep {
  using Element = typename Cell::template Element<Sizes>;
  using At = Port<Sizes, Exchange, Products, WORDS>;
  using Copies = Replicas<Sizes, Exchange, Products, WORDS>;

  const Context<Sizes, WORDS>& context;
  Exchange& exchange;
  Products& products;
  Copies& replicas;
  char* shared;
  char* scratch;
  int first_row, first_unit;  // of the thread's first item

  // Where a thread's first item is.
  __device__ static int row_of(int thread) {
    return kInRegisters<Sizes> ? thread % Sizes::kUnitLanes / Sizes::kSumLanes
                               : thread / Sizes::kTile;
  }
  __device__ static int unit_of(int thread) {
    return kInRegisters<Sizes> ? thread / Sizes::kUnitLanes : thread % Sizes::kTile;
  }

  __device__ At port(int step, int item) const {
    int row = first_row, unit = first_unit;
    if constexpr (Sizes::kThreads % Sizes::kTile == 0) {
      row += item * (Sizes::kThreads / Sizes::kTile);
    } else if (item > 0) {
      row = row_of(item * Sizes::kThreads + threadIdx.x);
      unit = unit_of(item * Sizes::kThreads + threadIdx.x);
    }
    const bool valid = all_have(item) || (row < Sizes::kRows && unit < Sizes::kTile);
    const bool live = valid && context.first_row + row < context.batch &&
                      context.cta * Sizes::kTile + unit < Sizes::kUnits;
    return At{context, exchange,        products, shared, scratch,
              step,    valid ? row : 0, unit,     valid,  live};
  }

  // `initial` of buffer B, for the exchange.
  template <int B>
  __device__ auto initial() const {
    return [this](int operand, int row, int place) {
      return context.state(Cell::initial_state(Tag<B>(), operand), row, place);
    };
  }

  // STAGE and all that follow it.
  template <int STAGE>
  __device__ __forceinline__ void stages(Element (&elements)[Sizes::kItems], int step) {
    if constexpr (STAGE < Cell::kStages) {
      stage<STAGE>(elements, step);
      stages<STAGE + 1>(elements, step);
    }
  }

  template <int STAGE>
  __device__ __forceinline__ void stage(Element (&elements)[Sizes::kItems], int step) {
    replicas.template ready<STAGE>();
    Sizes::template for_buffers<STAGE>([&](auto tag) { wait(tag, step); });
    products.template run<STAGE>(exchange, step);
    if constexpr (Sizes::template has_gemm<STAGE>() && Sizes::kSlices == 1 &&
                  !kInRegisters<Sizes>) {
      __syncthreads();
    }
    elementwise<STAGE>(elements, step);
    replicas.template stage<STAGE>(step);
    if constexpr (Cell::template sums<STAGE>() > 0) {
      __syncthreads();
      reduce<STAGE, 0>(step);
    }
    if constexpr (kInRegisters<Sizes> && STAGE + 1 == Cell::kStages) read_ahead(elements, step);
    if constexpr (Cell::template sends<STAGE>()) exchange.end_of_stage();
  }

 private:
  // What the step after the next reads: where sums stay in registers, a step can be shorter than a
  // load takes.
  __device__ __forceinline__ void read_ahead(Element (&elements)[Sizes::kItems], int step) {
    static_cast<typename Cell::Leaves&>(elements[0]) = elements[0].ahead;
    Cell::load(elements[0], elements[0].ahead, port(step, 0), step + 2);
  }

  // Whether every thread has such an item.
  __device__ static constexpr bool all_have(int item) {
    return !kInRegisters<Sizes> && (item + 1) * Sizes::kThreads <= Sizes::kRows * Sizes::kTile;
  }

  template <int B>
  __device__ __forceinline__ void wait(Tag<B>, int step) {
    exchange.template wait<B>(step, initial<B>());
  }

  template <int STAGE>
  __device__ __forceinline__ void elementwise(Element (&elements)[Sizes::kItems], int step) {
    const auto one = [&](int item) {
      // Whole warps go in, for the shuffles of a send.
      if (kInRegisters<Sizes> || all_have(item) ||
          (item * Sizes::kThreads + threadIdx.x) / kWarp * kWarp < Sizes::kRows * Sizes::kTile) {
        Cell::stage(Tag<STAGE>(), elements[item], port(step, item));
      }
    };
    if constexpr (Sizes::kFallback) {
#pragma unroll 1
      for (int item = 0; item < Sizes::kItems; ++item) one(item);
    } else {
#pragma unroll
      for (int item = 0; item < Sizes::kItems; ++item) one(item);
    }
  }

  // Sums what add_to_row left, a warp for each row.
  template <int STAGE, int O>
  __device__ __forceinline__ void reduce(int step) {
    if constexpr (O < Cell::template sums<STAGE>()) {
      const int lane = threadIdx.x % kWarp;
      for (int row = threadIdx.x / kWarp; row < Sizes::kRows; row += Sizes::kThreads / kWarp) {
        const float* numbers = port(step, 0).staging(O, row);
        float sum = 0.0f;
        for (int i = lane; i < Sizes::kTile; i += kWarp) sum += numbers[i];
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
          sum += __shfl_xor_sync(kAllLanes, sum, lanes);
        exchange.template send_sum<Cell::template sum_buffer<STAGE>(), O>(step, row, sum);
      }
      reduce<STAGE, O + 1>(step);
    }
  }
};

template <class Exchange, class Sweeper, int B>
__device__ __forceinline__ void begin(Exchange& exchange, const Sweeper& sweeper, Tag<B>) {
  exchange.template begin<B>(sweeper.template initial<B>());
}

// Blocks: x is the CTA of a group, y the group; groups of direction 0 come first.
template <class Sizes, int WORDS>
__device__ __forceinline__ Context<Sizes, WORDS> context_of(const Parameters<WORDS>& parameters,
                                                            int group, int groups) {
  const int tiles = groups / Sizes::kDirections;
  const int direction = group / tiles;
  const bool reverse = (parameters.word[kReverse] >> direction & 1) != 0;
  const int line_step = static_cast<int>(parameters.word[kStrides]);
  return Context<Sizes, WORDS>{parameters,
                               static_cast<int>(parameters.word[kTimeAndBatch]),
                               static_cast<int>(parameters.word[kTimeAndBatch] >> 32),
                               direction,
                               group % tiles * Sizes::kRows,
                               static_cast<int>(blockIdx.x),
                               reverse,
                               reverse ? -line_step : line_step,
                               static_cast<int>(parameters.word[kStrides] >> 32)};
}

// Zeros operands and their padding, before any CTA sends.
template <class Sizes>
__device__ __forceinline__ void zero_shared(char* shared) {
  if constexpr (Sizes::kZeroed > 0) {
    for (int i = threadIdx.x * 16; i < Sizes::kZeroed; i += Sizes::kThreads * 16) {
      *reinterpret_cast<float4*>(shared + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __syncthreads();
}

// The whole kernel.
template <class Cell, class Sizes, int WORDS>
__device__ __forceinline__ void sweep(const Parameters<WORDS>& parameters, char* shared) {
  using Exchange = typename Sizes::Exchange;
  using Products = typename Sizes::template Products<WORDS>;
  if constexpr (!Sizes::kFallback) shared = settled(shared);
  const int group = static_cast<int>(parameters.word[kGroups]) + blockIdx.y;
  const int groups = static_cast<int>(parameters.word[kGroups] >> 32);
  if (group >= groups) return;
  const Context<Sizes, WORDS> context = context_of<Sizes>(parameters, group, groups);
  char* scratch = reinterpret_cast<char*>(parameters.word[kScratch]) +
                  group * static_cast<long long>(Sizes::kScratch);
  int* status = reinterpret_cast<int*>(parameters.word[kStatus]);

  zero_shared<Sizes>(shared);
  Exchange exchange(Place{shared, scratch, status, cta_in_grid()});
  Products products(context, shared, scratch);
  products.template load<kAllStages>(context, true);
  Replicas<Sizes, Exchange, Products, WORDS> replicas(context, exchange, products, shared);
  using Sweeper = Sweep<Cell, Sizes, Exchange, Products, WORDS>;
  const int row = settled(Sweeper::row_of(thread_in_cta()));
  const int unit = settled(Sweeper::unit_of(thread_in_cta()));
  Sweeper sweeper{context, exchange, products, replicas, shared, scratch, row, unit};

  typename Cell::template Element<Sizes> elements[Sizes::kItems];
  const auto each = [&](auto&& function) {
    if constexpr (Sizes::kFallback) {
#pragma unroll 1
      for (int item = 0; item < Sizes::kItems; ++item) function(elements[item], item);
    } else {
#pragma unroll
      for (int item = 0; item < Sizes::kItems; ++item) function(elements[item], item);
    }
  };
  each([&](auto& element, int item) {
    Cell::begin(element, sweeper.port(0, item));
    if constexpr (kInRegisters<Sizes>) Cell::load(element, element.ahead, sweeper.port(0, item), 1);
  });
  replicas.begin();
  replicas.begin_parts(sweeper, context.cta);
  Sizes::template for_buffers<-1>([&](auto tag) { begin(exchange, sweeper, tag); });
  exchange.start();
  replicas.send_parts(0);

  if constexpr (kInRegisters<Sizes>) {
    // Two at a time: where copies by the parity of the step lie needs no arithmetic.
#pragma unroll 1
    for (int step = 0; step < context.time; step += 2) {
      sweeper.template stages<0>(elements, step);
      if (step + 1 == context.time) break;
      sweeper.template stages<0>(elements, step + 1);
    }
  } else {
#pragma unroll 1
    for (int step = 0; step < context.time; ++step) {
      sweeper.template stages<0>(elements, step);
      replicas.send_parts(step + 1);
      each([&](auto& element, int item) {
        Cell::load(element, element, sweeper.port(step, item), step + 1);
      });
      replicas.load(step + 1);
    }
  }
  each([&](auto& element, int item) { Cell::end(element, sweeper.port(0, item)); });
  exchange.finish();
}

}  // namespace tfmem
