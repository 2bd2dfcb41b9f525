// The sweep of a recurrent cell over a sequence: one launch, weights resident (GRNN, section 5).
//
// `Cell` is the generated elementwise code, `Plan` the numbers, the products and the exchange of
// one kernel (custom_ops/codegen/recurrent.py writes both).
#pragma once

#include "exchange.cuh"
#include "math.cuh"

namespace tfmem {

struct GemmShape {
  int columns;
  int depth;
  int operands;
  int products;
};

// A block of a matrix with `columns` blocks in a row.
struct BlockPlace {
  int pointer;
  int columns;
  int row;
  int column;
  bool transposed;
};

// Where its numbers are, and how far apart its rows and columns are.
template <class Value>
struct Block {
  const Value* base;
  int row;
  int column;
};

// What a thread knows of the kernel's parameter and its own place.
template <class Plan, int WORDS>
struct Context {
  using Value = typename Plan::Value;

  const Parameters<WORDS>& parameters;
  int time;
  int batch;
  int direction;
  int first_row;  // of the group's tile
  int cta;
  bool reverse;
  long long line_step;  // rows [batch] of a tensor from one step to the next, times the sign of the
                        // direction

  template <class Pointer>
  __device__ Pointer* pointer(int index) const {
    return reinterpret_cast<Pointer*>(
        parameters.word[kPointers + direction * Plan::kPointersOfDirection + index]);
  }

  __device__ long long index_of(int step) const { return reverse ? time - 1 - step : step; }

  __device__ Block<Value> block(const BlockPlace& place) const {
    const int line = place.columns * Plan::kUnits;
    const Value* base = pointer<const Value>(place.pointer) +
                        (place.row * static_cast<long long>(line) + place.column) * Plan::kUnits;
    return Block<Value>{base, place.transposed ? 1 : line, place.transposed ? line : 1};
  }

  // A number of a state [batch, units], 0 outside.
  __device__ float state(int index, int row, int unit) const {
    const bool inside = first_row + row < batch && unit < Plan::kUnits;
    const float value =
        inside ? to_float(pointer<const Value>(
                     index)[(first_row + row) * static_cast<long long>(Plan::kUnits) + unit])
               : 0.0f;
    if (Plan::kLargest > 0 && fabsf(value) > Plan::kLargest) fail();
    return value;
  }

  // These inputs are not for this kernel: the fallback has to compute the results, this time.
  __device__ void fail() const { *reinterpret_cast<int*>(parameters.word[kStatus]) = 2; }
};

// One (row, unit) of one stage: what the generated code reads and writes.
template <class Plan, class Exchange, class Products, int WORDS>
struct Port {
  using Value = typename Plan::Value;

  const Context<Plan, WORDS>& context;
  const Exchange& exchange;
  const Products& products;
  char* shared;
  char* scratch;
  int pass;
  int step;
  int row;     // of the pass
  int unit;    // of the CTA
  bool valid;  // within the tile
  bool live;   // within the batch and the hidden units

  __device__ int batch_row() const { return context.first_row + pass * Plan::kRows + row; }
  __device__ int hidden_unit() const { return context.cta * Plan::kTile + unit; }

  // This (row, unit) of a tensor [time, batch, COLUMNS * units] (or [time, batch]) at the first
  // step; `advance` goes on from there, so that a step computes no addresses.
  template <class Pointer, int POINTER, int COLUMNS>
  __device__ Pointer* first() const {
    const long long line = context.index_of(0) * context.batch + batch_row();
    const long long place = COLUMNS == 0 ? line : line * COLUMNS * Plan::kUnits + hidden_unit();
    return context.template pointer<Pointer>(POINTER) + place;
  }

  template <int COLUMNS, class Pointer>
  __device__ void advance(Pointer*& pointer) const {
    pointer += context.line_step * (COLUMNS == 0 ? 1 : COLUMNS * Plan::kUnits);
  }

  template <int COLUMN>
  __device__ float read(const Value* from, int at) const {
    return live && at < context.time ? to_float(from[COLUMN * Plan::kUnits]) : 0.0f;
  }

  // A column of an output; a scalar is written by its row's first unit.
  template <int COLUMNS, int COLUMN>
  __device__ void write(Value* to, float value) const {
    if (live && (COLUMNS > 0 || hidden_unit() == 0)) from_float(value, to + COLUMN * Plan::kUnits);
  }

  template <int POINTER, int COLUMNS, int COLUMN>
  __device__ float invariant() const {
    const long long at = batch_row() * static_cast<long long>(COLUMNS) + COLUMN;
    return live ? to_float(context.template pointer<const Value>(
                      POINTER)[at * Plan::kUnits + hidden_unit()])
                : 0.0f;
  }

  template <int POINTER, int COLUMN>
  __device__ float vector() const {
    return live ? to_float(context.template pointer<const Value>(
                      POINTER)[COLUMN * Plan::kUnits + hidden_unit()])
                : 0.0f;
  }

  template <int POINTER>
  __device__ float initial() const {
    return context.state(POINTER, pass * Plan::kRows + row, hidden_unit());
  }

  template <int POINTER>
  __device__ void final_state(float value) const {
    if (live) {
      const long long at = batch_row() * static_cast<long long>(Plan::kUnits) + hidden_unit();
      from_float(value, &context.template pointer<Value>(POINTER)[at]);
    }
  }

  template <int GEMM, int PRODUCT>
  __device__ float product() const {
    return products.template result<GEMM, PRODUCT>(*this);
  }

  // The sum over all CTAs' parts, in the same order everywhere.
  template <int B, int O>
  __device__ float row_sum() const {
    constexpr BufferShape kBuffer = Plan::template buffer<B>();
    const float* parts =
        exchange.template operands<B>(pass, step) + row * kBuffer.stride + O * Plan::kCtas;
    float sum = 0.0f;
    for (int i = 0; i < Plan::kCtas; ++i) sum += parts[i];
    return sum;
  }

  // An operand of this step's later stages.
  template <int B, int O>
  __device__ void send(float value) const {
    exchange.template send<B, O>(pass, step, row, unit, valid, live ? value : 0.0f);
  }

  // A state, for the next step.
  template <int B, int O>
  __device__ void send_state(float value) const {
    if (step + 1 < context.time)
      exchange.template send<B, O>(pass, step + 1, row, unit, valid, live ? value : 0.0f);
  }

  template <int O>
  __device__ void add_to_row(float value) const {
    if (valid) staging(O, row)[unit] = live ? value : 0.0f;
  }

  __device__ float* staging(int operand, int at_row) const {
    char* base = Plan::kFallback ? scratch : shared;
    return reinterpret_cast<float*>(base + Plan::kStaging) +
           (operand * Plan::kRows + at_row) * Plan::kTile;
  }
};

// Reads weights for a product's load().
template <class Cell, class Plan, int GEMM, int WORDS>
struct WeightSource {
  const Context<Plan, WORDS>& context;

  // No branch: what is outside is read inside and dropped, so that all loads of a thread are on
  // their way together.
  __device__ float operator()(int column, int k) const {
    constexpr GemmShape kGemm = Plan::template gemm<GEMM>();
    constexpr int kOperand = Plan::kCtas * Plan::kTile;
    constexpr int kLast = Plan::kUnits - 1;
    const int operand = kGemm.operands == 1 ? 0 : min(k / kOperand, kGemm.operands - 1);
    const int row = k - operand * kOperand;
    const int unit = context.cta * Plan::kTile + column % Plan::kTile;
    const int product = min(column / Plan::kTile, kGemm.products - 1);
    const auto block = context.block(Cell::block(Tag<GEMM>(), product, operand));
    const float value =
        to_float(block.base[min(row, kLast) * static_cast<long long>(block.row) +
                            min(unit, kLast) * static_cast<long long>(block.column)]);
    return column < kGemm.columns && row <= kLast && unit <= kLast ? value : 0.0f;
  }

  __device__ float4 four(int column, int k) const {
    return make_float4((*this)(column, k), (*this)(column, k + 1), (*this)(column, k + 2),
                       (*this)(column, k + 3));
  }

  __device__ void fail() const { context.fail(); }
};

// The fallback's products: each thread makes its own sums, straight from the matrices.
template <class Cell, class Plan, int WORDS>
struct DirectProducts {
  const Context<Plan, WORDS>& context;

  template <int STAGE, class Exchange>
  __device__ void run(const Exchange&, int, int) const {}

  template <int GEMM, int PRODUCT, class At>
  __device__ float result(const At& port) const {
    constexpr GemmShape kGemm = Plan::template gemm<GEMM>();
    constexpr BufferShape kBuffer = Plan::template buffer<GEMM>();
    const float* operands =
        port.exchange.template operands<GEMM>(port.pass, port.step) + port.row * kBuffer.stride;
    const int unit = port.live ? port.unit : 0;
    float sum = 0.0f;
    for (int operand = 0; operand < kGemm.operands; ++operand) {
      const auto block = context.block(Cell::block(Tag<GEMM>(), PRODUCT, operand));
      for (int k = 0; k < Plan::kUnits; ++k) {
        sum = fmaf(operands[operand * Plan::kTile + k],
                   to_float(block.base[k * static_cast<long long>(block.row) +
                                       unit * static_cast<long long>(block.column)]),
                   sum);
      }
    }
    return sum;
  }
};

template <class Cell, class Plan, class Exchange, class Products, int WORDS>
struct Sweep {
  using Element = typename Cell::template Element<Plan>;
  using At = Port<Plan, Exchange, Products, WORDS>;

  const Context<Plan, WORDS>& context;
  Exchange& exchange;
  Products& products;
  char* shared;
  char* scratch;

  __device__ At port(int pass, int step, int item) const {
    const int index = item * Plan::kThreads + threadIdx.x;
    const int row = index / Plan::kTile;
    const int unit = index % Plan::kTile;
    const bool valid = row < Plan::kRows;
    const bool live = valid && context.first_row + pass * Plan::kRows + row < context.batch &&
                      context.cta * Plan::kTile + unit < Plan::kUnits;
    return At{context, exchange,        products, shared, scratch, pass,
              step,    valid ? row : 0, unit,     valid,  live};
  }

  // `initial` of buffer B, for the exchange.
  template <int B>
  __device__ auto initial() const {
    return [this](int operand, int row, int place) {
      return context.state(Cell::initial_state(Tag<B>(), operand), row, place);
    };
  }

  template <int STAGE>
  __device__ __forceinline__ void stage(Element (&elements)[Plan::kPasses][Plan::kItems],
                                        int step) {
    if constexpr (STAGE < Cell::kStages) {
#pragma unroll
      for (int pass = 0; pass < Plan::kPasses; ++pass) {
        Plan::template for_buffers<STAGE>([&](auto tag) { wait(tag, pass, step); });
        products.template run<STAGE>(exchange, pass, step);
        if constexpr (Plan::template has_gemm<STAGE>()) __syncthreads();
        elementwise<STAGE>(elements[pass], pass, step);
        if constexpr (Cell::template sums<STAGE>() > 0) {
          __syncthreads();
          reduce<STAGE, 0>(pass, step);
        }
        if constexpr (Cell::template sends<STAGE>()) exchange.end_of_stage();
      }
      stage<STAGE + 1>(elements, step);
    }
  }

 private:
  template <int B>
  __device__ __forceinline__ void wait(Tag<B>, int pass, int step) {
    exchange.template wait<B>(pass, step, initial<B>());
  }

  template <int STAGE>
  __device__ __forceinline__ void elementwise(Element (&elements)[Plan::kItems], int pass,
                                              int step) {
    const auto one = [&](int item) {
      // Whole warps go in, for the shuffles of a send.
      if ((item * Plan::kThreads + threadIdx.x) / kWarp * kWarp < Plan::kRows * Plan::kTile) {
        Cell::stage(Tag<STAGE>(), elements[item], port(pass, step, item));
      }
    };
    if constexpr (Plan::kFallback) {
#pragma unroll 1
      for (int item = 0; item < Plan::kItems; ++item) one(item);
    } else {
#pragma unroll
      for (int item = 0; item < Plan::kItems; ++item) one(item);
    }
  }

  // Sums what add_to_row left, a warp for each row.
  template <int STAGE, int O>
  __device__ __forceinline__ void reduce(int pass, int step) {
    if constexpr (O < Cell::template sums<STAGE>()) {
      const int lane = threadIdx.x % kWarp;
      for (int row = threadIdx.x / kWarp; row < Plan::kRows; row += Plan::kThreads / kWarp) {
        const float* numbers = port(pass, step, 0).staging(O, row);
        float sum = 0.0f;
        for (int i = lane; i < Plan::kTile; i += kWarp) sum += numbers[i];
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
          sum += __shfl_xor_sync(kAllLanes, sum, lanes);
        exchange.template send_sum<Cell::template sum_buffer<STAGE>(), O>(pass, step, row, sum);
      }
      reduce<STAGE, O + 1>(pass, step);
    }
  }
};

// The CTA within its group. As volatile: the compiler would read the slow special register again in
// every step.
__device__ __forceinline__ int cta_of_group() {
  int cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}

template <class Exchange, class Sweeper, int B>
__device__ __forceinline__ void begin(Exchange& exchange, const Sweeper& sweeper, Tag<B>) {
  exchange.template begin<B>(sweeper.template initial<B>());
}

// The whole kernel. Blocks: x is the CTA of a group, y the group; groups of direction 0 come first.
template <class Cell, class Plan, int WORDS>
__device__ __forceinline__ void sweep(const Parameters<WORDS>& parameters, char* shared) {
  using Exchange = typename Plan::Exchange;
  using Products = typename Plan::template Products<WORDS>;
  const int group = static_cast<int>(parameters.word[kGroups]) + blockIdx.y;
  const int groups = static_cast<int>(parameters.word[kGroups] >> 32);
  if (group >= groups) return;
  const int tiles = groups / Plan::kDirections;
  const int direction = group / tiles;
  const int batch = static_cast<int>(parameters.word[kTimeAndBatch] >> 32);
  const bool reverse = (parameters.word[kReverse] >> direction & 1) != 0;
  const Context<Plan, WORDS> context{parameters,
                                     static_cast<int>(parameters.word[kTimeAndBatch]),
                                     batch,
                                     direction,
                                     group % tiles * (Plan::kRows * Plan::kPasses),
                                     static_cast<int>(blockIdx.x),
                                     reverse,
                                     reverse ? -batch : batch};
  char* scratch = reinterpret_cast<char*>(parameters.word[kScratch]) +
                  group * static_cast<long long>(Plan::kScratch);
  int* status = reinterpret_cast<int*>(parameters.word[kStatus]);

  if constexpr (Plan::kZeroed > 0) {
    for (int i = threadIdx.x * 16; i < Plan::kZeroed; i += Plan::kThreads * 16) {
      *reinterpret_cast<float4*>(shared + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  __syncthreads();
  Exchange exchange(Place{shared, scratch, status, cta_of_group()});
  Products products(context, shared, scratch);
  Sweep<Cell, Plan, Exchange, Products, WORDS> sweeper{context, exchange, products, shared,
                                                       scratch};

  typename Cell::template Element<Plan> elements[Plan::kPasses][Plan::kItems];
  const auto each = [&](auto&& function) {
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      if constexpr (Plan::kFallback) {
#pragma unroll 1
        for (int item = 0; item < Plan::kItems; ++item) function(elements[pass][item], pass, item);
      } else {
#pragma unroll
        for (int item = 0; item < Plan::kItems; ++item) function(elements[pass][item], pass, item);
      }
    }
  };
  each([&](auto& element, int pass, int item) {
    Cell::begin(element, sweeper.port(pass, 0, item));
  });
  Plan::template for_buffers<-1>([&](auto tag) { begin(exchange, sweeper, tag); });
  exchange.start();

#pragma unroll 1
  for (int step = 0; step < context.time; ++step) {
    sweeper.template stage<0>(elements, step);
    each([&](auto& element, int pass, int item) {
      Cell::load(element, sweeper.port(pass, step, item), step + 1);
    });
  }
  each([&](auto& element, int pass, int item) { Cell::end(element, sweeper.port(pass, 0, item)); });
  exchange.finish();
}

}  // namespace tfmem
