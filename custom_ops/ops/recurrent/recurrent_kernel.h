// The kernels of TfmemRecurrent: chosen, cut into launches, watched. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "custom_ops/ops/recurrent/recurrent_program.h"

namespace tfmem {

// A program in a context.
class RecurrentKernel {
 public:
  // FailedPrecondition if the device cannot run it (see GpuKernel), or if not one group fits.
  static absl::StatusOr<std::shared_ptr<RecurrentKernel>> Load(GpuLink* link,
                                                               const RecurrentProgram& program);

  const RecurrentProgram& program() const { return program_; }
  GpuLink* link() const { return kernel_->link(); }

  // Enqueues the kernel, cut into as many launches as have to be. (See `Turns` and `CutLaunches`.)
  absl::Status Launch(cuda::Stream stream, KernelParameter* parameter, int64_t groups) const;
  // Enqueues the fallback: it does nothing if the status word is zero.
  absl::Status LaunchFallback(cuda::Stream stream, KernelParameter* parameter,
                              int64_t groups) const;

 private:
  explicit RecurrentKernel(const RecurrentProgram& program) : program_(program) {}

  const RecurrentProgram program_;
  std::unique_ptr<GpuKernel> kernel_;
  std::unique_ptr<GpuKernel> fallback_;  // or null
};

// The kernels of one op, in ascending order of the batch that they were chosen for.
class RecurrentKernels {
 public:
  using Program = absl::StatusOr<RecurrentProgram>;  // or what is wrong with it

  explicit RecurrentKernels(std::vector<Program> programs)
      : programs_(std::move(programs)), loaded_(programs_.size()) {}

  // The first that was chosen for `batch` or more and runs on the link's device; else the last that
  // runs at all. FailedPrecondition if no program fits the device, with what each is for. Otherwise
  // the error of one that might run: ResourceExhausted, once there is memory for it.
  absl::StatusOr<std::shared_ptr<RecurrentKernel>> Choose(GpuLink* link, int64_t batch);
  // The first, if it runs and its CTAs never wait for each other: a launch for each stage of each
  // step. Else null.
  std::shared_ptr<RecurrentKernel> WithoutWaiting(GpuLink* link);

 private:
  struct Entry {
    absl::Status status;  // why the program can never be loaded
    std::shared_ptr<RecurrentKernel> kernel;
  };
  absl::StatusOr<std::shared_ptr<RecurrentKernel>> Get(GpuLink* link, size_t index);

  const std::vector<Program> programs_;
  std::mutex mutex_;
  std::vector<Entry> loaded_;  // of the one device that the op is placed on
};

// What a kernel leaves in its status word. In both cases the fallback behind it computes the
// results.
inline constexpr int32_t kStatusWaited = 1;    // its CTAs waited for each other too long
inline constexpr int32_t kStatusTooLarge = 2;  // a value of this call was too large for it

// Looks, without waiting, whether the CTAs of a kernel ever waited too long.
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

}  // namespace tfmem
