#include "custom_ops/ops/memory/gpu_tickets.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/faults.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

cuda::DevicePointer Address(const void* pointer) {
  return reinterpret_cast<cuda::DevicePointer>(pointer);
}

// Makes `stream` wait for the present position of `compute`.
absl::Status Follow(GpuLink* link, cuda::Stream stream, cuda::Stream compute) {
  TFMEM_ASSIGN_OR_RETURN(PooledEvent now, link->Mark(compute));
  return now.MakeWait(stream);
}

absl::Status CheckManaged(GpuLink* link, const void* pointer, const std::string& label) {
  unsigned managed = 0;
  const cuda::Result result = link->driver().cuPointerGetAttribute(
      &managed, cuda::kPointerAttributeIsManaged, Address(pointer));
  if (result == cuda::kSuccess && managed != 0) return absl::OkStatus();
  if (result != cuda::kSuccess && result != cuda::kErrorInvalidValue) {
    return cuda::Check(result, "cuPointerGetAttribute");
  }
  return absl::FailedPreconditionError(
      absl::StrCat("mechanism \"managed\" moves unified memory only, and '", label,
                   "' is in ordinary device memory; start TensorFlow with unified memory ",
                   "(GPUOptions.experimental.use_unified_memory), or use mechanism \"copy\""));
}

}  // namespace

void Arrivals::Add(ArrivingBuffer buffer) {
  if (ArrivingBuffer* old = Find(buffer.target))
    buffers_.erase(buffers_.begin() + (old - buffers_.data()));
  buffers_.push_back(std::move(buffer));
}

ArrivingBuffer* Arrivals::Find(const void* target) {
  auto found = std::find_if(buffers_.begin(), buffers_.end(),
                            [&](const ArrivingBuffer& buffer) { return buffer.target == target; });
  return found == buffers_.end() ? nullptr : &*found;
}

bool Arrivals::Finish(GpuLink* link) {
  bool known = true;
  for (ArrivingBuffer& buffer : buffers_) {
    if (buffer.owner == nullptr) continue;  // awaited
    const absl::Status status = buffer.arrived.MakeWait(buffer.compute);
    cuda::ReportLostError(status);
    if (!status.ok() && !link->Drain(link->in_stream())) {
      Abandon(std::move(buffer.owner));
      known = false;
    }
    buffer.owner.reset();  // only now, see invariant 2
  }
  return known;
}

PooledEvent Arrivals::TakeLast() {
  return buffers_.empty() ? PooledEvent() : std::move(buffers_.back().arrived);
}

absl::Status GpuTicket::Await(cuda::Stream compute, const void* target) {
  if (bytes_ == 0) return absl::OkStatus();
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  Owner owner;  // dropped after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  ArrivingBuffer* buffer = arrivals_.Find(target);
  if (buffer == nullptr) return NotPrefetched();
  TFMEM_RETURN_IF_ERROR(link_->WaitTimed(compute, buffer->arrived));
  owner.swap(buffer->owner);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<CopyTicket>> CopyTicket::Start(cuda::Stream compute,
                                                              std::string label, const void* source,
                                                              size_t bytes, int64_t host_budget,
                                                              Owner owner) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(compute));
  std::shared_ptr<CopyTicket> ticket(new CopyTicket(std::move(label), link, compute, bytes));
  TFMEM_RETURN_IF_ERROR(ticket->StartOut(source, host_budget, std::move(owner)));
  return ticket;
}

absl::Status CopyTicket::StartOut(const void* source, int64_t host_budget, Owner owner) {
  if (bytes_ > 0) {
    cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok()) return current.status();
    TFMEM_ASSIGN_OR_RETURN(PinnedBlock block,
                           PinnedBlock::Acquire(link_, bytes_, host_budget, label()));
    TFMEM_ASSIGN_OR_RETURN(PooledEvent copied, link_->NewEvent());

    const cuda::Stream stream = link_->out_stream();
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kCopyOut, label()));
    TFMEM_RETURN_IF_ERROR(Follow(link_, stream, compute_));
    // The block's last user may still be copying from it.
    if (block.last_use()) TFMEM_RETURN_IF_ERROR(block.last_use().MakeWait(stream));
    absl::Status status = cuda::Check(
        link_->driver().cuMemcpyDtoHAsync_v2(block.data(), Address(source), bytes_, stream),
        "cuMemcpyDtoHAsync");
    if (status.ok()) status = copied.Record(stream);
    if (!status.ok()) {
      if (!link_->Drain(stream)) {
        block.Abandon();
        Abandon(std::move(owner));
      }
      return status;
    }
    // From here on the ticket holds what the copy touches, whatever else goes wrong.
    block_ = std::move(block);
    source_owner_ = std::move(owner);
    copied_ = std::move(copied);
  }
  ++counters().offloads;
  counters().bytes_out += bytes_;
  return absl::OkStatus();
}

CopyTicket::~CopyTicket() {
  if (!copied_) return;
  cuda::ScopedContext current(link_->driver(), link_->context());
  cuda::ReportLostError(current.status());
  // What the graph did not do, because the step was aborted: see invariant 2.
  lost_ |= !arrivals_.Finish(link_);
  if (source_owner_ != nullptr) {
    const absl::Status status = copied_.MakeWait(compute_);
    cuda::ReportLostError(status);
    if (!status.ok() && !link_->Drain(link_->out_stream())) {
      lost_ = true;
      Abandon(std::move(source_owner_));
    }
    source_owner_.reset();
  }
  if (lost_) {
    block_.Abandon();
    return;
  }
  // The block's next user must wait for the last copy that touches it. All copies in run on one
  // stream, after the copy out, so the latest covers the others.
  PooledEvent last = arrivals_.TakeLast();
  block_.set_last_use(last ? std::move(last) : std::move(copied_));
}

absl::Status CopyTicket::Release(cuda::Stream compute) {
  if (bytes_ == 0) return absl::OkStatus();
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  TFMEM_RETURN_IF_ERROR(link_->WaitTimed(compute, copied_));
  Owner owner;  // dropped after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  owner.swap(source_owner_);
  return absl::OkStatus();
}

absl::Status CopyTicket::StartIn(cuda::Stream compute, void* target, Owner owner) {
  if (bytes_ > 0) {
    cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok()) return current.status();
    TFMEM_ASSIGN_OR_RETURN(PooledEvent arrived, link_->NewEvent());

    const cuda::Stream stream = link_->in_stream();
    std::lock_guard<std::mutex> lock(mutex_);  // arrivals in the order of the stream
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kCopyIn, label()));
    TFMEM_RETURN_IF_ERROR(Follow(link_, stream, compute));  // invariant 1
    TFMEM_RETURN_IF_ERROR(copied_.MakeWait(stream));
    absl::Status status = cuda::Check(
        link_->driver().cuMemcpyHtoDAsync_v2(Address(target), block_.data(), bytes_, stream),
        "cuMemcpyHtoDAsync");
    if (status.ok()) status = arrived.Record(stream);
    if (!status.ok()) {
      if (!link_->Drain(stream)) {
        lost_ = true;
        Abandon(std::move(owner));
      }
      return status;
    }
    arrivals_.Add({target, compute, std::move(arrived), std::move(owner)});
  }
  ++counters().prefetches;
  counters().bytes_in += bytes_;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ManagedTicket>> ManagedTicket::Start(cuda::Stream compute,
                                                                    std::string label,
                                                                    const void* source,
                                                                    size_t bytes, Owner owner) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(compute));
  std::shared_ptr<ManagedTicket> ticket(
      new ManagedTicket(std::move(label), link, bytes, std::move(owner)));
  if (bytes > 0) {
    cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    TFMEM_RETURN_IF_ERROR(CheckManaged(link, source, ticket->label()));
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kCopyOut, ticket->label()));
    const cuda::Stream stream = link->out_stream();
    TFMEM_RETURN_IF_ERROR(Follow(link, stream, compute));
    TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuMemPrefetchAsync, Address(source), bytes,
                               cuda::kDeviceCpu, stream);
    TFMEM_ASSIGN_OR_RETURN(ticket->departed_, link->Mark(stream));
  }
  ++counters().offloads;
  counters().bytes_out += bytes;
  return ticket;
}

absl::Status ManagedTicket::StartIn(cuda::Stream compute, void* target, Owner owner) {
  if (bytes_ > 0) {
    cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok()) return current.status();
    const cuda::Stream stream = link_->in_stream();
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kCopyIn, label()));
    // The compute stream's position is when the plan wants the move to begin.
    TFMEM_RETURN_IF_ERROR(Follow(link_, stream, compute));
    TFMEM_RETURN_IF_ERROR(departed_.MakeWait(stream));
    TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuMemPrefetchAsync, Address(target), bytes_,
                               link_->device(), stream);
    TFMEM_ASSIGN_OR_RETURN(PooledEvent arrived, link_->Mark(stream));
    std::lock_guard<std::mutex> lock(mutex_);
    arrivals_.Add({target, compute, std::move(arrived), std::move(owner)});
  }
  ++counters().prefetches;
  counters().bytes_in += bytes_;
  return absl::OkStatus();
}

absl::Status MoveToDevice(cuda::Stream compute, const void* pointer, size_t bytes,
                          const std::string& label) {
  if (bytes == 0) return absl::OkStatus();
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(compute));
  cuda::ScopedContext current(link->driver(), link->context());
  if (!current.status().ok()) return current.status();
  TFMEM_RETURN_IF_ERROR(CheckManaged(link, pointer, label));
  const cuda::Stream stream = link->in_stream();
  TFMEM_RETURN_IF_ERROR(Follow(link, stream, compute));
  return cuda::Check(
      link->driver().cuMemPrefetchAsync(Address(pointer), bytes, link->device(), stream),
      "cuMemPrefetchAsync");
}

}  // namespace tfmem
