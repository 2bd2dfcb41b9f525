// A region's call of MaxPool, AvgPool or one of their gradients, as cuDNN computes it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_pooling.h"
#include "custom_ops/ops/fusion/region_shapes.h"

namespace tfmem {

bool IsPooling(const std::string& op);

// The pooling that a call is, padded as TensorFlow's GPU kernel has it; `values` are the shapes of
// all values. Unimplemented if cuDNN does not compute it; InvalidArgument if shapes do not fit.
absl::StatusOr<PoolingForm> PoolingOf(const CompiledRegion& compiled, int step,
                                      const std::vector<tensorflow::TensorShape>& values);

}  // namespace tfmem
