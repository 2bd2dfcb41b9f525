#include "custom_ops/ops/memory/gpu_link.h"

#include <map>

#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

struct Links {
  std::mutex mutex;
  std::map<cuda::Context, GpuLink*> by_context;
};

}  // namespace

PooledEvent& PooledEvent::operator=(PooledEvent&& other) noexcept {
  std::swap(link_, other.link_);
  std::swap(event_, other.event_);
  std::swap(timing_, other.timing_);
  return *this;
}

absl::Status PooledEvent::Record(cuda::Stream stream) const {
  return cuda::Check(link_->driver().cuEventRecord(event_, stream), "cuEventRecord");
}

absl::Status PooledEvent::MakeWait(cuda::Stream stream) const {
  return cuda::Check(link_->driver().cuStreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent");
}

absl::StatusOr<bool> PooledEvent::Passed() const {
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  const cuda::Result result = link_->driver().cuEventQuery(event_);
  if (result == cuda::kErrorNotReady) return false;
  TFMEM_RETURN_IF_ERROR(cuda::Check(result, "cuEventQuery"));
  return true;
}

void PooledEvent::Reset() {
  if (event_ != nullptr) link_->GiveBack(event_, timing_);
  event_ = nullptr;
}

absl::StatusOr<GpuLink*> GpuLink::For(cuda::Stream compute) {
  TFMEM_ASSIGN_OR_RETURN(const cuda::Driver* driver, cuda::LoadDriver());
  cuda::Context context = nullptr;
  TFMEM_CUDA_RETURN_IF_ERROR(*driver, cuStreamGetCtx, compute, &context);
  Links& all = ProcessWide<Links>();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto known = all.by_context.find(context);
  if (known != all.by_context.end()) return known->second;
  auto link = std::unique_ptr<GpuLink>(new GpuLink(*driver, context));
  TFMEM_RETURN_IF_ERROR(link->Open());
  return all.by_context[context] = link.release();
}

std::vector<GpuLink*> GpuLink::All() {
  Links& all = ProcessWide<Links>();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<GpuLink*> result;
  for (const auto& [context, link] : all.by_context) result.push_back(link);
  return result;
}

absl::Status GpuLink::Open() {
  cuda::ScopedContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuCtxGetDevice, &device_);
  TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuStreamCreate, &out_stream_, cuda::kStreamNonBlocking);
  ++counters().open_streams;
  absl::Status status =
      cuda::Check(driver_.cuStreamCreate(&in_stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
  if (!status.ok()) {
    driver_.cuStreamDestroy_v2(out_stream_);
    --counters().open_streams;
    return status;
  }
  ++counters().open_streams;
  return absl::OkStatus();
}

absl::StatusOr<PooledEvent> GpuLink::NewEvent(bool timing) {
  PooledEvent result;
  result.timing_ = timing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<cuda::Event>& idle = idle_events_[timing];
    if (!idle.empty()) {
      result.link_ = this;
      result.event_ = idle.back();
      idle.pop_back();
      return result;
    }
  }
  cuda::ScopedContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  cuda::Event event = nullptr;
  TFMEM_CUDA_RETURN_IF_ERROR(driver_, cuEventCreate, &event,
                             timing ? cuda::kEventDefault : cuda::kEventDisableTiming);
  ++counters().open_events;
  result.link_ = this;
  result.event_ = event;
  return result;
}

absl::StatusOr<PooledEvent> GpuLink::Mark(cuda::Stream stream, bool timing) {
  TFMEM_ASSIGN_OR_RETURN(PooledEvent event, NewEvent(timing));
  TFMEM_RETURN_IF_ERROR(event.Record(stream));
  return event;
}

bool GpuLink::Drain(cuda::Stream stream) const {
  const absl::Status status =
      cuda::Check(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
  cuda::ReportLostError(status);
  return status.ok();
}

void GpuLink::GiveBack(cuda::Event event, bool timing) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_events_[timing].push_back(event);
}

absl::Status GpuLink::WaitTimed(cuda::Stream compute, const PooledEvent& event) {
  if (!stall_timing().load(std::memory_order_relaxed)) return event.MakeWait(compute);
  TFMEM_ASSIGN_OR_RETURN(PooledEvent before, NewEvent(/*timing=*/true));
  TFMEM_ASSIGN_OR_RETURN(PooledEvent after, NewEvent(/*timing=*/true));
  TFMEM_RETURN_IF_ERROR(before.Record(compute));
  TFMEM_RETURN_IF_ERROR(event.MakeWait(compute));
  TFMEM_RETURN_IF_ERROR(after.Record(compute));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stalls_.emplace_back(std::move(before), std::move(after));
  }
  CollectStalls();  // keeps the number of pending pairs at what the stream has not reached
  return absl::OkStatus();
}

void GpuLink::CollectStalls() {
  std::deque<std::pair<PooledEvent, PooledEvent>> done;  // given back after the lock is dropped
  cuda::ScopedContext current(driver_, context_);
  std::lock_guard<std::mutex> lock(mutex_);
  while (!stalls_.empty()) {
    const auto& [before, after] = stalls_.front();
    absl::StatusOr<bool> passed = after.Passed();
    if (passed.ok() && !*passed) return;
    float milliseconds = 0;
    if (passed.ok() &&
        driver_.cuEventElapsedTime(&milliseconds, before.get(), after.get()) == cuda::kSuccess) {
      counters().stall_ns += static_cast<int64_t>(milliseconds * 1e6);
    }
    done.push_back(std::move(stalls_.front()));
    stalls_.pop_front();
  }
}

void GpuLink::ForgetStalls() {
  std::deque<std::pair<PooledEvent, PooledEvent>> forgotten;
  std::lock_guard<std::mutex> lock(mutex_);
  forgotten.swap(stalls_);
}

void GpuLink::TrimEvents() {
  std::vector<cuda::Event> idle;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::vector<cuda::Event>& events : idle_events_) {
      idle.insert(idle.end(), events.begin(), events.end());
      events.clear();
    }
  }
  cuda::ScopedContext current(driver_, context_);
  cuda::ReportLostError(current.status());
  for (cuda::Event event : idle) {
    cuda::ReportLostError(cuda::Check(driver_.cuEventDestroy_v2(event), "cuEventDestroy"));
    --counters().open_events;
  }
}

}  // namespace tfmem
