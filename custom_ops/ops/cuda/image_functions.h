// Where a graph keeps the code of its GPU kernels: once for each digest, in functions of its
// library, which the attributes `images` name (custom_ops/image_functions.py writes them).
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

struct ProgramText {
  std::string header;
  std::string code;
};

// The attribute `programs`, each with the code that its function of `images` holds. InvalidArgument
// says which op lacks what.
absl::StatusOr<std::vector<ProgramText>> ReadPrograms(tensorflow::OpKernelConstruction* ctx);

}  // namespace tfmem
