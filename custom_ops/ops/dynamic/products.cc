// Products of a block's rows and a parameter, all of their columns or some.
#include <algorithm>
#include <cstring>

#include "custom_ops/ops/dynamic/run.h"

namespace tfmem {
namespace {

constexpr int64_t kWorthPacking = 24;  // rows that read packed weights

}  // namespace

template <typename Real>
void DynamicWorker<Real>::Columns(const Block& block, const DynamicStep& step, int64_t part,
                                  int64_t parts) {
  // Whole panels, so that each column is summed as it would be if all were one processor's.
  const int64_t each = Blocks(Blocks(step.width, panel_), parts) * panel_;
  const int64_t first = part * each, width = std::min(each, step.width - first);
  if (width > 0) Product(block, step, first, width);
}

template <typename Real>
void DynamicWorker<Real>::Product(const Block& block, const DynamicStep& step, int64_t first,
                                  int64_t width) {
  const DynamicParameter& parameter = call_.spec.parameters[step.numbers[0]];
  const bool transposed = step.numbers[3] != 0;
  const Real* weights = call_.parameters[step.numbers[0]] + step.numbers[1] * parameter.columns +
                        step.numbers[2] + first * (transposed ? parameter.columns : 1);
  const int64_t depth = step.widths[0], from = StrideOf(depth), to = StrideOf(step.width);
  const Real* operand = At(block, step.values[0]);
  Real* target = At(block, step.target) + first;
  const bool accumulate = step.values.size() > 1;
  if (accumulate) {
    const Real* base = At(block, step.values[1]) + first;
    for (int64_t row = 0; base != target && row < block.rows; ++row) {
      std::memcpy(target + row * to, base + row * to, width * sizeof(Real));
    }
  }
  if (block.rows >= kWorthPacking) {
    MultiplyPacked(operand, from, block.rows, weights, parameter.columns, depth, width, transposed,
                   target, to, accumulate);
  } else if (transposed) {
    kernels_.multiply_transposed(operand, from, block.rows, weights, parameter.columns, width,
                                 depth, target, to, accumulate);
  } else {
    MultiplyPlain(operand, from, block.rows, weights, parameter.columns, depth, width, target, to,
                  accumulate);
  }
}

template <typename Real>
void DynamicWorker<Real>::MultiplyPlain(const Real* operand, int64_t operand_stride, int64_t rows,
                                        const Real* weights, int64_t weights_stride, int64_t depth,
                                        int64_t width, Real* target, int64_t target_stride,
                                        bool accumulate) {
  const int64_t whole = width / panel_ * panel_;
  for (int64_t column = 0; column < whole; column += panel_) {
    kernels_.multiply(operand, operand_stride, rows, weights + column, weights_stride, depth,
                      target + column, target_stride, accumulate);
  }
  if (whole < width) {
    MultiplyPacked(operand, operand_stride, rows, weights + whole, weights_stride, depth,
                   width - whole, false, target + whole, target_stride, accumulate);
  }
}

// Panel by panel, each copied to where its rows follow each other.
template <typename Real>
void DynamicWorker<Real>::MultiplyPacked(const Real* operand, int64_t operand_stride, int64_t rows,
                                         const Real* weights, int64_t weights_stride, int64_t depth,
                                         int64_t width, bool transposed, Real* target,
                                         int64_t target_stride, bool accumulate) {
  for (int64_t column = 0; column < width; column += panel_) {
    const int64_t columns = std::min(panel_, width - column);
    if (columns < panel_) std::fill_n(packed_, depth * panel_, Real{0});
    if (transposed) {
      kernels_.transpose(weights + column * weights_stride, weights_stride, columns, depth, packed_,
                         panel_);
    } else {
      for (int64_t k = 0; k < depth; ++k) {
        std::memcpy(packed_ + k * panel_, weights + k * weights_stride + column,
                    columns * sizeof(Real));
      }
    }
    if (columns == panel_) {
      kernels_.multiply(operand, operand_stride, rows, packed_, panel_, depth, target + column,
                        target_stride, accumulate);
      continue;
    }
    kernels_.multiply(operand, operand_stride, rows, packed_, panel_, depth, partial_, panel_,
                      false);
    for (int64_t row = 0; row < rows; ++row) {
      Real* place = target + row * target_stride + column;
      const Real* product = partial_ + row * panel_;
      for (int64_t i = 0; i < columns; ++i) {
        place[i] = accumulate ? place[i] + product[i] : product[i];
      }
    }
  }
}

template void DynamicWorker<float>::Columns(const Block&, const DynamicStep&, int64_t, int64_t);
template void DynamicWorker<float>::Product(const Block&, const DynamicStep&, int64_t, int64_t);
template void DynamicWorker<double>::Columns(const Block&, const DynamicStep&, int64_t, int64_t);
template void DynamicWorker<double>::Product(const Block&, const DynamicStep&, int64_t, int64_t);

}  // namespace tfmem
