// Images as the fake cuDNN has them: how they lie in memory, and numbers of their types.
#pragma once

#include <cstdint>
#include <vector>

#include "fake_numbers.h"

inline constexpr int kBadParameter = 2000, kUnsupported = 3000, kAllocationFailed = 4004;
inline constexpr int kFloat = 0, kHalf = 2, kBfloat16 = 9;

struct Tensor {
  int type = -1;
  int sizes[4] = {};    // n, c, h, w
  int strides[4] = {};  // of them
};
inline bool LastIn(const Tensor& x) { return x.strides[1] == 1; }

inline bool Packed(const Tensor& x) {
  const int *s = x.sizes, c = s[1], h = s[2], w = s[3];
  const int first[4] = {c * h * w, h * w, w, 1}, last[4] = {h * w * c, 1, w * c, c};
  const auto same = [&](const int* strides) {
    for (int i = 0; i < 4; ++i) {
      if (s[i] > 1 && x.strides[i] != strides[i]) return false;
    }
    return true;
  };
  return same(first) || same(last);
}

inline int64_t Numbers(const Tensor& x) {
  return int64_t{x.sizes[0]} * x.sizes[1] * x.sizes[2] * x.sizes[3];
}

template <typename T>
void Store(const std::vector<double>& sums, void* to) {
  for (size_t i = 0; i < sums.size(); ++i) static_cast<T*>(to)[i] = sums[i];
}

template <typename Run>
void OfType(int type, const Run& run) {
  if (type == kFloat) return run(float());
  if (type == kHalf) return run(_Float16());
  run(Bfloat16());
}
