// An op that takes variables of a GPU, run by its kernel of the CPU.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// Copies bytes within the memory of a GPU, on a stream.
CopyBytes CopyOn(GpuLink* link, cuda::Stream stream);

struct HostCall {
  int first = 0;                       // variable i is input `first` + i of the op
  absl::Span<const VariableUse> uses;  // of the variables
  bool dry_run = false;                // whether every variable stays as it is
};

// Runs `kernel` with copies of the variables in host memory, and gives the variables what the
// kernel assigned to these. Those that are assigned are locked meanwhile, as in `RegionVariables`.
// After a failure no variable has changed.
absl::Status RunOnHost(HostKernel* kernel, tensorflow::OpKernelContext* ctx, GpuLink* link,
                       cuda::Stream stream, const HostCall& call, const absl::Status& lacking);

}  // namespace tfmem
