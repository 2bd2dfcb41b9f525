// The CPU's kernel of an op that is placed on a GPU, for a GPU that none of its programs fits.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/host_copies.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tensorflow {
class Device;
}

namespace tfmem {

// An op whose GPU kernel may run its CPU kernel registers the latter a second time, with this
// label. By the label it is found even if another kernel of the CPU has a higher priority.
inline constexpr char kHostKernelLabel[] = "tfmem_host";

// How an error or a warning about an op's programs ends.
inline constexpr char kOptimizeForThisGpu[] =
    "run tfmem.optimize on the machine with this GPU, or name its compute capability in "
    "architectures";

// The process's CPU.
absl::StatusOr<tensorflow::Device*> HostDevice(tensorflow::OpKernelContext* ctx);

class HostKernel {
 public:
  // `advice`: what to do so that a program fits.
  explicit HostKernel(std::string advice) : advice_(std::move(advice)) {}

  // Copies the inputs to host memory, runs the kernel, and enqueues copies of its outputs. The host
  // waits for the inputs. An output that `ctx` has already is written, others are allocated.
  //
  // `lacking` says why no program runs on the GPU. It is printed once for each op and device. OK
  // prints nothing: the op is the CPU's wherever it is placed.
  // `handles` take the place of the inputs from `first` on.
  absl::Status Run(tensorflow::OpKernelContext* ctx, HostCopies* copies,
                   const absl::Status& lacking, int first = 0,
                   absl::Span<const tensorflow::Tensor> handles = {});

 private:
  absl::Status Open(tensorflow::OpKernelContext* ctx, tensorflow::Device* host,
                    const absl::Status& lacking);

  const std::string advice_;
  std::mutex mutex_;
  std::unique_ptr<tensorflow::OpKernel> kernel_;
};

}  // namespace tfmem
