// The text of cpu_kernels.h's loops, included once for each instruction set, inside a namespace and
// between pragmas that choose it. Before that, the includer defines
//   TFMEM_VECTOR_BYTES  16, 32 or 64
//   TFMEM_ROWS          rows of a register block: 4 * TFMEM_ROWS accumulators fit the registers
// and includes <cmath>, <immintrin.h> (on x86), <cstring>, <type_traits> and cpu_kernels.h: nothing
// of the standard library may be compiled under the pragmas, or the linker may hand AVX code to
// everybody.

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

// Of a whole vector.
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

// ---- products ----

constexpr int64_t kDepth = 256;  // longer sums are sums of sums, which lose fewer digits

template <typename Real, int rows>
void MultiplyRows(const Real* operand, int64_t operand_stride, const Real* weights,
                  int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
                  bool accumulate) {
  constexpr int lanes = kLanes<Real>;
  Vector<Real> sums[rows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sums[row][i] = Vector<Real>{};
  }
  for (int64_t k = 0; k < depth; ++k, weights += weights_stride) {
    Vector<Real> loaded[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) loaded[i] = Load(weights + i * lanes);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const Real factor = operand[row * operand_stride + k];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums[row][i] += loaded[i] * factor;
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      Real* place = target + row * target_stride + i * lanes;
      Store(accumulate ? Load(place) + sums[row][i] : sums[row][i], place);
    }
  }
}

template <typename Real, int most>
TFMEM_INLINE void MultiplyBlock(int64_t rows, const Real* operand, int64_t operand_stride,
                                const Real* weights, int64_t weights_stride, int64_t depth,
                                Real* target, int64_t target_stride, bool accumulate) {
  if (rows == most) {
    MultiplyRows<Real, most>(operand, operand_stride, weights, weights_stride, depth, target,
                             target_stride, accumulate);
  } else if constexpr (most > 1) {
    MultiplyBlock<Real, most - 1>(rows, operand, operand_stride, weights, weights_stride, depth,
                                  target, target_stride, accumulate);
  }
}

template <typename Real>
void Multiply(const Real* operand, int64_t operand_stride, int64_t rows, const Real* weights,
              int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
              bool accumulate) {
  for (int64_t blocks = (rows + TFMEM_ROWS - 1) / TFMEM_ROWS; blocks > 0; --blocks) {
    const int64_t block = (rows + blocks - 1) / blocks;  // of equal height: 20 = 5 + 5 + 5 + 5
    for (int64_t k = 0; k < depth; k += kDepth) {
      MultiplyBlock<Real, TFMEM_ROWS>(
          block, operand + k, operand_stride, weights + k * weights_stride, weights_stride,
          depth - k < kDepth ? depth - k : kDepth, target, target_stride, accumulate || k > 0);
    }
    rows -= block;
    operand += block * operand_stride;
    target += block * target_stride;
  }
}

template <typename Real, int lanes>
TFMEM_INLINE Real SumOfLanes(Lanes<Real, lanes> vector) {
  if constexpr (lanes == 1) {
    return vector[0];
  } else {
    Lanes<Real, lanes / 2> halves[2];
    std::memcpy(halves, &vector, sizeof(halves));
    return SumOfLanes<Real, lanes / 2>(halves[0] + halves[1]);
  }
}

// The same of each of four vectors, added in the same order.
template <typename Real, int lanes>
TFMEM_INLINE void SumsOfLanes(const Lanes<Real, lanes>* vectors, Real* sums) {
  if constexpr (lanes > 4) {
    Lanes<Real, lanes / 2> folded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Lanes<Real, lanes / 2> halves[2];
      std::memcpy(halves, &vectors[i], sizeof(halves));
      folded[i] = halves[0] + halves[1];
    }
    SumsOfLanes<Real, lanes / 2>(folded, sums);
  } else if constexpr (lanes == 4) {
    using Four = Lanes<Real, 4>;
    const Four low01 = __builtin_shufflevector(vectors[0], vectors[1], 0, 4, 1, 5);
    const Four high01 = __builtin_shufflevector(vectors[0], vectors[1], 2, 6, 3, 7);
    const Four low23 = __builtin_shufflevector(vectors[2], vectors[3], 0, 4, 1, 5);
    const Four high23 = __builtin_shufflevector(vectors[2], vectors[3], 2, 6, 3, 7);
    const Four of01 = low01 + high01, of23 = low23 + high23;  // lanes 0 + 2 of each, 1 + 3 of each
    const Four first = __builtin_shufflevector(of01, of23, 0, 1, 4, 5);
    const Four second = __builtin_shufflevector(of01, of23, 2, 3, 6, 7);
    StoreLanes<Four>(first + second, sums);
  } else {
    for (int i = 0; i < 4; ++i) sums[i] = SumOfLanes<Real, lanes>(vectors[i]);
  }
}

// A block of dot products: `columns` rows of the weights with `rows` of the operand.
template <typename Real, int rows, int columns>
void DotBlock(const Real* operand, int64_t operand_stride, const Real* weights,
              int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
              bool accumulate) {
  constexpr int lanes = kLanes<Real>;
  Vector<Real> sums[rows][columns];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) sums[row][i] = Vector<Real>{};
  }
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
    Vector<Real> loaded[columns];
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) loaded[i] = Load(weights + i * weights_stride + k);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) {
      const Vector<Real> factor = Load(operand + row * operand_stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < columns; ++i) sums[row][i] += loaded[i] * factor;
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) {
    Real found[columns];
    if constexpr (columns % 4 == 0) {
#pragma GCC unroll 4
      for (int i = 0; i < columns; i += 4) {
        SumsOfLanes<Real, lanes>(sums[row] + i, found + i);
      }
    } else {
      for (int i = 0; i < columns; ++i) found[i] = SumOfLanes<Real, lanes>(sums[row][i]);
    }
    Real* place = target + row * target_stride;
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) {
      for (int64_t rest = k; rest < depth; ++rest) {
        found[i] += operand[row * operand_stride + rest] * weights[i * weights_stride + rest];
      }
      place[i] = accumulate ? place[i] + found[i] : found[i];
    }
  }
}

constexpr int kDotRows = TFMEM_VECTOR_BYTES == 64 ? 4 : 2;

template <typename Real>
void MultiplyTransposed(const Real* operand, int64_t operand_stride, int64_t rows,
                        const Real* weights, int64_t weights_stride, int64_t columns, int64_t depth,
                        Real* target, int64_t target_stride, bool accumulate) {
  int64_t column = 0;
  const auto block = [&](auto width) {
    constexpr int kColumns = decltype(width)::value;
    const Real* begin = weights + column * weights_stride;
    int64_t row = 0;
    for (; row + kDotRows <= rows; row += kDotRows) {
      DotBlock<Real, kDotRows, kColumns>(
          operand + row * operand_stride, operand_stride, begin, weights_stride, depth,
          target + row * target_stride + column, target_stride, accumulate);
    }
    if (row + 2 <= rows) {
      DotBlock<Real, 2, kColumns>(operand + row * operand_stride, operand_stride, begin,
                                  weights_stride, depth, target + row * target_stride + column,
                                  target_stride, accumulate);
      row += 2;
    }
    if (row < rows) {
      DotBlock<Real, 1, kColumns>(operand + row * operand_stride, operand_stride, begin,
                                  weights_stride, depth, target + row * target_stride + column,
                                  target_stride, accumulate);
    }
    column += kColumns;
  };
  if (rows == 1) {  // whose sums alone would wait for each other
    while (column + 8 <= columns) block(std::integral_constant<int, 8>());
  }
  while (column + 4 <= columns) block(std::integral_constant<int, 4>());
  while (column < columns) block(std::integral_constant<int, 1>());
}

// ---- elementwise ----

// e^x within 1.5 ulp: Cephes' expf, its scale split in two so that denormals come out right.
TFMEM_INLINE Floats Exp(Floats x) {
  x = x > 89.0f ? Fill(89.0f) : x;  // NaN stays
  x = x < -104.0f ? Fill(-104.0f) : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
  const Floats shifted = x * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const Ints exponent = reinterpret_cast<Ints>(shifted) - 0x4B400000;
  const Ints half = exponent >> 1;
  const Floats first = reinterpret_cast<Floats>((half + 127) << 23);
  const Floats second = reinterpret_cast<Floats>((exponent - half + 127) << 23);
  return (p * first) * second;
}

TFMEM_INLINE Floats Absolute(Floats x) {
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7FFFFFFF);
}

TFMEM_INLINE Floats Sigmoid(Floats x) {
  const Floats e = Exp(-Absolute(x));  // never overflows; of a NaN a NaN
  const Floats inverse = 1.0f / (1.0f + e);
  return x < 0.0f ? e * inverse : inverse;
}

// Cephes' tanhf.
TFMEM_INLINE Floats Tanh(Floats x) {
  const Floats magnitude = Absolute(x);
  const Floats z = x * x;
  Floats p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Floats small = (p * z) * x + x;
  const Floats large = 1.0f - 2.0f / (Exp(magnitude + magnitude) + 1.0f);
  const Ints sign = reinterpret_cast<Ints>(x) & INT32_MIN;
  const Floats signed_large = reinterpret_cast<Floats>(reinterpret_cast<Ints>(large) | sign);
  return magnitude < 0.625f ? small : signed_large;
}

// ln x within 2 ulp: Cephes' logf. Of a denormal as of 0 where the thread takes it for 0, as
// TensorFlow's do: comparisons follow that.
TFMEM_INLINE Floats Log(Floats x) {
  const Floats normal = x < 1.17549435e-38f ? x * 16777216.0f : x;  // 2^24
  const Ints bits = reinterpret_cast<Ints>(normal);
  const Floats mantissa =
      reinterpret_cast<Floats>((bits & 0x007FFFFF) | 0x3F000000);  // from 1/2 on
  const Floats raised = __builtin_convertvector((bits >> 23) - 126, Floats);
  const Floats exponent = x < 1.17549435e-38f ? raised - 24.0f : raised;
  const auto is_small = mantissa < 0.707106781186547524f;
  const Floats n = is_small ? exponent - 1.0f : exponent;
  const Floats m = (is_small ? mantissa + mantissa : mantissa) - 1.0f;
  const Floats z = m * m;
  Floats p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Floats low = (p * m) * z + n * -2.12194440e-4f - z * 0.5f;
  const Floats finite = (m + low) + n * 0.693359375f;
  const Floats nan = Fill(__builtin_nanf("")), infinity = Fill(__builtin_inff());
  const Floats of_positive = x < infinity ? finite : x;  // NaN, too
  const Floats of_negative = x < 0.0f ? nan : of_positive;
  return x == 0.0f ? -infinity : of_negative;
}

// The instructions, which round correctly; std::sqrt is a call for each number.
TFMEM_INLINE Floats Sqrt(Floats x) {
#if defined(__x86_64__) && TFMEM_VECTOR_BYTES == 64
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__x86_64__) && TFMEM_VECTOR_BYTES == 32
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#else
  Floats result;
  for (int i = 0; i < kLanes<float>; ++i) result[i] = std::sqrt(x[i]);
  return result;
#endif
}

template <typename Function>
TFMEM_INLINE Vector<double> EachLane(Vector<double> x, Function function) {
  Vector<double> result;
  for (int i = 0; i < kLanes<double>; ++i) result[i] = function(x[i]);
  return result;
}
TFMEM_INLINE Vector<double> Absolute(Vector<double> x) {
  return reinterpret_cast<Vector<double>>(reinterpret_cast<Vector<int64_t>>(x) & INT64_MAX);
}
TFMEM_INLINE Vector<double> Exp(Vector<double> x) {
  return EachLane(x, static_cast<double (*)(double)>(std::exp));
}
TFMEM_INLINE Vector<double> Log(Vector<double> x) {
  return EachLane(x == 0.0 ? x * 0.0 : x, static_cast<double (*)(double)>(std::log));
}
TFMEM_INLINE Vector<double> Sqrt(Vector<double> x) {
  return EachLane(x, static_cast<double (*)(double)>(std::sqrt));
}
TFMEM_INLINE Vector<double> Tanh(Vector<double> x) {
  return EachLane(x, static_cast<double (*)(double)>(std::tanh));
}
TFMEM_INLINE Vector<double> Sigmoid(Vector<double> x) {
  const Vector<double> e = Exp(-Absolute(x));
  const Vector<double> inverse = 1.0 / (1.0 + e);
  return x < 0.0 ? e * inverse : inverse;
}

template <typename Real>
Real Softplus(Real x) {
  return x == x ? std::fmax(x, Real(0)) + std::log1p(std::exp(-std::fabs(x))) : x;
}

// Zero for a denormal where the thread takes those for zeros, as TensorFlow's do: arithmetic
// follows that, and the standard library does not.
template <typename Real>
Real Flushed(Real x) {
  return x == 0 ? std::copysign(Real(0), x) : x;
}

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

// Of a square of vectors the squares of half its size beside the diagonal are exchanged, then in
// each quarter those of a quarter, and so on.
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

// The four conversions, a vector at a time; the rest of a row goes through a vector of its own.
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
  return {kVectors * kLanes<Real>, Multiply<Real>, MultiplyTransposed<Real>,
          Compute<Real>,           Sum<Real>,      Adam<Real>,
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
