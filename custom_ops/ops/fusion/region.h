// A region of a graph that runs as one op, as data: reads what custom_ops/fusion/text.py writes;
// custom_ops/fusion/region.py says what everything means. Knows no TensorFlow and no devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cpu/expression.h"

namespace tfmem {

// The dtypes of values: those of programs first, in the order of DType. X(enumerator, name, bytes)
#define TFMEM_VALUE_DTYPES(X)   \
  X(kFloat32, "float32", 4)     \
  X(kFloat64, "float64", 8)     \
  X(kFloat16, "float16", 2)     \
  X(kBfloat16, "bfloat16", 2)   \
  X(kInt32, "int32", 4)         \
  X(kInt64, "int64", 8)         \
  X(kBool, "bool", 1)           \
  X(kInt8, "int8", 1)           \
  X(kInt16, "int16", 2)         \
  X(kUint8, "uint8", 1)         \
  X(kUint16, "uint16", 2)       \
  X(kUint32, "uint32", 4)       \
  X(kUint64, "uint64", 8)       \
  X(kComplex64, "complex64", 8) \
  X(kComplex128, "complex128", 16)

enum class ValueDType : int {
#define TFMEM_ENUMERATE(name, text, bytes) name,
  TFMEM_VALUE_DTYPES(TFMEM_ENUMERATE)
#undef TFMEM_ENUMERATE
};

const char* NameOf(ValueDType dtype);
int BytesOf(ValueDType dtype);
constexpr ValueDType ValueDTypeOf(DType dtype) {
  return static_cast<ValueDType>(static_cast<int>(dtype));
}

inline constexpr int kMostRank = 254;  // TensorFlow's

// A tensor's; a size of -1 is known when the region runs.
struct RegionType {
  ValueDType dtype = ValueDType::kFloat32;
  std::vector<int64_t> shape;
};

struct RegionStep {
  enum class Kind { kKernel, kCall, kView, kRead, kAssign };

  Kind kind = Kind::kView;
  int program = 0;             // of a kernel
  std::string op;              // of a call
  std::string attrs;           // of a call: a serialised NodeDef
  std::vector<int> inputs;     // values that it reads: of an assignment one
  int first_output = 0;        // values that it gives, in order
  int outputs = 0;             // how many
  std::vector<int> variables;  // of a call, of a read and an assignment one
  std::vector<std::string> members;
};

struct Region {
  int inputs = 0;  // how many of the values are the op's inputs
  std::vector<RegionType> variables;
  std::vector<RegionType> values;
  std::vector<Expression> programs;
  std::vector<RegionStep> steps;
  std::vector<int> outputs;
};

// Reads and checks a region; InvalidArgument names the line that is wrong, Unimplemented a program
// that no device runs.
absl::StatusOr<Region> ParseRegion(absl::string_view text);

}  // namespace tfmem
