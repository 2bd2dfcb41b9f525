#include "custom_ops/ops/cpu/product.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "custom_ops/ops/cpu/costs.h"
#include "custom_ops/ops/cpu/phases.h"

namespace tfmem {
namespace {

constexpr int64_t kPartRows = 240;           // that one thread multiplies at a time
constexpr int64_t kDotRows = 8;              // up to here a transpose is best read where it lies
constexpr int64_t kDepth = 128;              // of a panel that the first cache holds
constexpr int64_t kCached = 1 << 16;         // weights that need not be asked for early
constexpr int64_t kMost = int64_t{1} << 30;  // multiplications, as far as was measured
constexpr int64_t kThinRows = 64;            // as far as was measured with vectors of 32 bytes
constexpr int kVectorBytes = 64;             // the most

bool Swaps(const ProductSizes& sizes) {
  return sizes.columns < sizes.rows && sizes.columns <= kDotRows;
}

}  // namespace

template <typename Real>
bool IsFast(const ProductSizes& sizes, const CpuKernels<Real>& kernels) {
  const int64_t vector_bytes = kernels.panel / 4 * sizeof(Real);
  if (vector_bytes < 32) return false;
  const double numbers = double(sizes.columns) * sizes.depth;
  // One row of weights that no cache holds: a library's loops read them as fast as memory gives.
  const bool in_rows = !sizes.b_transposed && sizes.columns > 1;
  if (sizes.rows == 1 && in_rows && numbers > kCached) return false;
  if (numbers * sizes.rows > kMost) return false;
  return vector_bytes == 64 || sizes.rows <= kThinRows || Swaps(sizes);
}

template bool IsFast(const ProductSizes& sizes, const CpuKernels<float>& kernels);
template bool IsFast(const ProductSizes& sizes, const CpuKernels<double>& kernels);

template <typename Real>
Product<Real>::Product(ProductSizes sizes, std::optional<Elementwise> activation,
                       const CpuKernels<Real>& kernels)
    : sizes_(std::move(sizes)),
      activation_(activation),
      kernels_(kernels),
      swapped_(Swaps(sizes_)),
      rows_(swapped_ ? sizes_.columns : sizes_.rows),
      columns_(swapped_ ? sizes_.rows : sizes_.columns) {
  const Layout a = sizes_.a_transposed ? Layout{1, sizes_.rows} : Layout{sizes_.depth, 1};
  const Layout b = sizes_.b_transposed ? Layout{1, sizes_.depth} : Layout{sizes_.columns, 1};
  operand_ = swapped_ ? Layout{b.column, b.row} : a;
  weights_ = swapped_ ? Layout{a.column, a.row} : b;
  // For one column, or one row, both layouts are equal.
  const bool transposed = weights_.column != 1 || columns_ == 1;
  const bool as_is = operand_.column == 1;  // a row's numbers lie side by side
  dots_ = transposed && rows_ <= kDotRows && (as_is || sizes_.depth <= kCached);
  packs_ = transposed && !dots_;
  panel_ = kernels_.panel;
  if (dots_) panel_ = std::clamp<int64_t>(kCached / std::max<int64_t>(sizes_.depth, 1), 4, panel_);
  panels_ = (columns_ + panel_ - 1) / panel_;
  parts_ = std::max<int64_t>((rows_ + kPartRows - 1) / kPartRows, 1);
  cached_ = columns_ * sizes_.depth <= kCached;
  const int64_t packed = !dots_ ? kDepth * panel_ : as_is ? 0 : rows_ * sizes_.depth;
  buffer_ = packed + (swapped_ ? rows_ * panel_ : 0);
}

template <typename Real>
double Product<Real>::work_ns() const {
  const int64_t matrices = sizes_.batch.size();
  const double numbers = double(matrices) * (columns_ + rows_) * sizes_.depth;
  const double multiplications = double(matrices) * rows_ * columns_ * sizes_.depth;
  return multiplications / cpu_costs::kMultiplicationsPerNs + numbers / cpu_costs::kNumbersPerNs;
}

template <typename Real>
int Product<Real>::UsefulThreads(int threads) const {
  const double units = double(sizes_.batch.size()) * parts_ * panels_;
  const double useful = std::min<double>(work_ns() / cpu_costs::kThreadNs, units);
  return std::clamp<int>(useful, 1, std::max(threads, 1));
}

template <typename Real>
int64_t Product<Real>::WorkspaceBytes(int threads) const {
  return UsefulThreads(threads) * buffer_ * sizeof(Real);
}

template <typename Real>
void Product<Real>::Run(const Real* a, const Real* b, const Real* bias, Real* c,
                        const TileThreads& threads, void* workspace) const {
  const int64_t units = sizes_.batch.size() * parts_ * panels_;
  const int count = UsefulThreads(threads.count);
  const int shares = count == 1 ? 1 : std::min<int64_t>(4 * count, units);
  const int64_t a_numbers = sizes_.rows * sizes_.depth, b_numbers = sizes_.depth * sizes_.columns;
  const auto work = [&](int64_t, int share, int thread) {
    Real* buffer = static_cast<Real*>(workspace) + thread * buffer_;
    for (int64_t unit = units * share / shares; unit < units * (share + 1) / shares; ++unit) {
      const int64_t matrix = unit / (parts_ * panels_), number = unit / panels_ % parts_;
      const int64_t first_row = rows_ * number / parts_, column = unit % panels_ * panel_;
      const Part part = {first_row, rows_ * (number + 1) / parts_ - first_row, column,
                         std::min(panel_, columns_ - column)};
      const Real* from_a = a + sizes_.batch[matrix].a * a_numbers;
      const Real* from_b = b + sizes_.batch[matrix].b * b_numbers;
      RunPart(swapped_ ? from_b : from_a, swapped_ ? from_a : from_b, bias,
              c + matrix * rows_ * columns_, part, buffer);
    }
  };
  if (units > 0) RunPhases(1, shares, count, threads.schedule, ThreadWork(work));
}

template <typename Real>
void Product<Real>::RunPart(const Real* operand, const Real* weights, const Real* bias,
                            Real* target, const Part& part, Real* buffer) const {
  // A panel of the transposed product is computed in the buffer, and then put in its place.
  const bool direct = !swapped_ || rows_ == 1;
  Real* to = direct ? target + part.row * columns_ + part.column : buffer;
  const int64_t stride = direct ? columns_ : panel_;
  Real* packed = buffer + (swapped_ ? rows_ * panel_ : 0);
  if (sizes_.depth == 0) {
    for (int64_t row = 0; row < part.rows; ++row) {
      std::fill_n(to + row * stride, part.columns, Real(0));
    }
  } else {
    const auto run = dots_ ? &Product::Dot : &Product::Multiply;
    (this->*run)(operand + part.row * operand_.row, weights, part, to, stride, packed);
  }
  if (bias != nullptr || activation_.has_value()) RunEpilogue(bias, part, to, stride);
  if (!direct) {
    kernels_.transpose(buffer, panel_, rows_, part.columns, target + part.column * rows_, rows_);
  }
}

template <typename Real>
void Product<Real>::Dot(const Real* operand, const Real* weights, const Part& part, Real* target,
                        int64_t target_stride, Real* packed) const {
  const int64_t depth = sizes_.depth;
  int64_t stride = operand_.row;
  if (operand_.column != 1) {
    for (int64_t row = 0; row < part.rows; ++row) {
      for (int64_t k = 0; k < depth; ++k) {
        packed[row * depth + k] = operand[row * operand_.row + k * operand_.column];
      }
    }
    operand = packed;
    stride = depth;
  }
  kernels_.multiply_transposed(operand, stride, part.rows, weights + part.column * weights_.column,
                               weights_.column, part.columns, depth, target, target_stride, false);
}

template <typename Real>
void Product<Real>::Multiply(const Real* operand, const Real* weights, const Part& part,
                             Real* target, int64_t target_stride, Real* packed) const {
  const int64_t depth = sizes_.depth, lanes = kernels_.panel / 4;
  // Whole vectors are read, and nothing behind a tensor.
  const bool packs = packs_ || part.columns % lanes != 0;
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = std::min(kDepth, depth - k);
    const Real* from = weights + k * weights_.row + part.column * weights_.column;
    const Real* next = nullptr;
    if (packs_) {
      kernels_.transpose(from, weights_.column, part.columns, deep, packed, panel_);
    } else if (packs) {
      for (int64_t i = 0; i < deep; ++i) {
        std::memcpy(packed + i * panel_, from + i * weights_.row, part.columns * sizeof(Real));
      }
    } else if (!cached_) {
      next = k + kDepth < depth ? from + kDepth * weights_.row : weights + part.column + panel_;
    }
    kernels_.multiply_strided(operand + k * operand_.column, operand_.row, operand_.column,
                              part.rows, packs ? packed : from, packs ? panel_ : weights_.row, deep,
                              next, target, target_stride, part.columns, k > 0);
  }
}

// While the part is in a cache.
template <typename Real>
void Product<Real>::RunEpilogue(const Real* bias, const Part& part, Real* target,
                                int64_t target_stride) const {
  constexpr int kSecond = 1 << 1;           // of the arguments is one number
  Real splat[kVectorBytes / sizeof(Real)];  // the bias of a column of c, which is a row here
  for (int64_t row = 0; row < part.rows; ++row) {
    Real* at = target + row * target_stride;
    if (bias != nullptr) {
      if (swapped_) std::fill(std::begin(splat), std::end(splat), bias[part.row + row]);
      kernels_.compute(Elementwise::kAdd, at, at, swapped_ ? splat : bias + part.column, nullptr,
                       part.columns, swapped_ ? kSecond : 0);
    }
    if (activation_.has_value()) {
      kernels_.compute(*activation_, at, at, nullptr, nullptr, part.columns, 0);
    }
  }
}

template class Product<float>;
template class Product<double>;

}  // namespace tfmem
