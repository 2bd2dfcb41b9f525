// Runs a region on the CPU: kernels by the tile interpreter, calls by TensorFlow's own kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/tile_run.h"
#include "custom_ops/ops/fusion/call_product.h"
#include "custom_ops/ops/fusion/region_execution.h"
#include "custom_ops/ops/fusion/region_shapes.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// Kernels as tile programs, and products; TensorFlow's own kernels need no preparation.
class CpuSteps : public RegionSteps {
 public:
  // `compiled` outlives this.
  CpuSteps(const CompiledRegion& compiled, int threads)
      : compiled_(&compiled),
        kernels_(compiled.region.steps.size()),
        products_(compiled.region.steps.size()),
        threads_(threads) {}

  absl::StatusOr<std::vector<Shape>> PrepareKernel(int step, const Expression& program,
                                                   const std::vector<Shape>& inputs) override;
  absl::Status PrepareCall(int step, const std::vector<tensorflow::TensorShape>& values) override;
  bool MayShare(int step, int input, int output) const override {
    return kernels_[step]->MayShare(input, output);
  }
  int64_t WorkspaceBytes(int step) const override {
    if (products_[step] != nullptr) return products_[step]->WorkspaceBytes(threads_);
    return kernels_[step] == nullptr ? 0 : kernels_[step]->WorkspaceBytes(threads_);
  }

  const PreparedExpression& kernel(int step) const { return *kernels_[step]; }
  // Null: TensorFlow's kernel runs.
  const CallProduct* product(int step) const { return products_[step].get(); }
  // How many threads a run is divided among at most: waking one takes longer than small regions do,
  // and once it is awake, the region's next steps have it soon.
  int UsefulThreads() const;

 private:
  const CompiledRegion* compiled_;
  std::vector<std::unique_ptr<const PreparedExpression>> kernels_;  // of the steps that are
  std::vector<std::unique_ptr<const CallProduct>> products_;        // of the calls that have one
  const int threads_;
  double work_ns_ = 0;  // of all kernels and products
};

struct CpuShapes {
  RegionShapes shapes;
  CpuSteps steps;
};

// What one run has: its arena, and the values as tensors. Later runs of the same shapes use it
// again.
struct RegionFrame {
  std::shared_ptr<const CpuShapes> known;
  std::vector<tensorflow::Tensor> arena;      // the values that lie in the arena
  std::vector<tensorflow::Tensor> held;       // those of this run that do not
  std::vector<const tensorflow::Tensor*> at;  // each value, in one of these, or the op's input
  tensorflow::Tensor memory;                  // the arena
};

class RegionRunner {
 public:
  // `keep_memory`: whether an arena may wait for the next run. Under a memory budget none may.
  // `dry_run`: whether variables stay as they are.
  RegionRunner(std::unique_ptr<const CompiledRegion> compiled, bool keep_memory, bool dry_run)
      : compiled_(std::move(compiled)), keep_memory_(keep_memory), dry_run_(dry_run) {}

  // Inputs, variables and outputs are those of `ctx`. Runs may overlap.
  absl::Status Run(tensorflow::OpKernelContext* ctx);

 private:
  struct Known {
    std::shared_ptr<const CpuShapes> shapes;
    std::vector<std::unique_ptr<RegionFrame>> idle;
  };

  absl::StatusOr<std::unique_ptr<RegionFrame>> TakeFrame(tensorflow::OpKernelContext* ctx,
                                                         const RegionVariables& variables);
  absl::StatusOr<std::unique_ptr<RegionFrame>> MakeFrame(
      tensorflow::OpKernelContext* ctx, std::shared_ptr<const CpuShapes> known) const;
  void GiveBack(std::unique_ptr<RegionFrame> frame);

  const std::unique_ptr<const CompiledRegion> compiled_;
  const bool keep_memory_;
  const bool dry_run_;
  std::mutex mutex_;
  RecentShapes<Known> known_;
};

}  // namespace tfmem
