// A dynamic net on a GPU: one batch is one copy and one launch. Waits for nothing.
#ifndef TFMEM_CUSTOM_OPS_OPS_DYNAMIC_GPU_RUN_H_
#define TFMEM_CUSTOM_OPS_OPS_DYNAMIC_GPU_RUN_H_

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/dynamic/execute.h"
#include "custom_ops/ops/dynamic/gpu_script.h"
#include "custom_ops/ops/fusion/variables.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// Update rules, as kernels/dynamic.cuh numbers them; kNoRule writes gradients.
enum GpuRule { kNoRule, kSgd, kMomentum, kAdam };

// What a launch is given beside the batch: addresses in device memory.
struct GpuArguments {
  GpuCall call;
  uint64_t seed = 0;
  GpuRule rule = kNoRule;
  float rates[4] = {};
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

// The kernel of a node, and what is on its way to it.
class GpuNet {
 public:
  // FailedPrecondition or InvalidArgument if the node has no program for its kinds of nodes.
  static absl::StatusOr<std::unique_ptr<GpuNet>> Create(tensorflow::OpKernelConstruction* ctx,
                                                        const DynamicSpec& spec);

  absl::StatusOr<GpuSent> Script(const DynamicBatch& batch, const DynamicLayout& layout,
                                 const std::vector<LookedUp>& looked_up, const GpuCall& call) const;

  // Copies what is sent, and launches. `memory` holds sent.floats numbers. Internal if a batch
  // before this one was given up.
  absl::Status Launch(tensorflow::OpKernelContext* ctx, cuda::Stream stream, const GpuSent& sent,
                      const GpuArguments& arguments, void* memory, tensorflow::Tensor* device_sent);

 private:
  explicit GpuNet(const DynamicSpec& spec) : spec_(spec) {}
  absl::StatusOr<GpuKernel*> Kernel(GpuLink* link);
  absl::Status Send(cuda::Stream stream, GpuLink* link, const GpuSent& sent, void* to);
  absl::Status ReadStatus(cuda::Stream stream, GpuLink* link, const void* status);
  absl::Status Earlier();

  const DynamicSpec& spec_;
  std::string name_;
  GpuProgram program_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<GpuKernel>> kernels_;  // of each GPU
  std::deque<PinnedBlock> statuses_;                 // each with the event behind its copy
};

// TfmemDynamic on a GPU.
class GpuDynamic {
 public:
  static absl::StatusOr<std::unique_ptr<GpuDynamic>> Create(tensorflow::OpKernelConstruction* ctx);
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  absl::Status Inputs(tensorflow::OpKernelContext* ctx, const DynamicBatch& batch,
                      GpuArguments* arguments) const;
  absl::Status Gradients(tensorflow::OpKernelContext* ctx, const std::vector<LookedUp>& looked_up,
                         GpuArguments* arguments, std::vector<tensorflow::Tensor*>* rows) const;
  absl::Status Results(tensorflow::OpKernelContext* ctx, const DynamicBatch& batch,
                       GpuArguments* arguments) const;

  DynamicSpec spec_;
  std::unique_ptr<GpuNet> net_;
  std::vector<int64_t> widths_;
  int state_type_ = -1;
  bool forward_ = true;
  bool backward_ = false;
  bool keeps_ = false;
};

// TfmemDynamicStep on a GPU.
class GpuDynamicStep {
 public:
  static absl::StatusOr<std::unique_ptr<GpuDynamicStep>> Create(
      tensorflow::OpKernelConstruction* ctx);
  absl::Status Run(tensorflow::OpKernelContext* ctx, cuda::Stream stream);

 private:
  DynamicSpec spec_;
  std::unique_ptr<GpuNet> net_;
  std::vector<int64_t> widths_;
  GpuRule rule_ = kSgd;
  std::vector<VariableUse> uses_;
};

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_DYNAMIC_GPU_RUN_H_
