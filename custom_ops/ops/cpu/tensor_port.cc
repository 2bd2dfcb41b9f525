#include "custom_ops/ops/cpu/tensor_port.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace tfmem {
namespace {

// Calls `call` with a number as large as the tensor's: what it is does not matter for a copy.
template <typename Call>
void ForWidth(DType dtype, Call call) {
  switch (TensorBytes(dtype)) {
    case 1:
      return call(uint8_t());
    case 2:
      return call(uint16_t());
    case 4:
      return call(int32_t());
    default:
      return call(int64_t());
  }
}

template <typename Number>
void Transpose(const Number* source, int64_t source_stride, int64_t rows, int64_t columns,
               Number* target, int64_t target_stride, const InstructionSet& kernels) {
  if constexpr (sizeof(Number) == 4) {
    kernels.single_precision.transpose(reinterpret_cast<const float*>(source), source_stride, rows,
                                       columns, reinterpret_cast<float*>(target), target_stride);
  } else if constexpr (sizeof(Number) == 8) {
    kernels.double_precision.transpose(reinterpret_cast<const double*>(source), source_stride, rows,
                                       columns, reinterpret_cast<double*>(target), target_stride);
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        target[column * target_stride + row] = source[row * source_stride + column];
      }
    }
  }
}

}  // namespace

TensorPort::TensorPort(const TilePort& port, const ExpressionTiles& tiles)
    : positions_(port.tensor < 0),
      random_(port.counter >= 0),
      dtype_(port.dtype),
      base_(port.access.base) {
  const TileDomain& domain = tiles.domains[port.domain];
  rows_ = LineOf(domain.rows, port.access, tiles.axes);
  columns_ = LineOf(domain.columns, port.access, tiles.axes);
}

TensorPort::Line TensorPort::LineOf(const std::vector<int>& along, const Access& access,
                                    const std::vector<int64_t>& sizes) {
  Line line;
  int64_t step = 1;
  for (auto axis = along.rbegin(); axis != along.rend(); ++axis) {
    const Dimension dimension{sizes[*axis], access.strides[*axis]};
    std::vector<Dimension>& found = line.dimensions;  // the fastest first
    if (!found.empty() && dimension.stride == found.back().stride * found.back().size) {
      found.back().size *= dimension.size;
    } else {
      found.push_back(dimension);
    }
    for (const IndexTerm& term : access.uneven) {
      if (term.axis == *axis) line.uneven.push_back({term, step, dimension.size});
    }
    step *= dimension.size;
  }
  std::reverse(line.dimensions.begin(), line.dimensions.end());
  return line;
}

int64_t TensorPort::Line::At(int64_t position) const {
  int64_t offset = 0;
  for (const UnevenTerm& term : uneven) offset += term.At(position);
  if (dimensions.size() == 1) return offset + position * dimensions[0].stride;
  for (auto dimension = dimensions.rbegin(); dimension != dimensions.rend(); ++dimension) {
    offset += position % dimension->size * dimension->stride;
    position /= dimension->size;
  }
  return offset;
}

// run(position, offset, length, stride): from there on so many numbers lie evenly.
template <typename Run>
void TensorPort::ForRuns(const Line& line, int64_t first, int64_t count, int64_t base, Run run) {
  if (line.even()) return run(0, base + first * line.stride(), count, line.stride());
  for (int64_t done = 0; done < count;) {
    int64_t length = 1;
    if (line.uneven.empty()) {
      const int64_t size = line.dimensions.back().size;
      length = std::min(count - done, size - (first + done) % size);
    }
    run(done, base + line.At(first + done), length,
        line.dimensions.empty() ? 0 : line.dimensions.back().stride);
    done += length;
  }
}

// run(row, number of the tile, offset, length, stride)
template <typename Run>
void TensorPort::ForRuns(const TileRange& range, Run run) const {
  if (range.columns == 1) {
    ForRuns(rows_, range.first_row, range.rows, base_ + columns_.At(range.first_column),
            [&](int64_t row, int64_t offset, int64_t length, int64_t stride) {
              run(row, row, offset, length, stride);
            });
    return;
  }
  ForRuns(rows_, range.first_row, range.rows, base_,
          [&](int64_t first, int64_t offset, int64_t rows, int64_t stride) {
            for (int64_t row = first; row < first + rows; ++row, offset += stride) {
              ForRuns(columns_, range.first_column, range.columns, offset,
                      [&](int64_t column, int64_t at, int64_t length, int64_t step) {
                        run(row, row * range.columns + column, at, length, step);
                      });
            }
          });
}

void* TensorPort::Direct(const TileRange& range, const void* tensor) const {
  if (positions_ || random_ || IsHalf(dtype_)) return nullptr;
  if (range.columns > 1 && !(columns_.even() && columns_.stride() == 1)) return nullptr;
  if (range.rows > 1 && !(rows_.even() && rows_.stride() == range.columns)) return nullptr;
  const int64_t offset = base_ + rows_.At(range.first_row) + columns_.At(range.first_column);
  return const_cast<char*>(static_cast<const char*>(tensor)) + offset * TensorBytes(dtype_);
}

bool TensorPort::transposed() const {
  return rows_.dimensions.size() == 1 && rows_.uneven.empty() && columns_.even() &&
         std::abs(rows_.stride()) < std::abs(columns_.stride()) && rows_.stride() != 0;
}

bool TensorPort::SameAs(const TensorPort& other) const {
  const auto same = [](const Line& a, const Line& b) {
    return a.uneven.empty() && b.uneven.empty() &&
           std::equal(a.dimensions.begin(), a.dimensions.end(), b.dimensions.begin(),
                      b.dimensions.end(), [](const Dimension& one, const Dimension& two) {
                        return one.size == two.size && one.stride == two.stride;
                      });
  };
  return dtype_ == other.dtype_ && base_ == other.base_ && same(rows_, other.rows_) &&
         same(columns_, other.columns_);
}

template <typename Number>
void TensorPort::Read(const TileRange& range, const Number* tensor, Number* tile,
                      const InstructionSet& kernels) const {
  if (range.columns > 1 && rows_.stride() == 1 && transposed()) {
    return Transpose(tensor + base_ + range.first_row + columns_.At(range.first_column),
                     columns_.stride(), range.columns, range.rows, tile, range.columns, kernels);
  }
  ForRuns(range, [&](int64_t, int64_t at, int64_t offset, int64_t length, int64_t stride) {
    const Number* source = tensor + offset;
    Number* target = tile + at;
    if (stride == 1) {
      std::memcpy(target, source, length * sizeof(Number));
    } else if (stride == 0) {
      std::fill_n(target, length, *source);
    } else {
      for (int64_t i = 0; i < length; ++i) target[i] = source[i * stride];
    }
  });
}

template <typename Number>
void TensorPort::ReadAt(const TileRange& range, const Number* tensor, const int64_t* offsets,
                        bool for_rows, Number* tile) const {
  ForRuns(range, [&](int64_t row, int64_t at, int64_t offset, int64_t length, int64_t stride) {
    const Number* source = tensor + offset + (for_rows ? offsets[row] : 0);
    Number* target = tile + at;
    if (!for_rows) {
      for (int64_t i = 0; i < length; ++i) target[i] = source[i * stride + offsets[at + i]];
    } else if (stride == 1) {
      std::memcpy(target, source, length * sizeof(Number));
    } else {
      for (int64_t i = 0; i < length; ++i) target[i] = source[i * stride];
    }
  });
}

template <typename Number>
void TensorPort::Write(const TileRange& range, const Number* tile, Number* tensor,
                       const InstructionSet& kernels) const {
  if (range.columns > 1 && rows_.stride() == 1 && transposed()) {
    return Transpose(tile, range.columns, range.rows, range.columns,
                     tensor + base_ + range.first_row + columns_.At(range.first_column),
                     columns_.stride(), kernels);
  }
  ForRuns(range, [&](int64_t, int64_t at, int64_t offset, int64_t length, int64_t stride) {
    const Number* source = tile + at;
    Number* target = tensor + offset;
    if (stride == 1) {
      std::memcpy(target, source, length * sizeof(Number));
    } else {
      for (int64_t i = 0; i < length; ++i) target[i * stride] = source[i];
    }
  });
}

const void* TensorPort::Widen(const void* halves, int64_t count, void* tile,
                              const InstructionSet& kernels) const {
  const auto widen = dtype_ == DType::kFloat16 ? kernels.half_to_float : kernels.bfloat16_to_float;
  widen(static_cast<const uint16_t*>(halves), static_cast<float*>(tile), count);
  return tile;
}

const void* TensorPort::Load(const TileRange& range, const void* tensor, void* tile, void* scratch,
                             const InstructionSet& kernels) const {
  if (const void* lies = Direct(range, tensor)) return lies;
  const int64_t numbers = range.rows * range.columns;
  if (positions_) {
    const auto count = [&](auto* target) {
      ForRuns(range, [&](int64_t, int64_t at, int64_t offset, int64_t length, int64_t stride) {
        using Number = std::remove_pointer_t<decltype(target)>;
        for (int64_t i = 0; i < length; ++i) {
          target[at + i] = static_cast<Number>(offset + i * stride);
        }
      });
    };
    dtype_ == DType::kInt32 ? count(static_cast<int32_t*>(tile))
                            : count(static_cast<int64_t*>(tile));
    return tile;
  }
  void* target = IsHalf(dtype_) ? scratch : tile;
  ForWidth(dtype_, [&](auto of) {
    using Number = decltype(of);
    Read(range, static_cast<const Number*>(tensor), static_cast<Number*>(target), kernels);
  });
  return IsHalf(dtype_) ? Widen(scratch, numbers, tile, kernels) : tile;
}

void TensorPort::Draw(const TileRange& range, const uint64_t* key, const uint64_t* counter,
                      void* tile, const InstructionSet& kernels) const {
  const RandomState state =
      key == counter ? SeededState(key) : RandomState{key[0], counter[0], counter[1]};
  const int64_t bytes = TileBytes(dtype_);
  ForRuns(range, [&](int64_t, int64_t at, int64_t first, int64_t length, int64_t stride) {
    char* target = static_cast<char*>(tile) + at * bytes;
    if (stride == 1) return kernels.tile.draw(state, dtype_, first, length, target);
    for (int64_t i = 0; i < length; ++i) {
      kernels.tile.draw(state, dtype_, first + i * stride, 1, target + i * bytes);
    }
  });
}

const void* TensorPort::Gather(const TileRange& range, const void* tensor, const int64_t* offsets,
                               bool for_rows, void* tile, void* scratch,
                               const InstructionSet& kernels) const {
  if (for_rows && range.rows == 1) {
    if (const void* lies = Direct(range, tensor)) {
      return static_cast<const char*>(lies) + offsets[0] * TensorBytes(dtype_);
    }
  }
  void* target = IsHalf(dtype_) ? scratch : tile;
  ForWidth(dtype_, [&](auto of) {
    using Number = decltype(of);
    ReadAt(range, static_cast<const Number*>(tensor), offsets, for_rows,
           static_cast<Number*>(target));
  });
  return IsHalf(dtype_) ? Widen(scratch, range.rows * range.columns, tile, kernels) : tile;
}

void TensorPort::Store(const TileRange& range, const void* tile, void* tensor, void* scratch,
                       const InstructionSet& kernels) const {
  if (IsHalf(dtype_)) {
    const auto narrow =
        dtype_ == DType::kFloat16 ? kernels.float_to_half : kernels.float_to_bfloat16;
    narrow(static_cast<const float*>(tile), static_cast<uint16_t*>(scratch),
           range.rows * range.columns);
    tile = scratch;
  }
  ForWidth(dtype_, [&](auto of) {
    using Number = decltype(of);
    Write(range, static_cast<const Number*>(tile), static_cast<Number*>(tensor), kernels);
  });
}

}  // namespace tfmem
