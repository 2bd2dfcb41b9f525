#include "custom_ops/ops/memory/gpu_mechanism.h"

#include "absl/strings/str_cat.h"

namespace tfmem {

absl::Status GpuMechanism::Read(tensorflow::OpKernelConstruction* ctx) {
  std::string mechanism;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("mechanism", &mechanism));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("label", &label_));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("host_budget", &host_budget_));
  if (label_.empty()) label_ = ctx->def().name();
  managed_ = mechanism == "managed";
  if (mechanism != "file") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mechanism \"file\" of '", ctx->def().name(),
                   "' is the CPU's; on a GPU use \"copy\", \"managed\" or \"auto\""));
}

absl::StatusOr<std::shared_ptr<GpuTicket>> GpuMechanism::Start(const tensorflow::Tensor& source,
                                                               cuda::Stream compute) const {
  if (managed_) {
    return ManagedTicket::Start(compute, label_, source.data(), source.TotalBytes(), Share(source));
  }
  return CopyTicket::Start(compute, label_, source.data(), source.TotalBytes(), host_budget_,
                           Share(source));
}

}  // namespace tfmem
