// One GPU's private copy streams, events and stall times.
#pragma once

#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/cuda_driver.h"

namespace tfmem {

class GpuLink;

// A pooled CUDA event; goes back to its link when destroyed. Waits capture the state of an event
// when they are enqueued, so an event may be recorded again while streams still wait for its past.
class PooledEvent {
 public:
  PooledEvent() = default;
  ~PooledEvent() { Reset(); }
  PooledEvent(PooledEvent&& other) noexcept { *this = std::move(other); }
  PooledEvent& operator=(PooledEvent&& other) noexcept;

  explicit operator bool() const { return event_ != nullptr; }
  cuda::Event get() const { return event_; }
  GpuLink* link() const { return link_; }

  absl::Status Record(cuda::Stream stream) const;
  // Work enqueued on `stream` from now on waits for what the event recorded.
  absl::Status MakeWait(cuda::Stream stream) const;
  // Whether everything recorded is done; never blocks.
  absl::StatusOr<bool> Passed() const;
  void Reset();

 private:
  friend class GpuLink;
  GpuLink* link_ = nullptr;
  cuda::Event event_ = nullptr;
  bool timing_ = false;
};

class GpuLink {
 public:
  // The link of the GPU that `compute` belongs to, made at the first call. Links live as long as
  // the process.
  static absl::StatusOr<GpuLink*> For(cuda::Stream compute);
  // All links made so far.
  static std::vector<GpuLink*> All();

  const cuda::Driver& driver() const { return driver_; }
  cuda::Context context() const { return context_; }
  cuda::Device device() const { return device_; }
  // Two streams, so that both directions of the link are busy at once.
  cuda::Stream out_stream() const { return out_stream_; }
  cuda::Stream in_stream() const { return in_stream_; }

  absl::StatusOr<PooledEvent> NewEvent(bool timing = false);
  // An event that marks the present end of `stream`.
  absl::StatusOr<PooledEvent> Mark(cuda::Stream stream, bool timing = false);

  // For when a copy was enqueued on `stream` and no event could be recorded behind it: the host
  // waits until the stream is through. False if not even that succeeds; then nothing that the copy
  // touches may ever be used again.
  bool Drain(cuda::Stream stream) const;

  // Makes `compute` wait for `event`, and times the wait if stall timing is on.
  absl::Status WaitTimed(cuda::Stream compute, const PooledEvent& event);
  // Adds the waits that have ended to the stall counter. Never blocks.
  void CollectStalls();
  void ForgetStalls();
  // Destroys the pooled events that have no owner.
  void TrimEvents();

 private:
  friend class PooledEvent;
  GpuLink(const cuda::Driver& driver, cuda::Context context) : driver_(driver), context_(context) {}
  absl::Status Open();
  void GiveBack(cuda::Event event, bool timing);

  const cuda::Driver& driver_;
  const cuda::Context context_;
  cuda::Device device_ = 0;
  cuda::Stream out_stream_ = nullptr;
  cuda::Stream in_stream_ = nullptr;

  std::mutex mutex_;
  std::vector<cuda::Event> idle_events_[2];                 // by `timing`
  std::deque<std::pair<PooledEvent, PooledEvent>> stalls_;  // in the order of the compute stream
};

}  // namespace tfmem
