// The kernels and the libraries' calls of a region on a GPU, for given shapes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_graph.h"
#include "custom_ops/ops/cuda/gpu_product.h"
#include "custom_ops/ops/fusion/fusion_kernel.h"
#include "custom_ops/ops/fusion/region_shapes.h"

namespace tfmem {

// What a kernel step launches.
struct LoadedKernel {
  const FusionKernel* description = nullptr;
  std::shared_ptr<const GpuKernel> kernel;
};

// A call as a product of matrices; `values` are the shapes of all values. Unimplemented if it is
// none that cuBLASLt computes; InvalidArgument if its shapes do not fit.
absl::StatusOr<ProductForm> ProductOf(const CompiledRegion& compiled, int step, bool tf32,
                                      const std::vector<tensorflow::TensorShape>& values);

class GpuSteps : public RegionSteps {
 public:
  // `kernels`: of the steps that are kernels. `tf32`: whether calls may use it. `trial`: where they
  // may run while they are prepared. `timed`: whether they are timed there.
  GpuSteps(GpuLink* link, const CompiledRegion& compiled, const std::vector<LoadedKernel>& kernels,
           bool tf32, const GpuTrial* trial, bool timed)
      : link_(link),
        compiled_(compiled),
        kernels_(kernels),
        tf32_(tf32),
        trial_(trial),
        timed_(timed) {
    steps_.resize(compiled.region.steps.size());
  }

  absl::StatusOr<std::vector<Shape>> PrepareKernel(int step, const Expression& program,
                                                   const std::vector<Shape>& inputs) override;
  absl::Status PrepareCall(int step, const std::vector<tensorflow::TensorShape>& values) override;
  bool MayShare(int step, int input, int output) const override;
  int64_t WorkspaceBytes(int step) const override { return steps_[step].workspace; }

  // What runs, and after what, once all is prepared; kernels whose CTAs wait for each other come
  // after the zeros over which they do. Says in `shapes` where in the arena the values lie then,
  // and how large it is: steps that run side by side share no memory.
  std::vector<GraphStep> GraphSteps(RegionShapes* shapes);
  // The words of each. Addresses: of all values, of the arena.
  std::vector<GraphWords> Words(const std::vector<uint64_t>& values, uint64_t arena) const;

 private:
  struct Step {
    KernelLaunch launch;
    std::vector<int64_t> buffers;  // where they begin in the workspace
    int barrier = -1;              // which one
    std::shared_ptr<GpuProduct> product;
    bool swapped = false;  // whether the call's second input is the product's left operand
    // What cuDNN computes, at the addresses of the inputs, of the output, and of the workspace.
    std::function<absl::Status(cuda::Stream, absl::Span<const uint64_t>)> cudnn;
    int64_t zeros = 0;  // bytes of a sum of nothing
    int64_t workspace = 0;
    int64_t workspace_offset = 0;  // in the arena
  };

  bool IsKernel(int step) const { return kernels_[step].description != nullptr; }
  bool Runs(int step) const {
    const Step& found = steps_[step];
    return IsKernel(step) || found.product != nullptr || found.cudnn != nullptr || found.zeros > 0;
  }
  absl::Status PrepareProduct(int step, const ProductForm& form);
  absl::Status PrepareConvolution(int step, const std::vector<tensorflow::TensorShape>& values);
  absl::Status PreparePooling(int step, const std::vector<tensorflow::TensorShape>& values);
  void SetWorkspace(int step, int64_t bytes);
  void SetZeros(int step, int64_t numbers);
  GraphStep GraphStepOf(int step) const;
  GraphWords KernelWords(int step, const std::vector<uint64_t>& values, uint64_t arena) const;

  GpuLink* const link_;
  const CompiledRegion& compiled_;
  const std::vector<LoadedKernel>& kernels_;
  const bool tf32_;
  const GpuTrial* trial_;
  const bool timed_;
  std::vector<Step> steps_;
  int barriers_ = 0;
  int64_t barriers_offset_ = 0;  // in the arena
};

}  // namespace tfmem
