// GPU kernels, loaded into a context and launched. Knows no TensorFlow, and no op.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/kernel_image.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

// The compute capability of the link's device: 90 for 9.0.
absl::StatusOr<int64_t> ComputeCapability(GpuLink* link);
// FailedPrecondition, in the words of `GpuKernel::Load`, where there is no program that could fit.
absl::Status NoProgram(GpuLink* link);

// Code in a context. Shared by all kernels with that digest; unloaded by TrimGpuKernels once none
// holds it, because the driver may still run it when the last op goes.
class GpuModule {
 public:
  static absl::StatusOr<std::shared_ptr<GpuModule>> Load(GpuLink* link, const KernelImage& image);
  ~GpuModule();

 private:
  friend class GpuKernel;
  friend void TrimGpuKernels();
  explicit GpuModule(GpuLink* link) : link_(link) {}

  GpuLink* const link_;
  cuda::Module module_ = nullptr;
  std::atomic<bool> launched_{false};
};

// CTAs of a launch.
struct Grid {
  int64_t x = 1;
  int64_t y = 1;
};

// An image that can be launched.
class GpuKernel {
 public:
  // FailedPrecondition if the device or its driver cannot run it: another architecture, too little
  // shared memory, PTX of a later version, or not one cluster fits.
  static absl::StatusOr<std::unique_ptr<GpuKernel>> Load(GpuLink* link, const KernelImage& image);

  GpuLink* link() const { return link_; }
  int64_t processors() const { return processors_; }  // of the device
  int64_t resident() const { return resident_; }      // CTAs that it runs at once

  // Enqueues the kernel; `parameter` is the struct that it takes.
  absl::Status Launch(cuda::Stream stream, Grid grid, const void* parameter) const;

  // This launch as a node of a graph; `parameters`, which holds the struct's address, has to
  // stay until the node is made. The context has to be current.
  cuda::KernelNodeParameters Node(Grid grid, void** parameters) const;
  absl::Status AddTo(cuda::Graph graph, const cuda::GraphNode* before, size_t count, Grid grid,
                     void** parameters, cuda::GraphNode* node) const;

 private:
  GpuKernel(GpuLink* link, const KernelImage& image) : link_(link), image_(image) {}
  absl::Status Open();
  absl::Status CheckDevice() const;
  absl::Status FindResidency();
  cuda::LaunchConfig Config(Grid grid, cuda::LaunchAttribute* attributes) const;

  GpuLink* const link_;
  const KernelImage image_;
  std::shared_ptr<GpuModule> module_;
  cuda::Function entry_ = nullptr;
  int64_t processors_ = 0;
  int64_t resident_ = 0;
};

// Unloads the code that no kernel holds.
void TrimGpuKernels();

}  // namespace tfmem
