// The text of tile_kernels.h's random numbers, a part of tile_kernels_body.h, under the same
// pragmas and rules.

using Longs = Vector<uint64_t>;

// The products of the lower halves of 64 bits.
TFMEM_INLINE Longs Product(Longs a, Longs b) {
#if defined(__x86_64__) && TFMEM_VECTOR_BYTES == 64
  return (Longs)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);
#elif defined(__x86_64__) && TFMEM_VECTOR_BYTES == 32
  return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// What a generator gives for the state's counter plus each of `groups`: four words each, two of
// them in 64 bits. Of words only the lower halves count until then.
TFMEM_INLINE void Philox(const RandomState& state, Longs groups, Longs* first, Longs* last) {
  const Longs low = groups + state.low;
  const Longs high = state.high - (Longs)(low < state.low);  // less a mask of ones, which is 1 more
  Longs a = low, b = low >> 32, c = high, d = high >> 32;
  Longs key0 = Fill(state.key), key1 = Fill(state.key >> 32);
  const Longs factor0 = Fill(uint64_t{0xD2511F53u}), factor1 = Fill(uint64_t{0xCD9E8D57u});
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Longs one = Product(a, factor0), other = Product(c, factor1);
    a = other >> 32 ^ b ^ key0;
    c = one >> 32 ^ d ^ key1;
    b = other;
    d = one;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  *first = (a & 0xffffffffu) | b << 32;
  *last = (c & 0xffffffffu) | d << 32;
}

// The numbers that tiles hold, of words; of two for types of 8 bytes. As TensorFlow makes them
// (random_distributions.h): random bits of the mantissa, and 1 subtracted.
TFMEM_INLINE void FromWords(DType type, const uint64_t* words, int64_t count, float* numbers) {
  const uint32_t mask = type == DType::kFloat16    ? 0x3ffu
                        : type == DType::kBfloat16 ? 0x7fu
                                                   : 0x7fffffu;
  const int shift = type == DType::kFloat16 ? 13 : type == DType::kBfloat16 ? 16 : 0;
  using Words = Vector<uint32_t>;
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    const Words bits = Load(reinterpret_cast<const uint32_t*>(words) + i);
    Store<float>((Floats)((bits & mask) << shift | 0x3f800000u) - 1.0f, numbers + i);
  }
}
TFMEM_INLINE void FromWords(DType, const uint64_t* words, int64_t count, double* numbers) {
  for (int64_t i = 0; i < count; i += kLanes<double>) {
    const Longs pairs = Load(words + i);  // the first word has the mantissa's upper bits
    const Longs bits = (pairs & 0xfffffu) << 32 | pairs >> 32 | uint64_t{1023} << 52;
    Store<double>((Vector<double>)bits - 1.0, numbers + i);
  }
}
template <typename Integer>
TFMEM_INLINE void FromWords(DType, const uint64_t* words, int64_t count, Integer* numbers) {
  __builtin_memcpy(numbers, words, count * sizeof(Integer));
}

// The numbers of a vector of groups, those of the first one from `skip` on; gives how many.
template <typename Number>
int64_t DrawGroups(const RandomState& state, DType type, uint64_t group, int64_t skip,
                   int64_t count, Number* target) {
  constexpr int kCounters = kLanes<uint64_t>, kNumbers = kCounters * 16 / sizeof(Number);
  uint64_t groups[kCounters], first[kCounters], last[kCounters], words[2 * kCounters];
  for (int i = 0; i < kCounters; ++i) groups[i] = group + i;
  Longs one, other;
  Philox(state, Load(groups), &one, &other);
  Store<uint64_t>(one, first);
  Store<uint64_t>(other, last);
  for (int i = 0; i < kCounters; ++i) words[2 * i] = first[i], words[2 * i + 1] = last[i];
  if (skip == 0 && count >= kNumbers) {
    FromWords(type, words, kNumbers, target);
    return kNumbers;
  }
  Number numbers[kNumbers];
  FromWords(type, words, kNumbers, numbers);
  const int64_t drawn = kNumbers - skip < count ? kNumbers - skip : count;
  for (int64_t i = 0; i < drawn; ++i) target[i] = numbers[skip + i];
  return drawn;
}

template <typename Number>
void DrawNumbers(const RandomState& state, DType type, int64_t first, int64_t count,
                 Number* target) {
  constexpr int kNumbers = 16 / sizeof(Number);  // of a group
  while (count > 0) {
    const int64_t drawn =
        DrawGroups<Number>(state, type, first / kNumbers, first % kNumbers, count, target);
    first += drawn, count -= drawn, target += drawn;
  }
}

void TileDraw(const RandomState& state, DType type, int64_t first, int64_t count, void* target) {
  const auto draw = [&](auto of) {
    using Number = decltype(of);
    if constexpr (sizeof(Number) > 1) {
      DrawNumbers<Number>(state, type, first, count, static_cast<Number*>(target));
    }
  };
  TFMEM_FOR_STORAGE(type, draw)
}
