// Functions of vectors of numbers, included by cpu_kernels_body.h, under the same pragmas and
// rules.

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
  const Floats either = magnitude < 0.625f ? small : large;
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(either) | sign);  // of -0 it is -0
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
  return (Floats)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)x);
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

// The rest of `x / y` rounded down.
template <typename Real>
Real FloorMod(Real x, Real y) {
  const Real rest = std::fmod(x, y);
  return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
