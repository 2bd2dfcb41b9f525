// TfmemMatMul's operands, checked, the same on all devices.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// One call: [rows, depth] by [depth, columns].
struct MatMulCall {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  const float* left = nullptr;
  const float* right = nullptr;
  const float* bias = nullptr;  // [columns], or null
  float* product = nullptr;
};

// Checks the inputs and allocates the product; InvalidArgument says which shape was found.
absl::StatusOr<MatMulCall> PrepareMatMul(tensorflow::OpKernelContext* ctx, bool transpose_left,
                                         bool transpose_right);

}  // namespace tfmem
