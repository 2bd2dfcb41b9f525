// The text of cpu_kernels.h's loops, included once for each instruction set, inside a namespace and
// between pragmas that choose it. Before that, the includer defines
//   TFMEM_VECTOR_BYTES  16, 32 or 64
//   TFMEM_ROWS          rows of a register block: 4 * TFMEM_ROWS accumulators fit the registers
// and includes <cmath>, <immintrin.h> (on x86), <cstring>, <type_traits> and cpu_kernels.h: nothing
// of the standard library may be compiled under the pragmas, or the linker may give AVX code to all
// callers. AVX512's functions are called in the form with a mask, and one of all lanes: g++ 12
// warns that the others read undefined values. The instructions are the same.

#define TFMEM_INLINE inline __attribute__((always_inline))
// Vectors of integers wrap; the sanitizer takes them for C++'s int, which must not.
#define TFMEM_WRAPS __attribute__((no_sanitize("signed-integer-overflow")))

template <typename Number, int lanes>
struct LanesOf {
  // Unaligned, as inputs are; aligned ones cost nothing more.
  typedef Number Type
      __attribute__((vector_size(lanes * sizeof(Number)), aligned(sizeof(Number)), may_alias));
};
template <typename Number, int lanes>
using Lanes = typename LanesOf<Number, lanes>::Type;

// How many numbers a whole vector has.
template <typename Number>
constexpr int kLanes = TFMEM_VECTOR_BYTES / sizeof(Number);
template <typename Number>
using Vector = Lanes<Number, kLanes<Number>>;
using Floats = Vector<float>;
using Ints = Vector<int32_t>;
using Shorts = Lanes<uint16_t, kLanes<float>>;

constexpr int kVectors = 4;  // of a panel

template <typename Type, typename Number>
TFMEM_INLINE Type LoadLanes(const Number* source) {
  return *reinterpret_cast<const Type*>(source);
}
template <typename Type, typename Number>
TFMEM_INLINE void StoreLanes(Type value, Number* target) {
  *reinterpret_cast<Type*>(target) = value;
}
template <typename Number>
TFMEM_INLINE Vector<Number> Load(const Number* source) {
  return LoadLanes<Vector<Number>>(source);
}
template <typename Number>
TFMEM_INLINE void Store(Vector<Number> value, Number* target) {
  StoreLanes<Vector<Number>>(value, target);
}
template <typename Real>
TFMEM_INLINE Vector<Real> Fill(Real value) {
  return Vector<Real>{} + value;
}

#include "custom_ops/ops/cpu/product_kernels_body.h"
#include "custom_ops/ops/cpu/vector_math_body.h"

// ---- elementwise ----

// An argument of a loop over vectors: a step of 0 if one vector of it stands for all.
template <typename Number>
struct Argument {
  const Number* from;
  int64_t step;

  Argument(const void* argument, int place, int splats)
      : from(static_cast<const Number*>(argument)), step((splats >> place & 1) == 0) {}
  TFMEM_INLINE const Number* At(int64_t i) const { return from + i * step; }
};

// Some numbers that are no whole vector, copied to one.
template <typename Number, int lanes>
struct Rest {
  Number copy[lanes] = {};

  Argument<Number> Of(const Argument<Number>& argument, int64_t first, int64_t count) {
    if (argument.from != nullptr) {
      std::memcpy(copy, argument.At(first), count * sizeof(Number));
    }
    return {copy, 0, 0};
  }
};

// loop(target, arguments..., count) over whole vectors, and once more over a copy of the rest.
// Loops read and write whole vectors, if their last one does not end where the count does.
template <int lanes, typename Target, typename... Numbers, typename Loop>
TFMEM_INLINE void OverVectors(Loop loop, Target* target, int64_t count,
                              Argument<Numbers>... arguments) {
  const int64_t whole = count / lanes * lanes, rest = count - whole;
  if (whole > 0) loop(target, arguments..., whole);
  if (rest == 0) return;
  Rest<Target, lanes> computed;
  loop(computed.copy, Rest<Numbers, lanes>().Of(arguments, whole, rest)..., rest);
  std::memcpy(target + whole, computed.copy, rest * sizeof(Target));
}

// Arguments that an op does not have are not read.
#define TFMEM_VECTORS(op, arguments, kinds, expression)                                       \
  case Elementwise::op:                                                                       \
    if constexpr (((kinds) & kFloats) != 0) {                                                 \
      for (int64_t i = 0; i < count; i += kLanes<Real>) {                                     \
        const Vector<Real> a = Load(first.At(i));                                             \
        [[maybe_unused]] const Vector<Real> b = Load((arguments > 1 ? second : first).At(i)); \
        [[maybe_unused]] const Vector<Real> c = Load((arguments > 2 ? third : first).At(i));  \
        Store<Real>(expression, target + i);                                                  \
      }                                                                                       \
    }                                                                                         \
    break;
#define TFMEM_COMPARISONS(op, arguments, kinds, expression) \
  TFMEM_VECTORS(op, arguments, kinds, (expression ? one : zero))
// A loop over numbers, for what is rare and what the standard library does well.
#define TFMEM_NUMBERS(op, arguments, kinds, expression)                          \
  case Elementwise::op:                                                          \
    if constexpr (((kinds) & kFloats) != 0) {                                    \
      for (int64_t i = 0; i < count; ++i) {                                      \
        const Real a = *first.At(i);                                             \
        [[maybe_unused]] const Real b = *(arguments > 1 ? second : first).At(i); \
        target[i] = expression;                                                  \
      }                                                                          \
    }                                                                            \
    break;

template <typename Real>
void ComputeVectors(Elementwise op, Real* target, Argument<Real> first, Argument<Real> second,
                    Argument<Real> third, int64_t count) {
  const Vector<Real> one = Fill(Real(1));
  const Vector<Real> zero{};
  switch (op) { TFMEM_ELEMENTWISE_KERNELS(TFMEM_VECTORS, TFMEM_COMPARISONS, TFMEM_NUMBERS) }
}

#undef TFMEM_VECTORS
#undef TFMEM_COMPARISONS
#undef TFMEM_NUMBERS

template <typename Real>
void Compute(Elementwise op, Real* target, const Real* a, const Real* b, const Real* c,
             int64_t count, int splats) {
  const auto loop = [op](Real* to, Argument<Real> first, Argument<Real> second,
                         Argument<Real> third, int64_t numbers) {
    ComputeVectors<Real>(op, to, first, second, third, numbers);
  };
  OverVectors<kLanes<Real>>(loop, target, count, Argument<Real>(a, 0, splats),
                            Argument<Real>(b, 1, splats), Argument<Real>(c, 2, splats));
}

template <typename Real>
Real Sum(const Real* values, int64_t count) {
  Vector<Real> sums{};
  int64_t i = 0;
  for (; i + kLanes<Real> <= count; i += kLanes<Real>) sums += Load(values + i);
  Real sum = 0;
  for (; i < count; ++i) sum += values[i];
  for (int lane = 0; lane < kLanes<Real>; ++lane) sum += sums[lane];
  return sum;
}

// All in one pass: parameters and moments are read from memory and written to it once.
template <typename Real>
TFMEM_INLINE void AdamVectors(Real* w, Real* m, Real* v, const Real* g, int64_t count,
                              const Real* rates) {
  for (int64_t i = 0; i < count; i += kLanes<Real>) {
    const Vector<Real> gradient = Load(g + i);
    const Vector<Real> first = Load(m + i) + (gradient - Load(m + i)) * rates[1];
    const Vector<Real> second = Load(v + i) + (gradient * gradient - Load(v + i)) * rates[2];
    Store<Real>(first, m + i);
    Store<Real>(second, v + i);
    Store<Real>(Load(w + i) - first * rates[0] / (Sqrt(second) + rates[3]), w + i);
  }
}

template <typename Real>
void Adam(Real* w, Real* m, Real* v, const Real* g, int64_t count, const Real* rates) {
  const int64_t whole = count / kLanes<Real> * kLanes<Real>, rest = count - whole;
  AdamVectors(w, m, v, g, whole, rates);
  if (rest == 0) return;
  Real copies[4][kLanes<Real>] = {};
  Real* const places[3] = {w + whole, m + whole, v + whole};
  for (int i = 0; i < 3; ++i) std::memcpy(copies[i], places[i], rest * sizeof(Real));
  std::memcpy(copies[3], g + whole, rest * sizeof(Real));
  AdamVectors(copies[0], copies[1], copies[2], copies[3], rest, rates);
  for (int i = 0; i < 3; ++i) std::memcpy(places[i], copies[i], rest * sizeof(Real));
}

// ---- copies ----

// Transposes a square of vectors: exchanges the off-diagonal parts of the small squares, of size
// 2 * step, then those of squares of twice that size, and so on.
template <typename Real, int step>
TFMEM_INLINE void ExchangeSquares(Vector<Real>* vectors) {
  constexpr int lanes = kLanes<Real>;
  using Places = Vector<std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>>;
  if constexpr (step < lanes) {
    Places upper{}, lower{};
#pragma GCC unroll 16
    for (int lane = 0; lane < lanes; ++lane) {
      upper[lane] = (lane & step) != 0 ? lanes + lane - step : lane;
      lower[lane] = (lane & step) != 0 ? lanes + lane : lane + step;
    }
#pragma GCC unroll 16
    for (int row = 0; row < lanes; ++row) {
      if ((row & step) != 0) continue;
      const Vector<Real> first = vectors[row], second = vectors[row + step];
      vectors[row] = __builtin_shuffle(first, second, upper);
      vectors[row + step] = __builtin_shuffle(first, second, lower);
    }
    ExchangeSquares<Real, 2 * step>(vectors);
  }
}

template <typename Real>
void TransposeSquare(const Real* source, int64_t source_stride, Real* target,
                     int64_t target_stride) {
  Vector<Real> vectors[kLanes<Real>];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<Real>; ++i) vectors[i] = Load(source + i * source_stride);
  ExchangeSquares<Real, 1>(vectors);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<Real>; ++i) Store<Real>(vectors[i], target + i * target_stride);
}

template <typename Real>
void Transpose(const Real* source, int64_t source_stride, int64_t rows, int64_t columns,
               Real* target, int64_t target_stride) {
  constexpr int64_t block = kLanes<Real>;
  for (int64_t start = 0; start < rows; start += block) {
    const int64_t height = rows - start < block ? rows - start : block;
    int64_t column = 0;
    for (; height == block && column + block <= columns; column += block) {
      TransposeSquare(source + start * source_stride + column, source_stride,
                      target + column * target_stride + start, target_stride);
    }
    for (; column < columns; ++column) {
      for (int64_t row = start; row < start + height; ++row) {
        target[column * target_stride + row] = source[row * source_stride + column];
      }
    }
  }
}

// The four conversions, a vector at a time; the rest of a row goes through one more vector.
TFMEM_INLINE Floats HalfToFloat(Ints half) {
  const Ints sign = (half & 0x8000) << 16;
  const Ints shifted = (half & 0x7FFF) << 13;
  const Ints exponent = shifted & (0x7C00 << 13);
  const Ints normal = shifted + ((127 - 15) << 23);
  const Ints infinite = normal + ((128 - 16) << 23);  // or NaN
  const Floats offset = Fill(6.103515625e-5f);        // 2^-14
  const Floats denormal = reinterpret_cast<Floats>(normal + (1 << 23)) - offset;
  Ints bits = exponent == (0x7C00 << 13) ? infinite : normal;
  bits = exponent == 0 ? reinterpret_cast<Ints>(denormal) : bits;
  return reinterpret_cast<Floats>(bits | sign);
}

TFMEM_WRAPS TFMEM_INLINE Ints FloatToHalf(Floats value) {
  const Ints all = reinterpret_cast<Ints>(value);
  const Ints bits = all & 0x7FFFFFFF;
  const Ints odd = (bits >> 13) & 1;  // ties go to even
  const Ints normal = (bits - ((127 - 15) << 23) + 0xFFF + odd) >> 13;
  const Floats magic = Fill(0.5f);  // its unit in the last place is a half's smallest number
  const Ints denormal = reinterpret_cast<Ints>(reinterpret_cast<Floats>(bits) + magic) -
                        reinterpret_cast<Ints>(magic);
  Ints half = bits < ((127 - 14) << 23) ? denormal : normal;
  half = bits >= ((127 + 16) << 23) ? Ints{} + 0x7C00 : half;
  half = bits > 0x7F800000 ? Ints{} + 0x7E00 : half;
  return half | ((all >> 16) & 0x8000);
}

TFMEM_INLINE Floats Bfloat16ToFloat(Ints value) { return reinterpret_cast<Floats>(value << 16); }

TFMEM_WRAPS TFMEM_INLINE Ints FloatToBfloat16(Floats value) {
  const Ints bits = reinterpret_cast<Ints>(value);
  const Ints rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (value != value ? Ints{} + 0x7FC0 : rounded) & 0xFFFF;
}

template <Floats (*convert)(Ints)>
void Widen(const uint16_t* source, float* target, int64_t count) {
  constexpr int lanes = kLanes<float>;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Shorts loaded = LoadLanes<Shorts>(source + i);
    Store<float>(convert(__builtin_convertvector(loaded, Ints)), target + i);
  }
  if (i == count) return;
  Shorts last{};
  std::memcpy(&last, source + i, (count - i) * sizeof(uint16_t));
  const Floats converted = convert(__builtin_convertvector(last, Ints));
  std::memcpy(target + i, &converted, (count - i) * sizeof(float));
}

template <Ints (*convert)(Floats)>
void Narrow(const float* source, uint16_t* target, int64_t count) {
  constexpr int lanes = kLanes<float>;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    StoreLanes<Shorts>(__builtin_convertvector(convert(Load(source + i)), Shorts), target + i);
  }
  if (i == count) return;
  Floats last{};
  std::memcpy(&last, source + i, (count - i) * sizeof(float));
  const Shorts converted = __builtin_convertvector(convert(last), Shorts);
  std::memcpy(target + i, &converted, (count - i) * sizeof(uint16_t));
}

#include "custom_ops/ops/cpu/tile_kernels_body.h"

template <typename Real>
CpuKernels<Real> KernelsFor() {
  return {kVectors * kLanes<Real>,
          Multiply<Real>,
          MultiplyTransposed<Real>,
          MultiplyStrided<Real>,
          Compute<Real>,
          Sum<Real>,
          Adam<Real>,
          Transpose<Real>};
}

InstructionSet Kernels(const char* name) {
  return {name,
          KernelsFor<float>(),
          KernelsFor<double>(),
          Widen<HalfToFloat>,
          Narrow<FloatToHalf>,
          Widen<Bfloat16ToFloat>,
          Narrow<FloatToBfloat16>,
          KernelsOfTiles()};
}

#undef TFMEM_INLINE
#undef TFMEM_WRAPS
