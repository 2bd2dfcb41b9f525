// The text of tile_kernels.h's loops, included behind cpu_kernels_body.h, under the same pragmas
// and rules.

// The type's storage, as a value of it: a function takes it by `auto`.
#define TFMEM_FOR_STORAGE(dtype, call) \
  switch (StorageOf(dtype)) {          \
    case DType::kFloat64:              \
      return call(double());           \
    case DType::kInt32:                \
      return call(int32_t());          \
    case DType::kInt64:                \
      return call(int64_t());          \
    case DType::kBool:                 \
      return call(uint8_t());          \
    default:                           \
      return call(float());            \
  }

// ---- elementwise ----

template <typename Number>
TFMEM_INLINE Vector<Number> AbsoluteInteger(Vector<Number> x) {
  using Unsigned = Vector<std::make_unsigned_t<Number>>;
  return x < Vector<Number>{} ? reinterpret_cast<Vector<Number>>(-reinterpret_cast<Unsigned>(x))
                              : x;
}
TFMEM_INLINE Vector<int32_t> Absolute(Vector<int32_t> x) { return AbsoluteInteger<int32_t>(x); }
TFMEM_INLINE Vector<int64_t> Absolute(Vector<int64_t> x) { return AbsoluteInteger<int64_t>(x); }

#define TFMEM_NOTHING(op, arguments, kinds, expression)

#define TFMEM_EXACT(op, arguments, kinds, expression)                                 \
  case Elementwise::op:                                                               \
    if constexpr (((kinds) & kind) != 0) {                                            \
      for (int64_t i = 0; i < count; i += lanes) {                                    \
        const Type a = Load(first.At(i));                                             \
        [[maybe_unused]] const Type b = Load((arguments > 1 ? second : first).At(i)); \
        [[maybe_unused]] const Type c = Load((arguments > 2 ? third : first).At(i));  \
        Store<Number>(expression, target + i);                                        \
      }                                                                               \
    }                                                                                 \
    break;

// Ops whose result has their arguments' type, of integers or booleans, which wrap as
// TensorFlow's do.
template <typename Number>
TFMEM_WRAPS void ComputeExact(Elementwise op, Number* target, Argument<Number> first,
                              Argument<Number> second, Argument<Number> third, int64_t count) {
  using Type = Vector<Number>;
  using Real [[maybe_unused]] = Number;
  constexpr int kind = sizeof(Number) == 1 ? kBools : kIntegers;
  constexpr int lanes = kLanes<Number>;
  const Type zero{};
  const Type one = zero + Number(1);
  switch (op) {
    TFMEM_ELEMENTWISE_KERNELS(TFMEM_EXACT, TFMEM_NOTHING, TFMEM_NOTHING) default : break;
  }
}

#define TFMEM_COMPARE(op, arguments, kinds, expression)                                \
  case Elementwise::op:                                                                \
    for (int64_t i = 0; i < count; i += lanes) {                                       \
      const Type a = Load(first.At(i));                                                \
      const Type b = Load(second.At(i));                                               \
      StoreLanes<Bytes>(__builtin_convertvector((expression), Bytes) & 1, target + i); \
    }                                                                                  \
    break;

template <typename Number>
void Compare(Elementwise op, uint8_t* target, Argument<Number> first, Argument<Number> second,
             int64_t count) {
  constexpr int lanes = kLanes<Number>;
  using Type = Vector<Number>;
  using Bytes = Lanes<uint8_t, lanes>;
  switch (op) {
    TFMEM_ELEMENTWISE_KERNELS(TFMEM_NOTHING, TFMEM_COMPARE, TFMEM_NOTHING)
    default:
      break;
  }
}

#undef TFMEM_EXACT
#undef TFMEM_COMPARE
#undef TFMEM_NOTHING

// Bits of numbers, by booleans.
template <typename Number>
void SelectBits(Number* target, Argument<uint8_t> condition, Argument<Number> first,
                Argument<Number> second, int64_t count) {
  constexpr int lanes = kLanes<Number>;
  using Type = Vector<Number>;
  using Bytes = Lanes<uint8_t, lanes>;
  for (int64_t i = 0; i < count; i += lanes) {
    const Type mask = __builtin_convertvector(LoadLanes<Bytes>(condition.At(i)), Type) != 0;
    const Type a = Load(first.At(i)), b = Load(second.At(i));
    Store<Number>((a & mask) | (b & ~mask), target + i);
  }
}

template <typename Number>
void Exactly(Elementwise op, void* target, const void* a, const void* b, const void* c,
             int64_t count, int splats) {
  const auto loop = [op](Number* to, Argument<Number> first, Argument<Number> second,
                         Argument<Number> third, int64_t numbers) {
    ComputeExact<Number>(op, to, first, second, third, numbers);
  };
  OverVectors<kLanes<Number>>(loop, static_cast<Number*>(target), count,
                              Argument<Number>(a, 0, splats), Argument<Number>(b, 1, splats),
                              Argument<Number>(c, 2, splats));
}

template <typename Number>
void CompareAll(Elementwise op, void* target, const void* a, const void* b, int64_t count,
                int splats) {
  const auto loop = [op](uint8_t* to, Argument<Number> first, Argument<Number> second,
                         int64_t numbers) { Compare<Number>(op, to, first, second, numbers); };
  OverVectors<kLanes<Number>>(loop, static_cast<uint8_t*>(target), count,
                              Argument<Number>(a, 0, splats), Argument<Number>(b, 1, splats));
}

template <typename Number>
void Select(void* target, const void* condition, const void* a, const void* b, int64_t count,
            int splats) {
  OverVectors<kLanes<Number>>(SelectBits<Number>, static_cast<Number*>(target), count,
                              Argument<uint8_t>(condition, 0, splats),
                              Argument<Number>(a, 1, splats), Argument<Number>(b, 2, splats));
}

void TileCompute(Elementwise op, DType type, DType from, void* target, const void* a, const void* b,
                 const void* c, int64_t count, int splats) {
  if (op == Elementwise::kSelect) {
    const int bytes = TileBytes(type);
    if (bytes == 1) return Select<int8_t>(target, a, b, c, count, splats);
    if (bytes == 4) return Select<int32_t>(target, a, b, c, count, splats);
    return Select<int64_t>(target, a, b, c, count, splats);
  }
  if (type != from) {
    const auto compare = [&](auto of) {
      CompareAll<decltype(of)>(op, target, a, b, count, splats);
    };
    TFMEM_FOR_STORAGE(from, compare)
  }
  if (type == DType::kInt32) return Exactly<int32_t>(op, target, a, b, c, count, splats);
  if (type == DType::kInt64) return Exactly<int64_t>(op, target, a, b, c, count, splats);
  if (type == DType::kBool) return Exactly<uint8_t>(op, target, a, b, c, count, splats);
}

// ---- casts ----

template <typename From, typename To>
constexpr int kLongerLanes =
    TFMEM_VECTOR_BYTES / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

template <typename From, typename To, bool to_bool>
void ConvertVectors(To* target, Argument<From> source, int64_t count) {
  constexpr int lanes = kLongerLanes<From, To>;
  using Source = Lanes<From, lanes>;
  using Target = Lanes<To, lanes>;
  for (int64_t i = 0; i < count; i += lanes) {
    const Source loaded = LoadLanes<Source>(source.At(i));
    if constexpr (to_bool) {
      StoreLanes<Target>(__builtin_convertvector(loaded != Source{}, Target) & 1, target + i);
    } else {
      StoreLanes<Target>(__builtin_convertvector(loaded, Target), target + i);
    }
  }
}

template <typename From, typename To, bool to_bool>
void Convert(const void* from, void* to, int64_t count) {
  OverVectors<kLongerLanes<From, To>>(ConvertVectors<From, To, to_bool>, static_cast<To*>(to),
                                      count, Argument<From>(from, 0, 0));
}

template <Ints (*narrow)(Floats), Floats (*widen)(Ints)>
void RoundVectors(float* target, Argument<float> source, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    Store<float>(widen(narrow(Load(source.At(i)))), target + i);
  }
}

template <Ints (*narrow)(Floats), Floats (*widen)(Ints)>
void RoundTo(float* floats, int64_t count) {
  OverVectors<kLanes<float>>(RoundVectors<narrow, widen>, floats, count,
                             Argument<float>(floats, 0, 0));
}

template <typename From>
void CastFrom(DType to, const void* source, void* target, int64_t count) {
  if (to == DType::kBool) return Convert<From, uint8_t, true>(source, target, count);
  if (to == DType::kInt32) return Convert<From, int32_t, false>(source, target, count);
  if (to == DType::kInt64) return Convert<From, int64_t, false>(source, target, count);
  if (to == DType::kFloat64) return Convert<From, double, false>(source, target, count);
  Convert<From, float, false>(source, target, count);
  float* floats = static_cast<float*>(target);
  if (to == DType::kFloat16) RoundTo<FloatToHalf, HalfToFloat>(floats, count);
  if (to == DType::kBfloat16) RoundTo<FloatToBfloat16, Bfloat16ToFloat>(floats, count);
}

void TileCast(DType from, DType to, const void* source, void* target, int64_t count) {
  const auto cast = [&](auto of) { CastFrom<decltype(of)>(to, source, target, count); };
  TFMEM_FOR_STORAGE(from, cast)
}

// ---- reductions ----

template <typename Number, Reduction reduction>
struct Combine {
  template <typename Value>  // a vector or a number
  static TFMEM_INLINE Value Of(Value a, Value b) {
    if constexpr (reduction == Reduction::kSum) return a + b;
    if constexpr (reduction == Reduction::kProduct) return a * b;
    if constexpr (reduction == Reduction::kAny) return a | b;
    if constexpr (reduction == Reduction::kAll) return a & b;
    // A NaN on either side is kept.
    if constexpr (reduction == Reduction::kMax) return ((a > b) | (a != a)) ? a : b;
    if constexpr (reduction == Reduction::kMin) return ((a < b) | (a != a)) ? a : b;
  }

  static Number Identity() {
    constexpr bool integer = std::is_integral_v<Number>;
    constexpr bool most = reduction == Reduction::kMin;
    if constexpr (most || reduction == Reduction::kMax) {
      if constexpr (integer) {
        constexpr Number largest =
            static_cast<Number>(~std::make_unsigned_t<Number>(0) >> (sizeof(Number) > 1));
        return most ? largest : static_cast<Number>(~largest);
      } else {
        return most ? Number(__builtin_inf()) : Number(-__builtin_inf());
      }
    }
    return reduction == Reduction::kProduct || reduction == Reduction::kAll ? 1 : 0;
  }
};

// Sums and products of integers wrap: they are those of unsigned numbers.
template <typename Number, Reduction reduction>
using Arithmetic =
    std::conditional_t<std::is_integral_v<Number> &&
                           (reduction == Reduction::kSum || reduction == Reduction::kProduct),
                       std::make_unsigned<Number>, std::enable_if<true, Number>>;

// Four vectors at a time; then their lanes in order, then what is left over.
template <typename Number, Reduction reduction>
Number ReduceRow(const Number* values, int64_t count) {
  using Type = Vector<Number>;
  using Rule = Combine<Number, reduction>;
  constexpr int lanes = kLanes<Number>;
  Number result = Rule::Identity();
  int64_t i = 0;
  if (count >= lanes) {
    Type partial[4];
    for (Type& one : partial) one = Type{} + Rule::Identity();
    for (; i + 4 * lanes <= count; i += 4 * lanes) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        partial[j] = Rule::Of(partial[j], Load(values + i + j * lanes));
      }
    }
    for (; i + lanes <= count; i += lanes) {
      partial[0] = Rule::Of(partial[0], Load(values + i));
    }
    const Type all = Rule::Of(Rule::Of(partial[0], partial[1]), Rule::Of(partial[2], partial[3]));
    for (int lane = 0; lane < lanes; ++lane) result = Rule::Of(result, Number(all[lane]));
  }
  for (; i < count; ++i) result = Rule::Of(result, values[i]);
  return result;
}

template <typename Number, Reduction reduction>
struct OverColumns {
  static void Run(const void* from, int64_t rows, int64_t columns, void* to) {
    using Type = typename Arithmetic<Number, reduction>::type;
    const Type* values = static_cast<const Type*>(from);
    for (int64_t row = 0; row < rows; ++row) {
      static_cast<Type*>(to)[row] = ReduceRow<Type, reduction>(values + row * columns, columns);
    }
  }
};

template <typename Number, Reduction reduction>
struct OverRows {
  static void Run(const void* from, int64_t rows, int64_t columns, void* to, bool begin) {
    using Element = typename Arithmetic<Number, reduction>::type;
    using Type = Vector<Element>;
    using Rule = Combine<Element, reduction>;
    const Element* source = static_cast<const Element*>(from);
    Element* totals = static_cast<Element*>(to);
    for (int64_t row = 0; row < rows; ++row, source += columns, begin = false) {
      int64_t i = 0;
      for (; i + kLanes<Element> <= columns; i += kLanes<Element>) {
        const Type total = begin ? Type{} + Rule::Identity() : Load(totals + i);
        Store<Element>(Rule::Of(total, Load(source + i)), totals + i);
      }
      for (; i < columns; ++i) {
        totals[i] = Rule::Of(begin ? Rule::Identity() : totals[i], source[i]);
      }
    }
  }
};

// `Reduce` with the type's storage and the reduction, of those that there are for it.
template <template <typename, Reduction> class Reduce, typename... Arguments>
void ForReduction(Reduction reduction, DType type, Arguments... arguments) {
  const auto numbers = [&](auto of) {
    using Number = decltype(of);
    if constexpr (sizeof(Number) == 1) {
      reduction == Reduction::kAny ? Reduce<Number, Reduction::kAny>::Run(arguments...)
                                   : Reduce<Number, Reduction::kAll>::Run(arguments...);
    } else {
      if (reduction == Reduction::kMax) return Reduce<Number, Reduction::kMax>::Run(arguments...);
      if (reduction == Reduction::kMin) return Reduce<Number, Reduction::kMin>::Run(arguments...);
      if (reduction == Reduction::kProduct) {
        return Reduce<Number, Reduction::kProduct>::Run(arguments...);
      }
      Reduce<Number, Reduction::kSum>::Run(arguments...);
    }
  };
  TFMEM_FOR_STORAGE(type, numbers)
}

void TileReduceColumns(Reduction reduction, DType type, const void* values, int64_t rows,
                       int64_t columns, void* target) {
  ForReduction<OverColumns>(reduction, type, values, rows, columns, target);
}

void TileReduceRows(Reduction reduction, DType type, const void* values, int64_t rows,
                    int64_t columns, void* totals, bool begin) {
  ForReduction<OverRows>(reduction, type, values, rows, columns, totals, begin);
}

template <typename Number>
void DivideBy(void* sums, Number numbers, int64_t count) {
  Number* values = static_cast<Number*>(sums);
  for (int64_t i = 0; i < count; ++i) values[i] /= numbers;
}

void TileDivide(DType type, void* sums, int64_t numbers, int64_t count) {
  if (type == DType::kFloat64) return DivideBy<double>(sums, numbers, count);
  DivideBy<float>(sums, numbers, count);
}

#include "custom_ops/ops/cpu/tile_random_body.h"

TileKernels KernelsOfTiles() {
  return {TileCompute, TileCast, TileReduceColumns, TileReduceRows, TileDraw, TileDivide};
}

#undef TFMEM_FOR_STORAGE
