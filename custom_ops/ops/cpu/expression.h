// A program over tensors as data: reads what custom_ops/expr/program.py writes, which says what
// everything means. Knows no TensorFlow and no devices.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cpu/axis_set.h"
#include "custom_ops/ops/cpu/tile_program.h"
#include "custom_ops/ops/text_reader.h"

namespace tfmem {

// factor * (axis / divisor % modulus), or factor alone.
struct IndexTerm {
  int64_t factor = 0;
  int axis = -1;
  int64_t divisor = 1;
  int64_t modulus = 0;  // 0: none

  // Its least and its largest value over an axis of `size` positions, of which there is one; what
  // no tensor has positions for is no larger than 2^56.
  void Bounds(int64_t size, int64_t* least, int64_t* most) const;
  int64_t At(int64_t position) const {
    const int64_t divided = position / divisor;
    return factor * (modulus == 0 ? divided : divided % modulus);
  }
};

// A sum of terms and of nodes' values: the position in a dimension.
struct Index {
  std::vector<IndexTerm> terms;
  std::vector<int> nodes;  // earlier ones, of integers

  // The axis along which a dimension lies as it is, or -1.
  int axis() const;
};

struct ExpressionNode {
  enum class Kind { kInput, kConstant, kPosition, kRandom, kCast, kReduce, kApply };

  Kind kind = Kind::kConstant;
  DType dtype = DType::kFloat32;
  int tensor = 0;            // of an input; of random numbers the key
  int counter = 0;           // of random numbers: the tensor that it is
  std::vector<Index> index;  // of an input, for each dimension; of random numbers one
  ConstantValue value;       // of a constant
  int axis = 0;              // of a position
  Reduction reduction = Reduction::kSum;
  Elementwise op = Elementwise::kAdd;
  std::vector<int> arguments;  // earlier nodes; those of an input are in its index
  AxisSet axes;    // that a reduction reduces: also such as its argument does not vary along
  AxisSet varies;  // the axes that its value varies along
};

struct ExpressionTensor {
  DType dtype = DType::kFloat32;
  bool state = false;  // of a random generator: uint64, and `dtype` says how wide that is
  int rank = 0;
};

struct ExpressionOutput {
  int node = 0;
  std::vector<int> axes;  // its dimensions

  AxisSet varies() const { return AxisSet::Of(axes); }
};

struct Expression {
  std::vector<int64_t> axes;  // sizes; 0: known when it runs
  std::vector<ExpressionTensor> tensors;
  std::vector<ExpressionNode> nodes;
  std::vector<ExpressionOutput> outputs;
};

// Reads and checks a program; InvalidArgument names the line that is wrong.
absl::StatusOr<Expression> ParseExpression(absl::string_view text);
// A program that is part of another text, up to the end of the lines that `in` takes.
bool ReadExpression(TextReader* in, Expression* expression);

}  // namespace tfmem
