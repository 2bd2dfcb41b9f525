#include "custom_ops/ops/fusion/host_variables.h"

#include <map>
#include <string>
#include <utility>

#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/common_runtime/device.h"

namespace tfmem {
namespace {

using ::tensorflow::OpKernelContext;
using ::tensorflow::ResourceHandle;
using ::tensorflow::Tensor;
using ::tensorflow::Var;

// Variables in host memory, one for each of the op's, however many names that has.
class HostVariables {
 public:
  HostVariables(const RegionVariables* variables, HostCopies* copies, std::string device)
      : variables_(*variables), copies_(*copies), device_(std::move(device)) {}

  // A handle of the copy of a variable.
  absl::StatusOr<Tensor> HandleOf(int variable, tensorflow::DataType dtype) {
    const Var* original = variables_.Found(variable);
    if (const auto known = handles_.find(original); known != handles_.end()) return known->second;
    Tensor handle(tensorflow::DT_RESOURCE, tensorflow::TensorShape({}));
    Var* const made = new Var(dtype);  // which the handle owns
    handle.scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(made, device_);
    if (const Tensor* now = variables_.Now(variable); now != nullptr) {
      TFMEM_ASSIGN_OR_RETURN(*made->tensor(), copies_.ToHost(*now));
      made->is_initialized = true;
    }
    handles_.emplace(original, handle);
    return handle;
  }

  // What the copy has now; null if it has no value.
  const Tensor* Now(int variable) const {
    const Tensor& handle = handles_.at(variables_.Found(variable));
    auto* const copy = static_cast<Var*>(handle.scalar<ResourceHandle>()().resource().get());
    return copy->is_initialized ? copy->tensor() : nullptr;
  }

 private:
  const RegionVariables& variables_;
  HostCopies& copies_;
  const std::string device_;
  std::map<const Var*, Tensor> handles_;
};

}  // namespace

CopyBytes CopyOn(GpuLink* link, cuda::Stream stream) {
  return [link, stream](void* to, const void* from, int64_t bytes) -> absl::Status {
    const cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuMemcpyDtoDAsync_v2,
                               reinterpret_cast<cuda::DevicePointer>(to),
                               reinterpret_cast<cuda::DevicePointer>(from), bytes, stream);
    return absl::OkStatus();
  };
}

absl::Status RunOnHost(HostKernel* kernel, OpKernelContext* ctx, GpuLink* link, cuda::Stream stream,
                       const HostCall& call, const absl::Status& lacking) {
  RegionVariables variables(ctx, call.first, call.uses, CopyOn(link, stream), call.dry_run);
  TFMEM_RETURN_IF_ERROR(variables.Open());
  TFMEM_ASSIGN_OR_RETURN(const tensorflow::Device* host, HostDevice(ctx));
  HostCopies copies(ctx, link, stream);  // end before the locks do
  HostVariables on_host(&variables, &copies, host->name());
  std::vector<Tensor> handles;
  for (size_t i = 0; i < call.uses.size(); ++i) {
    TFMEM_ASSIGN_OR_RETURN(handles.emplace_back(), on_host.HandleOf(i, call.uses[i].dtype));
  }
  TFMEM_RETURN_IF_ERROR(kernel->Run(ctx, &copies, lacking, call.first, handles));
  if (call.dry_run) return absl::OkStatus();
  std::vector<std::pair<int, Tensor>> assigned;
  for (size_t i = 0; i < call.uses.size(); ++i) {
    const Tensor* now = call.uses[i].assigned ? on_host.Now(i) : nullptr;
    if (now == nullptr) continue;
    Tensor value;
    TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(now->dtype(), now->shape(), &value));
    TFMEM_RETURN_IF_ERROR(copies.ToDevice(*now, value));
    assigned.emplace_back(i, std::move(value));
  }
  TFMEM_RETURN_IF_ERROR(copies.Wait());
  for (auto& [variable, value] : assigned) {
    TFMEM_RETURN_IF_ERROR(variables.Assign(variable, std::move(value)));
  }
  return absl::OkStatus();
}

}  // namespace tfmem
