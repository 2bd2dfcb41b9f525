// GPU programs, loaded into a context and launched. Knows no TensorFlow.
#ifndef TFMEM_CUSTOM_OPS_OPS_GPU_KERNEL_H_
#define TFMEM_CUSTOM_OPS_OPS_GPU_KERNEL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/gpu_link.h"
#include "custom_ops/ops/gpu_program.h"
#include "custom_ops/ops/pinned_pool.h"

namespace tfmem {

// A program in a context. Shared by all ops with the same bytes; unloaded by TrimGpuKernels once no
// op holds it, because the driver may still run it when the last op goes.
class GpuKernel {
 public:
  // Loads `bytes`, once for each context. FailedPrecondition if the device cannot run it: another
  // architecture, too little shared memory, or not one group fits.
  static absl::StatusOr<std::shared_ptr<GpuKernel>> Load(GpuLink* link, const std::string& bytes);
  ~GpuKernel();

  const GpuProgram& program() const { return program_; }
  GpuLink* link() const { return link_; }
  int64_t processors() const { return processors_; }  // of the device

  // Enqueues the kernel, cut into as many launches as have to be. (See `Turns` and `CutLaunches`.)
  absl::Status Launch(cuda::Stream stream, KernelParameter* parameter, int64_t groups) const;
  // Enqueues the fallback: it does nothing if the status word is zero.
  absl::Status LaunchFallback(cuda::Stream stream, KernelParameter* parameter,
                              int64_t groups) const;
  // Enqueues so many CTAs of a kernel that has no groups; `parameter` is its struct.
  absl::Status LaunchBlocks(cuda::Stream stream, void* parameter, int64_t blocks) const;

 private:
  friend struct GpuKernelAccess;
  GpuKernel(GpuLink* link, GpuProgram program) : link_(link), program_(std::move(program)) {}
  absl::Status Open();
  absl::Status CheckDevice() const;
  absl::Status FindResidency();
  cuda::LaunchConfig Config(int64_t groups, cuda::LaunchAttribute* attributes) const;

  GpuLink* const link_;
  const GpuProgram program_;
  cuda::Module module_ = nullptr;
  cuda::Function entry_ = nullptr;
  cuda::Function fallback_ = nullptr;
  bool opened_ = false;  // so that it may have been launched
  int64_t processors_ = 0;
  int64_t resident_ = 0;  // CTAs, or clusters of them, that run at once
};

// The kernels of one op, in ascending order of the batch that they were chosen for.
class GpuKernels {
 public:
  explicit GpuKernels(std::vector<std::string> programs) : programs_(std::move(programs)) {}

  // The first that was chosen for `batch` or more and runs on the link's device; else the last that
  // runs at all. FailedPrecondition says why none does; ResourceExhausted if one might, once there
  // is memory for it.
  absl::StatusOr<std::shared_ptr<GpuKernel>> Choose(GpuLink* link, int64_t batch);
  // The first, if it runs and its blocks never wait for each other: a launch for each stage of each
  // step. Else null.
  std::shared_ptr<GpuKernel> WithoutWaiting(GpuLink* link);

 private:
  struct Entry {
    absl::Status status;  // why the program can never be loaded
    std::shared_ptr<GpuKernel> kernel;
  };
  const absl::StatusOr<std::shared_ptr<GpuKernel>> Get(GpuLink* link, size_t index);

  const std::vector<std::string> programs_;
  std::mutex mutex_;
  std::vector<Entry> loaded_;  // of the one device that the op is placed on
};

// What a kernel leaves in its status word. In both cases the fallback behind it computes the
// results.
inline constexpr int32_t kStatusWaited = 1;    // its blocks waited for each other too long
inline constexpr int32_t kStatusTooLarge = 2;  // a value of this call was too large for it

// Looks, without waiting, whether the blocks of a kernel ever waited too long.
class StatusWatch {
 public:
  // Enqueues reading `status`; skipped while earlier ones have not come back.
  absl::Status Read(GpuLink* link, cuda::Stream stream, const void* status);
  // Whether any status that has come back was kStatusWaited; from then on always.
  absl::StatusOr<bool> Failed();

 private:
  std::mutex mutex_;
  std::deque<PinnedBlock> pending_;  // each with the event behind its copy
  bool failed_ = false;
};

// Unloads the kernels that no op holds.
void TrimGpuKernels();

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_GPU_KERNEL_H_
