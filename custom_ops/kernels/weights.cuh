// Where a CTA's products find their weights, in the matrices as TensorFlow has them.
//
// All that depends on the column alone is computed once for all its numbers, not to be fast but to
// be compiled fast: a thread's loads are unrolled, a hundred and more of them.
#pragma once

#include "exchange.cuh"
#include "port.cuh"

namespace tfmem {

// For a product's load().
template <class Cell, class Sizes, int GEMM, int WORDS>
struct WeightSource {
  const Context<Sizes, WORDS>& context;

  using Value = typename Sizes::Value;
  static constexpr GemmShape kGemm = Sizes::template gemm<GEMM>();
  // Numbers of one operand that this CTA multiplies.
  static constexpr int kOperand =
      kGemm.parts ? Sizes::kTile : Sizes::kCtas / Sizes::kSlices * Sizes::kTile;

  // Whether of four neighbours, the first at a multiple of 4, all are inside the matrix or none;
  // and whether they can then be loaded as one, 16 bytes. (TensorFlow's tensors are aligned to
  // more.)
  static constexpr bool kTogether = Sizes::kUnits % 4 == 0;
  static constexpr bool kVectors = sizeof(Value) == 4 && kTogether;
  static constexpr bool kAlongK = kVectors && kGemm.all_transposed;
  static constexpr bool kAlongColumns = kVectors && !kGemm.any_transposed && !kInRegisters<Sizes>;

  // One column of the result, or so many neighbours, for which one load is enough.
  template <int COLUMNS>
  class Columns {
   public:
    __device__ __forceinline__ Columns(const Context<Sizes, WORDS>& context, int column)
        : context_(context) {
      constexpr int kWidth = kGemm.columns / Sizes::kSlices;  // of one CTA
      constexpr int kSpan = kGemm.replicated ? Sizes::kCtas * Sizes::kTile : Sizes::kTile;
      const int slice = context.cta % Sizes::kSlices;
      const int owner = kGemm.replicated ? 0 : context.cta - slice + column / kWidth;
      // Columns are a unit's products one after the other, or a product's units.
      const int place = kInRegisters<Sizes> ? column / kGemm.products : column % kWidth % kSpan;
      const int unit = owner * Sizes::kTile + place;
      product_ = kInRegisters<Sizes> ? column % kGemm.products
                                     : min(column % kWidth / kSpan, kGemm.products - 1);
      unit_ = min(unit, Sizes::kUnits - COLUMNS);
      inside_ = column < kGemm.columns && unit < Sizes::kUnits;
      first_row_ = (kGemm.parts ? context.cta : slice) * kOperand;
      if constexpr (kGemm.operands == 1) only_ = block_of(0);
    }

    // The numbers k to k + 3 of a column; k is a multiple of 4.
    __device__ __forceinline__ float4 four(int k) const {
      if constexpr (kAlongK) {
        return place_of<4>(k).vector(0);
      } else if constexpr (kTogether) {
        const Place place = place_of<4>(k);
        return make_float4(place.number(0), place.number(1), place.number(2), place.number(3));
      } else {
        return make_float4(one(k), one(k + 1), one(k + 2), one(k + 3));
      }
    }

    // The number k.
    __device__ __forceinline__ float one(int k) const { return place_of<1>(k).number(0); }

    // The numbers k to k + 3 of four columns.
    __device__ __forceinline__ void four_by_four(int k, float4* result) const {
      const Place place = place_of<4>(k);
      const float4 a = place.vector(0), b = place.vector(1), c = place.vector(2),
                   d = place.vector(3);
      result[0] = make_float4(a.x, b.x, c.x, d.x);
      result[1] = make_float4(a.y, b.y, c.y, d.y);
      result[2] = make_float4(a.z, b.z, c.z, d.z);
      result[3] = make_float4(a.w, b.w, c.w, d.w);
    }

   private:
    // What is outside is read inside and dropped, without a branch, so that all loads of a thread
    // are on their way together.
    struct Place {
      const Value* first;
      int row;  // from one number of a column to the next
      bool inside;

      __device__ __forceinline__ float number(int i) const {
        const float value = to_float(first[i * static_cast<long long>(row)]);
        return inside ? value : 0.0f;
      }

      __device__ __forceinline__ float4 vector(int i) const {
        const float4 four =
            *reinterpret_cast<const float4*>(first + i * static_cast<long long>(row));
        return inside ? four : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    };

    // The place of the first of ROWS numbers.
    template <int ROWS>
    __device__ __forceinline__ Place place_of(int k) const {
      const int operand = kGemm.operands == 1 ? 0 : min(k / kOperand, kGemm.operands - 1);
      const int within = k - operand * kOperand;
      const int row = first_row_ + within;
      Block<Value> block = only_;
      if constexpr (kGemm.operands > 1) block = block_of(operand);
      return Place{block.base + min(row, Sizes::kUnits - ROWS) * static_cast<long long>(block.row),
                   block.row, inside_ && within < kOperand && row < Sizes::kUnits};
    }

    // The matrix that multiplies an operand, from the unit's column on.
    __device__ __forceinline__ Block<Value> block_of(int operand) const {
      Block<Value> block = context_.block(Cell::block(Tag<GEMM>(), product_, operand));
      block.base += unit_ * static_cast<long long>(block.column);
      return block;
    }

    const Context<Sizes, WORDS>& context_;
    Block<Value> only_;
    int product_, unit_, first_row_;
    bool inside_;
  };

  __device__ __forceinline__ Columns<1> column(int column) const { return {context, column}; }

  // The numbers k to k + 3 of four neighbouring columns, the first a multiple of 4; for each k of
  // `each(function)`, which calls function(k, result).
  template <class Each>
  __device__ __forceinline__ void four_columns(int column, const Each& each) const {
    if constexpr (kAlongColumns) {
      const Columns<4> columns(context, column);
      each([&](int k, float4* result) { columns.four_by_four(k, result); });
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Columns<1> one(context, column + i);
        each([&](int k, float4* result) { result[i] = one.four(k); });
      }
    }
  }

  __device__ void fail() const { context.fail(); }
};

}  // namespace tfmem
