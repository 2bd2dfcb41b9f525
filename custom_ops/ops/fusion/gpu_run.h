// Runs a region on a GPU: kernels and products over one arena, as one CUDA graph for each shape.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/fusion/gpu_steps.h"
#include "custom_ops/ops/fusion/region_execution.h"
#include "custom_ops/ops/fusion/region_shapes.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// What is known about one set of shapes.
struct GpuPlan {
  RegionShapes shapes;
  GpuSteps steps;
  std::unique_ptr<GpuGraph> graph;  // null: nothing runs
};

class GpuRegionRunner {
 public:
  // Reads the region, and the attributes `programs` and `images`: a kernel for each step of the
  // region that is one, in their order; and the same for other GPUs behind them. There may be none
  // at all.
  static absl::StatusOr<std::unique_ptr<GpuRegionRunner>> Create(
      tensorflow::OpKernelConstruction* ctx);

  // Inputs, variables and outputs are those of `ctx`. Enqueues on `stream`, which has to be that of
  // TensorFlow's device, and waits for nothing, unless products are timed. If the GPU runs none of
  // the sets of kernels, the CPU runs the region, and the host waits. Any threads may call. After a
  // failure nothing was enqueued, and no variable assigned; but for a variable that must not share
  // its memory, and for which there was none.
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  explicit GpuRegionRunner(std::string name) : name_(std::move(name)) {}
  absl::Status ReadKernels(tensorflow::OpKernelConstruction* ctx, Region region,
                           const std::vector<ProgramText>& texts);
  absl::Status Load(GpuLink* link);
  absl::StatusOr<std::vector<LoadedKernel>> Loaded(GpuLink* link,
                                                   const std::vector<FusionKernel>& kernels) const;
  absl::StatusOr<std::shared_ptr<GpuPlan>> PlanFor(tensorflow::OpKernelContext* ctx, GpuLink* link,
                                                   cuda::Stream stream,
                                                   const RegionVariables& variables);

  const std::string name_;
  std::unique_ptr<const CompiledRegion> compiled_;  // null: there are no kernels for any GPU
  int inputs_ = 0;
  std::vector<VariableUse> uses_;  // by a kernel of the CPU
  HostKernel host_{kOptimizeForThisGpu};
  bool time_products_ = false;
  bool dry_run_ = false;
  std::vector<std::vector<FusionKernel>> kernels_;  // for each kind of GPU
  std::mutex mutex_;
  std::vector<LoadedKernel> loaded_;  // of each step of the region; empty until it first runs
  RecentShapes<std::shared_ptr<GpuPlan>> known_;
};

}  // namespace tfmem
