#include "custom_ops/ops/cpu/tensor_port.h"

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tfmem {
namespace {

// Row-major.
std::vector<int64_t> Strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (int i = static_cast<int>(shape.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * shape[i + 1];
  }
  return strides;
}

}  // namespace

absl::StatusOr<TensorPort> TensorPort::Input(const ExpressionNode& node, const void* data,
                                             const std::vector<int64_t>& shape,
                                             const TileAxes& axes) {
  TensorPort port(node.dtype, static_cast<char*>(const_cast<void*>(data)), axes);
  const std::vector<int64_t> strides = Strides(shape);
  for (size_t i = 0; i < shape.size(); ++i) {
    int64_t least = 0, most = 0;
    bool empty = false;
    Index index;
    for (const IndexTerm& term : node.index[i]) {
      const int64_t size = term.axis < 0 ? 1 : axes.sizes[term.axis];
      int64_t from = 0, to = 0;
      if (size > 0) term.Bounds(size, &from, &to);
      empty |= size == 0;
      least += from;
      most += to;
      if (from != 0 || to != 0) index.push_back(term);
    }
    if (empty) continue;  // nothing is read
    if (least < 0 || most >= shape[i]) {
      return absl::InvalidArgumentError(
          absl::StrCat("program: an index of tensor ", node.tensor, " goes from ", least, " to ",
                       most, " in dimension ", i, ", which has ", shape[i], " positions"));
    }
    port.Add(index, strides[i]);
  }
  return port;
}

TensorPort TensorPort::Position(const ExpressionNode& node, const TileAxes& axes) {
  TensorPort port(node.dtype, nullptr, axes);
  port.position_ = true;
  port.Add({{1, node.axis}}, 1);
  return port;
}

TensorPort TensorPort::Output(DType dtype, const std::vector<int>& dimensions, void* data,
                              const TileAxes& axes) {
  TensorPort port(dtype, static_cast<char*>(data), axes);
  std::vector<int64_t> shape;
  for (int axis : dimensions) shape.push_back(axes.sizes[axis]);
  const std::vector<int64_t> strides = Strides(shape);
  for (size_t i = 0; i < dimensions.size(); ++i) port.Add({{1, dimensions[i]}}, strides[i]);
  return port;
}

// Each term is within bounds on its own, because all of them but constants can be 0.
void TensorPort::Add(const Index& index, int64_t stride) {
  int64_t constant = 0;
  for (IndexTerm term : index) {
    if (term.axis < 0) {
      constant += term.factor;
      continue;
    }
    term.factor *= stride;
    if (term.axis == axes_.column) {
      even_ &= term.divisor == 1 && term.modulus == 0;
      stride_ += term.factor;
      column_terms_.push_back(term);
    } else {
      row_terms_.push_back(term);
    }
  }
  base_ += constant * stride;
}

int64_t TensorPort::RowOffset(int64_t row) const {
  if (row_terms_.empty()) return base_;
  int64_t positions[kMostAxes] = {};
  for (auto axis = axes_.rows.rbegin(); axis != axes_.rows.rend(); ++axis) {
    positions[*axis] = row % axes_.sizes[*axis];
    row /= axes_.sizes[*axis];
  }
  int64_t offset = base_;
  for (const IndexTerm& term : row_terms_) offset += term.At(positions[term.axis]);
  return offset;
}

int64_t TensorPort::ColumnOffset(int64_t column) const {
  if (even_) return column * stride_;
  int64_t offset = 0;
  for (const IndexTerm& term : column_terms_) offset += term.At(column);
  return offset;
}

template <typename Number>
void TensorPort::Gather(const TileRange& range, Number* target) const {
  const Number* source = reinterpret_cast<const Number*>(data_);
  for (int64_t row = 0; row < range.rows; ++row, target += range.columns) {
    const int64_t offset = RowOffset(range.first_row + row);
    if (position_) {
      for (int64_t i = 0; i < range.columns; ++i) {
        target[i] = static_cast<Number>(offset + ColumnOffset(range.first_column + i));
      }
    } else if (even_ && stride_ == 1) {
      std::memcpy(target, source + offset + range.first_column, range.columns * sizeof(Number));
    } else {
      for (int64_t i = 0; i < range.columns; ++i) {
        target[i] = source[offset + ColumnOffset(range.first_column + i)];
      }
    }
  }
}

template <typename Number>
void TensorPort::Scatter(const TileRange& range, const Number* source) const {
  Number* target = reinterpret_cast<Number*>(data_);
  for (int64_t row = 0; row < range.rows; ++row, source += range.columns) {
    const int64_t offset = RowOffset(range.first_row + row);
    if (even_ && stride_ == 1) {
      std::memcpy(target + offset + range.first_column, source, range.columns * sizeof(Number));
    } else {
      for (int64_t i = 0; i < range.columns; ++i) {
        target[offset + ColumnOffset(range.first_column + i)] = source[i];
      }
    }
  }
}

// Rows one after the other, and whole vectors of them.
bool TensorPort::LiesAsTile(const TileRange& range) const {
  if (IsHalf(dtype_) || position_ || !even_ || range.rows * range.columns % 64 != 0) return false;
  if (range.rows > 1) {
    if (axes_.rows.size() != 1 || row_terms_.size() != 1) return false;
    const IndexTerm& row = row_terms_[0];
    if (row.divisor != 1 || row.modulus != 0 || row.factor != range.columns) return false;
  }
  return range.columns == 1 || stride_ == 1;
}

const void* TensorPort::Load(const TileRange& range, void* tile,
                             const InstructionSet& kernels) const {
  if (LiesAsTile(range)) {
    const int64_t offset = RowOffset(range.first_row) + ColumnOffset(range.first_column);
    return data_ + offset * TensorBytes(dtype_);
  }
  if (IsHalf(dtype_)) {
    const int64_t numbers = range.rows * range.columns;
    std::vector<uint16_t> halves(numbers);
    Gather(range, halves.data());
    const auto widen =
        dtype_ == DType::kFloat16 ? kernels.half_to_float : kernels.bfloat16_to_float;
    widen(halves.data(), static_cast<float*>(tile), numbers);
  } else if (TileBytes(dtype_) == 1) {
    Gather(range, static_cast<uint8_t*>(tile));
  } else if (TileBytes(dtype_) == 4) {
    Gather(range, static_cast<int32_t*>(tile));
  } else {
    Gather(range, static_cast<int64_t*>(tile));
  }
  return tile;
}

void TensorPort::Store(const TileRange& range, const void* tile,
                       const InstructionSet& kernels) const {
  if (IsHalf(dtype_)) {
    const int64_t numbers = range.rows * range.columns;
    std::vector<uint16_t> halves(numbers);
    const auto narrow =
        dtype_ == DType::kFloat16 ? kernels.float_to_half : kernels.float_to_bfloat16;
    narrow(static_cast<const float*>(tile), halves.data(), numbers);
    Scatter(range, halves.data());
  } else if (TileBytes(dtype_) == 1) {
    Scatter(range, static_cast<const uint8_t*>(tile));
  } else if (TileBytes(dtype_) == 4) {
    Scatter(range, static_cast<const int32_t*>(tile));
  } else {
    Scatter(range, static_cast<const int64_t*>(tile));
  }
}

}  // namespace tfmem
