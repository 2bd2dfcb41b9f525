#include "custom_ops/ops/cuda/host_kernel.h"

#include <iostream>
#include <set>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/nested_params.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/node_def.pb.h"

namespace tfmem {
namespace {

using ::tensorflow::Device;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorValue;

constexpr char kKernelAttribute[] = "_kernel";  // where TensorFlow looks for a label

struct Warnings {
  std::mutex mutex;
  std::set<std::string> printed;
};

// What a graph runs is made again for each of its traces, so an op cannot remember what it said.
void WarnOnce(const std::string& text) {
  Warnings& all = ProcessWide<Warnings>();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.printed.insert(text).second) std::cerr << text << std::endl;
}

std::string NameOf(OpKernelContext* ctx) {
  return absl::StrCat("'", ctx->op_kernel().name(), "' (", ctx->op_kernel().type_string(), ")");
}

// Memory of the op's device for an output of the CPU's kernel.
absl::Status GiveOutput(OpKernelContext* ctx, int index, const Tensor& found, HostCopies* copies) {
  if (ctx->output_memory_type(index) == tensorflow::HOST_MEMORY) {
    ctx->set_output(index, found);
    return absl::OkStatus();
  }
  Tensor* output = ctx->mutable_output(index);
  if (output == nullptr) {
    TFMEM_RETURN_IF_ERROR(ctx->allocate_output(index, found.shape(), &output));
  }
  if (output->shape() != found.shape() || output->dtype() != found.dtype()) {
    return absl::InternalError(absl::StrCat(
        "output ", index, " of the CPU's kernel of ", NameOf(ctx), " is ", found.DebugString(0),
        "; expected ", output->DebugString(0), ": report this as a fault of tfmem"));
  }
  return copies->ToDevice(found, *output);
}

}  // namespace

absl::StatusOr<Device*> HostDevice(OpKernelContext* ctx) {
  const auto* library = ctx->function_library();
  const tensorflow::DeviceMgr* devices = library == nullptr ? nullptr : library->device_mgr();
  Device* host = devices == nullptr ? nullptr : devices->HostCPU();
  if (host != nullptr) return host;
  return absl::FailedPreconditionError(
      absl::StrCat("found no CPU for the kernel of ", NameOf(ctx),
                   "; expected the one of this process: do not hide it from TensorFlow"));
}

absl::Status HostKernel::Run(OpKernelContext* ctx, HostCopies* copies, const absl::Status& lacking,
                             int first, absl::Span<const Tensor> handles) {
  TFMEM_ASSIGN_OR_RETURN(Device * host, HostDevice(ctx));
  TFMEM_RETURN_IF_ERROR(Open(ctx, host, lacking));
  std::vector<Tensor> tensors(ctx->num_inputs());
  absl::InlinedVector<TensorValue, 8> inputs;
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    if (i >= first && i < first + static_cast<int>(handles.size())) {
      tensors[i] = handles[i - first];
    } else if (ctx->input_memory_type(i) == tensorflow::HOST_MEMORY) {
      tensors[i] = ctx->input(i);
    } else {
      TFMEM_ASSIGN_OR_RETURN(tensors[i], copies->ToHost(ctx->input(i)));
    }
    inputs.emplace_back(&tensors[i]);
  }
  TFMEM_RETURN_IF_ERROR(copies->Wait());
  OpKernelContext::Params params;
  FillParams(ctx, &params);
  params.device = host;
  params.resource_manager = host->resource_manager();
  params.op_device_context = nullptr;
  params.op_kernel = kernel_.get();
  params.inputs = inputs;
  const int count = kernel_->num_outputs();
  const std::vector<tensorflow::AllocatorAttributes> attributes(count);
  const std::vector<int> never_forward(count, OpKernelContext::Params::kNeverForward);
  params.output_attr_array = attributes.data();
  params.forward_from_array = never_forward.data();
  OpKernelContext inner(&params, count);
  kernel_->Compute(&inner);
  TFMEM_RETURN_IF_ERROR(inner.status());
  for (int i = 0; i < count; ++i) {
    TFMEM_RETURN_IF_ERROR(GiveOutput(ctx, i, *inner.mutable_output(i), copies));
  }
  return copies->Wait();
}

absl::Status HostKernel::Open(OpKernelContext* ctx, Device* host, const absl::Status& lacking) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (kernel_ != nullptr) return absl::OkStatus();
  tensorflow::NodeDef node = ctx->op_kernel().def();
  (*node.mutable_attr())[kKernelAttribute].set_s(kHostKernelLabel);
  absl::Status status;
  std::unique_ptr<OpKernel> made = tensorflow::CreateOpKernel(
      tensorflow::DEVICE_CPU, host, host->GetAllocator(tensorflow::AllocatorAttributes()), node,
      ctx->function_library()->graph_def_version(), &status);
  if (!status.ok() && lacking.ok()) return status;
  if (!status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrCat(NameOf(ctx), " has no program that runs on this GPU (", lacking.message(),
                     "), and the CPU cannot run it either (", status.message(), "): ", advice_));
  }
  kernel_ = std::move(made);
  if (lacking.ok()) return absl::OkStatus();
  WarnOnce(absl::StrCat("tfmem: ", NameOf(ctx), " has no program that runs on ",
                        ctx->device()->attributes().name(), " (", lacking.message(),
                        "); the CPU computes it instead, correctly but slower: ", advice_));
  return absl::OkStatus();
}

}  // namespace tfmem
