#include "custom_ops/ops/recurrent/recurrent_kernel.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr size_t kMostPending = 4;
constexpr size_t kStatusBytes = sizeof(int32_t);

}  // namespace

absl::StatusOr<std::shared_ptr<RecurrentKernel>> RecurrentKernel::Load(
    GpuLink* link, const RecurrentProgram& program) {
  std::shared_ptr<RecurrentKernel> made(new RecurrentKernel(program));
  TFMEM_ASSIGN_OR_RETURN(made->kernel_, GpuKernel::Load(link, program.image));
  const int64_t resident = made->kernel_->resident();
  if (program.image.cooperative && resident < program.ctas) {
    return absl::FailedPreconditionError(absl::StrCat("a group of ", program.ctas,
                                                      " CTAs does not fit: this GPU runs ",
                                                      resident, " of them at once"));
  }
  if (program.fallback.has_value()) {
    TFMEM_ASSIGN_OR_RETURN(made->fallback_, GpuKernel::Load(link, *program.fallback));
  }
  return made;
}

absl::Status RecurrentKernel::Launch(cuda::Stream stream, KernelParameter* parameter,
                                     int64_t groups) const {
  const bool together = program_.image.cooperative;
  const int64_t at_once = together ? kernel_->resident() / program_.ctas : groups;
  const std::vector<GroupRange> launches = CutLaunches(groups, at_once);
  for (const Turn& turn : Turns(parameter->time(), program_.stages)) {
    parameter->SetTurn(turn);
    for (const GroupRange& launch : launches) {
      parameter->SetGroups(launch.first, groups);
      TFMEM_RETURN_IF_ERROR(
          kernel_->Launch(stream, {program_.ctas, launch.count}, parameter->words.data()));
    }
  }
  return absl::OkStatus();
}

absl::Status RecurrentKernel::LaunchFallback(cuda::Stream stream, KernelParameter* parameter,
                                             int64_t groups) const {
  for (const GroupRange& launch : CutLaunches(groups, groups)) {
    parameter->SetGroups(launch.first, groups);
    TFMEM_RETURN_IF_ERROR(fallback_->Launch(stream, {1, launch.count}, parameter->words.data()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<RecurrentKernel>> RecurrentKernels::Get(GpuLink* link,
                                                                       size_t index) {
  Entry& entry = loaded_[index];
  if (!entry.status.ok()) return entry.status;
  if (entry.kernel == nullptr) {
    absl::StatusOr<std::shared_ptr<RecurrentKernel>> kernel =
        programs_[index].ok() ? RecurrentKernel::Load(link, *programs_[index])
                              : programs_[index].status();
    // Memory may be there the next time; what else is wrong stays so.
    if (!kernel.ok() && !absl::IsResourceExhausted(kernel.status())) entry.status = kernel.status();
    if (!kernel.ok()) return kernel.status();
    entry.kernel = *kernel;
  }
  return entry.kernel;
}

absl::StatusOr<std::shared_ptr<RecurrentKernel>> RecurrentKernels::Choose(GpuLink* link,
                                                                          int64_t batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<RecurrentKernel> last;
  std::string reasons;
  absl::Status failure;  // of a program that may fit
  for (size_t i = 0; i < programs_.size(); ++i) {
    absl::StatusOr<std::shared_ptr<RecurrentKernel>> kernel = Get(link, i);
    if (!kernel.ok()) {
      absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", "program ", i, ": ",
                      kernel.status().message());
      const bool worst = absl::IsResourceExhausted(kernel.status());
      if (worst || (failure.ok() && !absl::IsFailedPrecondition(kernel.status()))) {
        failure = kernel.status();
      }
      continue;
    }
    last = *kernel;
    if (last->program().max_batch >= batch) return last;
  }
  if (last != nullptr) return last;
  if (programs_.empty()) return NoProgram(link);
  return absl::Status(failure.ok() ? absl::StatusCode::kFailedPrecondition : failure.code(),
                      reasons);
}

std::shared_ptr<RecurrentKernel> RecurrentKernels::WithoutWaiting(GpuLink* link) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::StatusOr<std::shared_ptr<RecurrentKernel>> first = Get(link, 0);
  return first.ok() && (*first)->program().stages > 0 ? *first : nullptr;
}

absl::Status StatusWatch::Read(GpuLink* link, cuda::Stream stream, const void* status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_ || pending_.size() >= kMostPending) return absl::OkStatus();
  TFMEM_ASSIGN_OR_RETURN(PinnedBlock block,
                         PinnedBlock::Acquire(link, kStatusBytes, 0, "kernel status"));
  cuda::ScopedContext current(link->driver(), link->context());
  if (!current.status().ok()) return current.status();
  if (block.last_use()) {
    TFMEM_RETURN_IF_ERROR(block.last_use().MakeWait(stream));
  }
  TFMEM_ASSIGN_OR_RETURN(PooledEvent copied, link->NewEvent());
  absl::Status done = cuda::Check(
      link->driver().cuMemcpyDtoHAsync_v2(
          block.data(), reinterpret_cast<cuda::DevicePointer>(status), kStatusBytes, stream),
      "cuMemcpyDtoHAsync");
  if (done.ok()) done = copied.Record(stream);
  if (!done.ok()) {
    if (!link->Drain(stream)) block.Abandon();
    return done;
  }
  block.set_last_use(std::move(copied));
  pending_.push_back(std::move(block));
  return absl::OkStatus();
}

absl::StatusOr<bool> StatusWatch::Failed() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!pending_.empty() && !failed_) {
    TFMEM_ASSIGN_OR_RETURN(bool passed, pending_.front().last_use().Passed());
    if (!passed) break;
    failed_ = *static_cast<const int32_t*>(pending_.front().data()) == kStatusWaited;
    pending_.pop_front();
  }
  return failed_;
}

}  // namespace tfmem
