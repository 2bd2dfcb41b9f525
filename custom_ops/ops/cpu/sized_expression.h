// A program over tensors whose sizes are known.
//
// Axes of one position are gone, and an axis is split where an index divides it: of `a0/5 a0%5`
// with 20 positions, the first dimension lies along an axis of 4 positions and the second along one
// of 5. So an index is a sum of multiples of positions, and an access is a stride for each axis.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/expression.h"

namespace tfmem {

using Shape = std::vector<int64_t>;
inline constexpr int64_t kMostNumbers = int64_t{1} << 40;  // of a tensor, and of all axes together

// Where the number at a position lies in a tensor, counted in numbers.
struct Access {
  int64_t base = 0;
  std::vector<int64_t> strides;   // for each axis
  std::vector<IndexTerm> uneven;  // added, of axes that could not be split

  AxisSet varies() const;
};

// A dimension that is read at the values of nodes.
struct Gather {
  std::vector<int> nodes;  // added up, and to `position`
  Access position;
  int64_t size = 0;    // of the dimension
  int64_t stride = 0;  // from one position to the next
  AxisSet axes;        // of the program, that the index varies along
};

struct SizedNode {
  ExpressionNode::Kind kind = ExpressionNode::Kind::kConstant;
  DType dtype = DType::kFloat32;
  int tensor = 0;   // of an input; of random numbers the key
  int counter = 0;  // of random numbers: the tensor that it is
  Access access;    // of an input, but for its gathers; of a position, of random numbers
  std::vector<Gather> gathers;  // of an input
  ConstantValue value;          // of a constant
  Reduction reduction = Reduction::kSum;
  Elementwise op = Elementwise::kAdd;
  std::vector<int> arguments;  // earlier nodes
  AxisSet axes;                // that are reduced; some at least
  AxisSet varies;
};

struct SizedOutput {
  int node = 0;
  AxisSet axes;
  Access access;
};

struct SizedExpression {
  std::vector<int64_t> axes;     // sizes, none of them 1
  std::vector<SizedNode> nodes;  // those that outputs depend on
  std::vector<SizedOutput> outputs;

  // For each axis: the axis of the program that it is a part of, and by how many positions of that
  // one its step moves.
  std::vector<int> origin;
  std::vector<int64_t> step;

  int64_t Positions(AxisSet along) const;
};

// The number of positions; -1 if there are too many, or a size is negative.
int64_t CountNumbers(const std::vector<int64_t>& sizes);

// `axes` are the sizes of the program's axes, `shapes` those of the tensors that it reads.
// InvalidArgument if they do not fit it, or an index would leave its tensor.
absl::StatusOr<SizedExpression> SizeExpression(const Expression& expression,
                                               const std::vector<int64_t>& axes,
                                               const std::vector<Shape>& shapes);

// The sizes of a program's axes, for tensors of these shapes. InvalidArgument if a rank is not the
// declared one, two dimensions disagree, or nothing says how long an axis is.
absl::StatusOr<std::vector<int64_t>> AxisSizes(const Expression& expression,
                                               const std::vector<Shape>& shapes);

// Row-major.
std::vector<int64_t> DenseStrides(const Shape& shape);

}  // namespace tfmem
