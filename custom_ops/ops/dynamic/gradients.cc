// The last section: gradients of parameters, summed over all nodes of a batch in a fixed order.
#include <algorithm>

#include "custom_ops/ops/dynamic/run.h"

namespace tfmem {
namespace {

constexpr int64_t kDepth = 256;  // nodes at a time

}  // namespace

std::vector<LookedUp> FindLookedUp(const DynamicSpec& spec, const DynamicBatch& batch) {
  std::vector<LookedUp> found(spec.parameters.size());
  for (size_t number = 0; number < spec.kinds.size(); ++number) {
    const std::vector<DynamicStep>& steps = spec.kinds[number].sections[kGradients];
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].op != StepOp::kPutLookup) continue;
      if (!spec.parameters[steps[i].numbers[0]].sparse) continue;
      const std::vector<int32_t>& rows = batch.kinds[number].arguments[steps[i].numbers[1]];
      for (size_t node = 0; node < rows.size(); ++node) {
        found[steps[i].numbers[0]].entries.push_back({rows[node], static_cast<int32_t>(number),
                                                      static_cast<int32_t>(i),
                                                      static_cast<int32_t>(node)});
      }
    }
  }
  for (LookedUp& table : found) {
    std::stable_sort(
        table.entries.begin(), table.entries.end(),
        [](const LookedUp::Entry& a, const LookedUp::Entry& b) { return a.row < b.row; });
    for (size_t i = 0; i < table.entries.size(); ++i) {
      if (i == 0 || table.entries[i].row != table.entries[i - 1].row) table.first.push_back(i);
    }
    table.first.push_back(table.entries.size());
  }
  return found;
}

template <typename Real>
void DynamicWorker<Real>::Gradient(int parameter, int64_t row, int64_t column) {
  const DynamicParameter& shape = call_.spec.parameters[parameter];
  const int64_t rows = std::min(kGradientRows, shape.rows - row);
  const int64_t columns = std::min(kGradientColumns, shape.columns - column);
  std::fill_n(tile_, rows * kGradientColumns, Real{0});
  for (size_t kind = 0; kind < call_.spec.kinds.size(); ++kind) {
    if (call_.batch.kinds[kind].count == 0) continue;
    for (const DynamicStep& step : call_.spec.kinds[kind].sections[kGradients]) {
      if (step.numbers[0] != parameter) continue;
      if (step.op == StepOp::kOuter) {
        AddOuter(kind, step, row, rows, column, columns, tile_);
      } else {
        AddRows(kind, step, row, rows, column, columns, tile_);
      }
    }
  }
  call_.take(parameter, 0, row, column, rows, columns, tile_, kGradientColumns,
             tile_ + kGradientRows * kGradientColumns);
}

// The part of transpose(a) @ b that is in the tile, for a and b of all nodes of the kind.
template <typename Real>
void DynamicWorker<Real>::AddOuter(int kind, const DynamicStep& step, int64_t row, int64_t rows,
                                   int64_t column, int64_t columns, Real* tile) {
  const int64_t first = std::max(row, step.numbers[1]);
  const int64_t end = std::min(row + rows, step.numbers[1] + step.widths[0]);
  const int64_t left = std::max(column, step.numbers[2]);
  const int64_t right = std::min(column + columns, step.numbers[2] + step.widths[1]);
  if (first >= end || left >= right) return;
  const std::vector<int64_t>& kept = call_.layout.kept[kind];
  const int64_t a_stride = StrideOf(step.widths[0]), b_stride = StrideOf(step.widths[1]);
  const Real* a = call_.memory + kept[step.values[0].number] + first - step.numbers[1];
  const Real* b = call_.memory + kept[step.values[1].number] + left - step.numbers[2];
  Real* target = tile + (first - row) * kGradientColumns + left - column;
  const int64_t count = call_.batch.kinds[kind].count;
  for (int64_t node = 0; node < count; node += kDepth) {
    const int64_t depth = std::min(kDepth, count - node);
    kernels_.transpose(a + node * a_stride, a_stride, depth, end - first, packed_, kDepth);
    for (int64_t at = 0; at < right - left; at += panel_) {
      const int64_t width = std::min(panel_, right - left - at);
      const Real* weights = b + node * b_stride + at;
      if (width == panel_) {
        kernels_.multiply(packed_, kDepth, end - first, weights, b_stride, depth, target + at,
                          kGradientColumns, true);
        continue;
      }
      // What lies behind the last column is multiplied too, and dropped.
      kernels_.multiply(packed_, kDepth, end - first, weights, b_stride, depth, partial_, panel_,
                        false);
      for (int64_t i = 0; i < end - first; ++i) {
        Real* place = target + i * kGradientColumns + at;
        for (int64_t j = 0; j < width; ++j) place[j] += partial_[i * panel_ + j];
      }
    }
  }
}

// Sums of rows: of a vector of parameters, or of the rows of a table that is multiplied as well.
template <typename Real>
void DynamicWorker<Real>::AddRows(int kind, const DynamicStep& step, int64_t row, int64_t rows,
                                  int64_t column, int64_t columns, Real* tile) {
  const bool lookup = step.op == StepOp::kPutLookup;
  const int64_t begin = lookup ? step.numbers[2] : step.numbers[1];
  const int64_t left = std::max(column, begin);
  const int64_t right = std::min(column + columns, begin + step.width);
  if (left >= right) return;
  const KindRows& nodes = call_.batch.kinds[kind];
  const int64_t stride = StrideOf(step.width);
  const Real* source = call_.memory + call_.layout.kept[kind][step.values[0].number] + left - begin;
  for (int64_t node = 0; node < nodes.count; ++node, source += stride) {
    const int64_t target = lookup ? nodes.arguments[step.numbers[1]][node] - row : 0;
    if (target < 0 || target >= rows) continue;
    Real* place = tile + target * kGradientColumns + left - column;
    kernels_.compute(Elementwise::kAdd, place, place, source, nullptr, right - left, 0);
  }
}

template <typename Real>
void DynamicWorker<Real>::SumRows(int parameter, int64_t first, int64_t count) {
  const LookedUp& table = call_.looked_up[parameter];
  const int64_t all = call_.spec.parameters[parameter].columns;
  for (int64_t index = first; index < first + count; ++index) {
    const int64_t row = table.entries[table.first[index]].row;
    for (int64_t column = 0; column < all; column += kGradientColumns) {
      const int64_t columns = std::min(kGradientColumns, all - column);
      std::fill_n(tile_, columns, Real{0});
      for (int64_t i = table.first[index]; i < table.first[index + 1]; ++i) {
        const LookedUp::Entry& entry = table.entries[i];
        const DynamicStep& step = call_.spec.kinds[entry.kind].sections[kGradients][entry.step];
        const int64_t begin = step.numbers[2];
        const int64_t left = std::max(column, begin);
        const int64_t right = std::min(column + columns, begin + step.width);
        if (left >= right) continue;
        const Real* source = call_.memory + call_.layout.kept[entry.kind][step.values[0].number] +
                             entry.node * StrideOf(step.width) + left - begin;
        Real* place = tile_ + left - column;
        kernels_.compute(Elementwise::kAdd, place, place, source, nullptr, right - left, 0);
      }
      call_.take(parameter, index, row, column, 1, columns, tile_, kGradientColumns,
                 tile_ + kGradientRows * kGradientColumns);
    }
  }
}

template void DynamicWorker<float>::Gradient(int, int64_t, int64_t);
template void DynamicWorker<float>::SumRows(int, int64_t, int64_t);
template void DynamicWorker<double>::Gradient(int, int64_t, int64_t);
template void DynamicWorker<double>::SumRows(int, int64_t, int64_t);

}  // namespace tfmem
