// Arithmetic with sizes that a graph or a tensor brings: nothing wraps, and no shape aborts the
// process.
#pragma once

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfmem {

// What kernels count to: rows, steps, units.
inline constexpr int64_t kMostOfASize = std::numeric_limits<int32_t>::max();

// Not negative; or nothing, once a result does not fit 64 bits or an operand was negative.
class Size {
 public:
  Size(int64_t value) : value_(value < 0 ? -1 : value) {}

  bool ok() const { return value_ >= 0; }
  int64_t value() const { return value_; }  // -1 for nothing

  friend Size operator*(Size a, Size b) {
    int64_t result = 0;
    return a.ok() && b.ok() && !__builtin_mul_overflow(a.value_, b.value_, &result) ? result : -1;
  }
  friend Size operator+(Size a, Size b) {
    int64_t result = 0;
    return a.ok() && b.ok() && !__builtin_add_overflow(a.value_, b.value_, &result) ? result : -1;
  }

 private:
  int64_t value_;
};

// A shape of these dimensions; InvalidArgument if one is negative, or if there are more elements
// than 64 bits count.
inline absl::Status BuildShape(absl::Span<const int64_t> dimensions,
                               tensorflow::TensorShape* shape) {
  return tensorflow::TensorShape::BuildTensorShape(dimensions, shape);
}

inline absl::Status CheckRange(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", value, "; expected ", least, " to ", most));
}

}  // namespace tfmem
