// How tiles are read from tensors and written to them: where each position of a program's domain
// lies.
#ifndef TFMEM_CUSTOM_OPS_OPS_CPU_TENSOR_PORT_H_
#define TFMEM_CUSTOM_OPS_OPS_CPU_TENSOR_PORT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/expression.h"

namespace tfmem {

// A part of the domain.
struct TileRange {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;
};

// How a domain lies in a program's axes.
struct TileAxes {
  std::vector<int64_t> sizes;  // of all axes
  std::vector<int> rows;       // that are the domain's rows, the last one the fastest
  int column = -1;             // that is its columns; -1: there is one column
};

class TensorPort {
 public:
  // An input; InvalidArgument if an index leaves the tensor.
  static absl::StatusOr<TensorPort> Input(const ExpressionNode& node, const void* data,
                                          const std::vector<int64_t>& shape, const TileAxes& axes);
  static TensorPort Position(const ExpressionNode& node, const TileAxes& axes);
  static TensorPort Output(DType dtype, const std::vector<int>& dimensions, void* data,
                           const TileAxes& axes);

  // Fills `tile`, or says where the numbers lie as they would in the tile. A scalar value's range
  // has one column, the first; a tile has room for whole vectors, and what lies behind a tensor is
  // not read.
  const void* Load(const TileRange& range, void* tile, const InstructionSet& kernels) const;
  void Store(const TileRange& range, const void* tile, const InstructionSet& kernels) const;

 private:
  TensorPort(DType dtype, char* data, const TileAxes& axes)
      : dtype_(dtype), data_(data), axes_(axes) {}

  void Add(const Index& index, int64_t stride);
  int64_t RowOffset(int64_t row) const;
  int64_t ColumnOffset(int64_t column) const;
  template <typename Number>
  void Gather(const TileRange& range, Number* target) const;
  template <typename Number>
  void Scatter(const TileRange& range, const Number* source) const;
  bool LiesAsTile(const TileRange& range) const;

  DType dtype_;
  char* data_;  // of an input not written
  TileAxes axes_;
  bool position_ = false;
  // The offset of a position, in numbers: a base and a sum over terms, whose factors are strides.
  int64_t base_ = 0;
  std::vector<IndexTerm> row_terms_;
  std::vector<IndexTerm> column_terms_;
  bool even_ = true;  // columns are `stride_` apart
  int64_t stride_ = 0;
};

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_CPU_TENSOR_PORT_H_
