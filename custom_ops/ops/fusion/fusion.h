// What the kernels of TfmemFusion share.
#pragma once

#include "absl/status/statusor.h"
#include "custom_ops/ops/fusion/region.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// The attribute `region`, checked against the op's inputs and outputs.
absl::StatusOr<Region> ReadFusionRegion(tensorflow::OpKernelConstruction* ctx);

}  // namespace tfmem
