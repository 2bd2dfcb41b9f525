// What a thread of a sweep knows: the kernel's parameter, its own place, and what the generated
// code of one (row, unit) reads and writes.
#pragma once

#include "common.cuh"
#include "exchange.cuh"

namespace tfmem {

struct GemmShape {
  int columns;
  int depth;
  int operands;
  int products;
  bool replicated;                      // of all units, not only the CTA's own
  bool all_transposed, any_transposed;  // of its blocks of weights
  bool parts;  // of the CTA's own units of its operands: every CTA sends what it has
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
template <class Sizes, int WORDS>
struct Context {
  using Value = typename Sizes::Value;

  const Parameters<WORDS>& parameters;
  int time;
  int batch;
  int direction;
  int first_row;  // of the group's tile
  int cta;
  bool reverse;
  long long line_step;  // lines of a sequence from one step to the next: a line is what it has for
                        // one row of the batch in one step; negative where time runs backwards
  int line_row;         // from one row of the batch to the next

  template <class Pointer>
  __device__ Pointer* pointer(int index) const {
    return reinterpret_cast<Pointer*>(
        parameters.word[kPointers + direction * Sizes::kPointersOfDirection + index]);
  }

  __device__ long long line_of(int step, int row) const {
    const long long first = reverse ? -line_step * (time - 1) : 0;
    return first + step * line_step + row * static_cast<long long>(line_row);
  }

  __device__ Block<Value> block(const BlockPlace& place) const {
    const int line = place.columns * Sizes::kUnits;
    const Value* base = pointer<const Value>(place.pointer) +
                        (place.row * static_cast<long long>(line) + place.column) * Sizes::kUnits;
    return Block<Value>{base, place.transposed ? 1 : line, place.transposed ? line : 1};
  }

  // A number of a state [batch, units], 0 outside, and where none is given.
  __device__ float state(int index, int row, int unit) const {
    const Value* numbers = pointer<const Value>(index);
    const bool inside = numbers != nullptr && first_row + row < batch && unit < Sizes::kUnits;
    const long long at = (first_row + row) * static_cast<long long>(Sizes::kUnits) + unit;
    const float value = inside ? to_float(numbers[at]) : 0.0f;
    if (Sizes::kLargest > 0 && fabsf(value) > Sizes::kLargest) fail();
    return value;
  }

  // These inputs are not for this kernel: the fallback has to compute the results, this time.
  __device__ void fail() const { *reinterpret_cast<int*>(parameters.word[kStatus]) = 2; }
};

// Operands of products that no CTA sends: one copy, read before the next step writes it.
template <class Sizes, int B>
__device__ __forceinline__ float* local_operands(char* shared) {
  constexpr BufferShape kBuffer = Sizes::template buffer<B>();
  return reinterpret_cast<float*>(shared + kBuffer.offset);
}

// One (row, unit) of one stage: what the generated code reads and writes.
template <class Sizes, class Exchange, class Products, int WORDS>
struct Port {
  using Value = typename Sizes::Value;

  const Context<Sizes, WORDS>& context;
  const Exchange& exchange;
  const Products& products;
  char* shared;
  char* scratch;
  int step;
  int row;     // of the group's tile
  int unit;    // of the CTA
  bool valid;  // within the tile
  bool live;   // within the batch and the hidden units

  __device__ int batch_row() const { return context.first_row + row; }
  __device__ int hidden_unit() const { return context.cta * Sizes::kTile + unit; }

  // This (row, unit) of a sequence of COLUMNS * units numbers a line (or one) at the port's step;
  // `advance` goes on from there, so that a step computes no addresses.
  template <class Pointer, int POINTER, int COLUMNS>
  __device__ Pointer* first() const {
    const long long line = context.line_of(step, batch_row());
    const long long place = COLUMNS == 0 ? line : line * COLUMNS * Sizes::kUnits + hidden_unit();
    return context.template pointer<Pointer>(POINTER) + place;
  }

  template <int COLUMNS, class Pointer>
  __device__ void advance(Pointer*& pointer) const {
    pointer += context.line_step * (COLUMNS == 0 ? 1 : COLUMNS * Sizes::kUnits);
  }

  template <int COLUMN>
  __device__ float read(const Value* from, int at) const {
    return live && at < context.time ? to_float(from[COLUMN * Sizes::kUnits]) : 0.0f;
  }

  // A column of an output; a scalar is written by its row's first unit.
  template <int COLUMNS, int COLUMN>
  __device__ void write(Value* to, float value) const {
    if (live && (COLUMNS > 0 || hidden_unit() == 0)) from_float(value, to + COLUMN * Sizes::kUnits);
  }

  template <int POINTER, int COLUMNS, int COLUMN>
  __device__ float invariant() const {
    const long long at = batch_row() * static_cast<long long>(COLUMNS) + COLUMN;
    return live ? to_float(context.template pointer<const Value>(
                      POINTER)[at * Sizes::kUnits + hidden_unit()])
                : 0.0f;
  }

  template <int POINTER, int COLUMN>
  __device__ float vector() const {
    return live ? to_float(context.template pointer<const Value>(
                      POINTER)[COLUMN * Sizes::kUnits + hidden_unit()])
                : 0.0f;
  }

  template <int POINTER>
  __device__ float initial() const {
    return context.state(POINTER, row, hidden_unit());
  }

  template <int POINTER>
  __device__ void final_state(float value) const {
    if (live) {
      const long long at = batch_row() * static_cast<long long>(Sizes::kUnits) + hidden_unit();
      from_float(value, &context.template pointer<Value>(POINTER)[at]);
    }
  }

  template <int GEMM, int PRODUCT>
  __device__ float product() const {
    return products.template result<GEMM, PRODUCT>(*this);
  }

  // Product O of buffer B: what all CTAs sent of it, in the same order everywhere.
  template <int B, int O>
  __device__ float sum_of_parts() const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();  // its width: all units
    const float* parts = exchange.template operands<B>(step) + row * kBuffer.stride +
                         O * Sizes::kCtas * kBuffer.width + hidden_unit();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Sizes::kCtas; ++i) sum += parts[i * kBuffer.width];
    return sum;
  }

  // The sum over all CTAs' parts, in the same order everywhere.
  template <int B, int O>
  __device__ float row_sum() const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    const float* parts =
        exchange.template operands<B>(step) + row * kBuffer.stride + O * Sizes::kCtas;
    float sum = 0.0f;
    for (int i = 0; i < Sizes::kCtas; ++i) sum += parts[i];
    return sum;
  }

  // An operand of this step's later stages.
  template <int B, int O>
  __device__ void send(float value) const {
    exchange.template send<B, O>(step, row, unit, valid, live ? value : 0.0f);
  }

  // A state, for the next step.
  template <int B, int O>
  __device__ void send_state(float value) const {
    if (step + 1 < context.time)
      exchange.template send<B, O>(step + 1, row, unit, valid, live ? value : 0.0f);
  }

  // A state, for this CTA's part of the next step's products.
  template <int B, int O>
  __device__ void keep_own(float value) const {
    constexpr BufferShape kBuffer = Sizes::template buffer<B>();
    if (valid)
      local_operands<Sizes, B>(shared)[row * kBuffer.stride + O * Sizes::kTile + unit] =
          live ? value : 0.0f;
  }

  template <int O>
  __device__ void add_to_row(float value) const {
    if (valid) staging(O, row)[unit] = live ? value : 0.0f;
  }

  __device__ float* staging(int operand, int at_row) const {
    char* base = Sizes::kFallback ? scratch : shared;
    return reinterpret_cast<float*>(base + Sizes::kStaging) +
           (operand * Sizes::kRows + at_row) * Sizes::kTile;
  }
};

}  // namespace tfmem
