// A dynamic net on a GPU: one batch is one copy and one launch. Waits for no kernel.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/cuda/host_kernel.h"
#include "custom_ops/ops/dynamic/execute.h"
#include "custom_ops/ops/dynamic/gpu_script.h"
#include "custom_ops/ops/dynamic/gpu_sender.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// What a launch is given beside the batch: addresses in device memory.
struct GpuArguments {
  GpuCall call;
  uint64_t seed = 0;
  UpdateRule rule = kNoRule;
  std::array<float, 4> rates = {};
  const void* loss_gradients = nullptr;
  int gradient_type = -1;
  void* losses = nullptr;
  std::vector<const void*> parameters;
  std::vector<const void*> first;   // gradients, or slots of the rule
  std::vector<const void*> second;  // slots of the rule
  std::vector<const void*> outputs;
  std::vector<const void*> states;
  std::vector<const void*> state_gradients;
};

// From device memory to device memory.
absl::Status CopyOnDevice(cuda::Stream stream, void* to, const void* from, int64_t bytes);

// What to do so that a GPU has a program.
inline constexpr char kSpecializeForThisGpu[] =
    "call tfmem.dynamic.specialize on the machine with this GPU";

// The kernel of a node, and what is on its way to it.
class GpuNet {
 public:
  // InvalidArgument if the node's program is not for its kinds of nodes. It may have none.
  static absl::StatusOr<std::unique_ptr<GpuNet>> Create(tensorflow::OpKernelConstruction* ctx,
                                                        const DynamicSpec& spec);

  // FailedPrecondition if there is no program, or the link's device cannot run it.
  absl::Status Fits(GpuLink* link);
  absl::StatusOr<GpuSent> Script(const DynamicBatch& batch, const DynamicLayout& layout,
                                 const std::vector<LookedUp>& looked_up, const GpuCall& call) const;

  // Sends the scripts, launches, and then copies the lists of rows that were looked up to `rows`,
  // which has a tensor for each sparse parameter or none. `memory` holds sent.floats numbers.
  // Internal if a batch before this one was given up.
  absl::Status Launch(tensorflow::OpKernelContext* ctx, cuda::Stream stream, const GpuSent& sent,
                      const GpuArguments& arguments, void* memory,
                      const std::vector<tensorflow::Tensor*>& rows);

 private:
  // The kernel on one GPU.
  struct OnGpu {
    explicit OnGpu(GpuLink* link) : sender(link) {}
    ~OnGpu() { failure.set_last_use(sender.TakeEnd()); }
    std::unique_ptr<GpuKernel> kernel;
    GpuSender sender;
    PinnedBlock failure;  // a word that the kernel writes if it gives up
  };

  explicit GpuNet(const DynamicSpec& spec) : spec_(spec) {}
  absl::StatusOr<OnGpu*> Load(GpuLink* link);
  absl::Status Earlier(const OnGpu& on_gpu) const;
  std::vector<uint64_t> Words(const GpuArguments& arguments) const;

  const DynamicSpec& spec_;
  std::string name_;
  bool has_program_ = false;
  GpuProgram program_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<OnGpu>> gpus_;
};

// TfmemDynamic on a GPU.
class GpuDynamic {
 public:
  static absl::StatusOr<std::unique_ptr<GpuDynamic>> Create(tensorflow::OpKernelConstruction* ctx);
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  absl::Status Inputs(tensorflow::OpKernelContext* ctx, const DynamicBatch& batch,
                      GpuArguments* arguments) const;
  absl::Status Results(tensorflow::OpKernelContext* ctx, const DynamicBatch& batch,
                       GpuArguments* arguments) const;

  DynamicMode mode_;
  std::unique_ptr<GpuNet> net_;
  HostKernel host_{kSpecializeForThisGpu};
};

// TfmemDynamicStep on a GPU.
class GpuDynamicStep {
 public:
  static absl::StatusOr<std::unique_ptr<GpuDynamicStep>> Create(
      tensorflow::OpKernelConstruction* ctx);
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  DynamicUpdate update_;
  std::unique_ptr<GpuNet> net_;
  HostKernel host_{kSpecializeForThisGpu};
};

}  // namespace tfmem
