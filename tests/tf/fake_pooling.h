// Pooling as the fake cuDNN computes it: plain loops, as strict as cuDNN about layouts and sizes.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fake_images.h"

inline constexpr int kAverageOfImage = 2, kDeterministicMax = 3;

struct Pooling {
  int mode = -1, nan = 0;
  int window[2] = {}, pad[2] = {}, stride[2] = {};
};
// A window may end behind the image, as cuDNN allows; it is not empty.
inline int Check(const Pooling& pooling, const Tensor& x, const Tensor& y) {
  if ((pooling.mode != kDeterministicMax && pooling.mode != kAverageOfImage) || x.type != y.type) {
    return kBadParameter;
  }
  if (!Packed(x) || !Packed(y)) return kUnsupported;
  for (int i = 0; i < 2; ++i) {
    const int last = (y.sizes[2 + i] - 1) * pooling.stride[i] - pooling.pad[i];
    if (x.sizes[i] != y.sizes[i] || last >= x.sizes[2 + i]) return kBadParameter;
    if (pooling.pad[i] >= pooling.window[i]) return kBadParameter;
  }
  return 0;
}

// Calls `visit` with the place of each number of y, and the places of its window in x.
inline void VisitWindows(const Pooling& pooling, const Tensor& x, const Tensor& y,
                         const std::function<void(int64_t, const std::vector<int64_t>&)>& visit) {
  for (int n = 0; n < y.sizes[0]; ++n)
    for (int c = 0; c < y.sizes[1]; ++c)
      for (int p = 0; p < y.sizes[2]; ++p)
        for (int q = 0; q < y.sizes[3]; ++q) {
          std::vector<int64_t> window;
          for (int r = 0; r < pooling.window[0]; ++r)
            for (int s = 0; s < pooling.window[1]; ++s) {
              const int h = p * pooling.stride[0] + r - pooling.pad[0];
              const int w = q * pooling.stride[1] + s - pooling.pad[1];
              if (h < 0 || w < 0 || h >= x.sizes[2] || w >= x.sizes[3]) continue;
              window.push_back(int64_t{n} * x.strides[0] + c * x.strides[1] + h * x.strides[2] +
                               w * x.strides[3]);
            }
          visit(int64_t{n} * y.strides[0] + c * y.strides[1] + p * y.strides[2] + q * y.strides[3],
                window);
        }
}

template <typename T>
int64_t FirstMaximum(const T* from, const std::vector<int64_t>& window) {
  int64_t found = window[0];
  for (int64_t place : window) {
    if (static_cast<double>(from[place]) > static_cast<double>(from[found])) found = place;
  }
  return found;
}

inline void Pool(const Pooling& pooling, const Tensor& x, const void* x_at, const Tensor& y,
                 void* y_at) {
  OfType(x.type, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(x_at);
    auto* to = static_cast<decltype(type)*>(y_at);
    VisitWindows(pooling, x, y, [&](int64_t at, const std::vector<int64_t>& window) {
      if (pooling.mode == kDeterministicMax) {
        to[at] = from[FirstMaximum(from, window)];
        return;
      }
      double sum = 0;
      for (int64_t place : window) sum += static_cast<double>(from[place]);
      to[at] = sum / window.size();
    });
  });
}

inline void PoolGradient(const Pooling& pooling, const Tensor& x, const void* x_at, const Tensor& y,
                         const void* y_at, const void* dy_at, void* dx_at) {
  OfType(x.type, [&](auto type) {
    using Number = decltype(type);
    const auto* from = static_cast<const Number*>(x_at);
    const auto *made = static_cast<const Number*>(y_at), *given = static_cast<const Number*>(dy_at);
    std::vector<double> sums(Numbers(x));
    VisitWindows(pooling, x, y, [&](int64_t at, const std::vector<int64_t>& window) {
      const double gradient = static_cast<double>(given[at]);
      if (pooling.mode == kAverageOfImage) {
        for (int64_t place : window) sums[place] += gradient / window.size();
        return;
      }
      const int64_t of = FirstMaximum(from, window);
      const bool same = static_cast<double>(made[at]) == static_cast<double>(from[of]);
      sums[of] += same ? gradient : 1e9;  // y is not what x gives
    });
    Store<Number>(sums, dx_at);
  });
}
