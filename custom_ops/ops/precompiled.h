// The headers that cost most to read, for a precompiled header: setup.py compiles this once for
// each set of flags. Sources do not rely on it, and include what they need themselves.
#ifndef TFMEM_CUSTOM_OPS_OPS_PRECOMPILED_H_
#define TFMEM_CUSTOM_OPS_OPS_PRECOMPILED_H_

#define EIGEN_USE_THREADS  // as matmul.cc needs it; it has to stand before all of Eigen

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

#endif  // TFMEM_CUSTOM_OPS_OPS_PRECOMPILED_H_
