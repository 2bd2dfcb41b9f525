// The GPU mechanisms: "copy" through pinned host memory, "managed" by migrating pages.
// Knows no TensorFlow.
//
// Order of streams, on which everything here rests. TensorFlow allocates and frees a GPU's memory
// in the order in which ops are enqueued on its compute stream. So two invariants hold:
//   1. a private stream touches a device buffer only after it waited for the compute stream's
//      position at that time (the block may still be in use by kernels enqueued before);
//   2. a device buffer goes back to TensorFlow only after the compute stream was told to wait for
//      every private copy that touches it. Until then the ticket owns it, too.
// The host never waits for the device; but where the driver refuses to record or to wait for an
// event, it waits for the copy, and where that fails, too, what the copy touches is given up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/memory/gpu_link.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "custom_ops/ops/memory/ticket.h"

namespace tfmem {

// A move back into device memory: `owner` is held until the compute stream waits for `arrived`.
struct ArrivingBuffer {
  const void* target = nullptr;
  cuda::Stream compute = nullptr;
  PooledEvent arrived;
  Owner owner;
};

// The moves back of one ticket, in the order of the link's stream. Not synchronised.
class Arrivals {
 public:
  // A move to an address replaces the earlier one: its buffer must have died for the address to
  // come up again.
  void Add(ArrivingBuffer buffer);
  ArrivingBuffer* Find(const void* target);
  // Enqueues the waits that no Await did and drops the owners. False if the end of a move is not
  // known: then its buffer is kept for good.
  bool Finish(GpuLink* link);
  // The event that passes last; empty if nothing moved back.
  PooledEvent TakeLast();

 private:
  std::vector<ArrivingBuffer> buffers_;
};

// What the kernels need of a GPU mechanism. `compute` is the stream of the op that runs.
class GpuTicket : public Ticket {
 public:
  // Lets the offloaded buffer go, in the compute stream's order.
  virtual absl::Status Release(cuda::Stream compute) = 0;
  // Starts bringing the data to `target`, which `owner` keeps alive.
  virtual absl::Status StartIn(cuda::Stream compute, void* target, Owner owner) = 0;
  // Makes the compute stream wait until the data is at `target`, then lets the ticket's share of
  // that buffer go.
  absl::Status Await(cuda::Stream compute, const void* target);
  // The source, for a mechanism whose data comes back to where it was; else null.
  virtual Owner source() const { return nullptr; }

 protected:
  GpuTicket(std::string label, GpuLink* link, size_t bytes)
      : Ticket(std::move(label)), link_(link), bytes_(bytes) {}

  const LiveTicket live_;
  GpuLink* const link_;
  const size_t bytes_;
  std::mutex mutex_;
  Arrivals arrivals_;
};

class CopyTicket : public GpuTicket {
 public:
  // Starts copying `bytes` bytes at device address `source` to a pinned block.
  static absl::StatusOr<std::shared_ptr<CopyTicket>> Start(cuda::Stream compute, std::string label,
                                                           const void* source, size_t bytes,
                                                           int64_t host_budget, Owner owner);
  ~CopyTicket() override;

  absl::Status Release(cuda::Stream compute) override;
  absl::Status StartIn(cuda::Stream compute, void* target, Owner owner) override;

 private:
  CopyTicket(std::string label, GpuLink* link, cuda::Stream compute, size_t bytes)
      : GpuTicket(std::move(label), link, bytes), compute_(compute) {}
  absl::Status StartOut(const void* source, int64_t host_budget, Owner owner);

  const cuda::Stream compute_;
  PinnedBlock block_;
  PooledEvent copied_;  // set before the ticket is shared, then constant

  // Both under the mutex.
  Owner source_owner_;  // until Release
  bool lost_ = false;   // whether a copy may touch the block, and no event tells when it ends
};

// Pages move, addresses stay: the source buffer is kept and handed out again by Prefetch.
class ManagedTicket : public GpuTicket {
 public:
  // Refuses memory that is not managed.
  static absl::StatusOr<std::shared_ptr<ManagedTicket>> Start(cuda::Stream compute,
                                                              std::string label, const void* source,
                                                              size_t bytes, Owner owner);

  // Nothing to wait for: page migration keeps memory coherent.
  absl::Status Release(cuda::Stream) override { return absl::OkStatus(); }
  absl::Status StartIn(cuda::Stream compute, void* target, Owner owner) override;
  Owner source() const override { return source_owner_; }

 private:
  ManagedTicket(std::string label, GpuLink* link, size_t bytes, Owner owner)
      : GpuTicket(std::move(label), link, bytes), source_owner_(std::move(owner)) {}

  const Owner source_owner_;
  PooledEvent departed_;
};

// Asks the driver to move `bytes` bytes of managed memory at `pointer` to the GPU, from the
// compute stream's present position on.
absl::Status MoveToDevice(cuda::Stream compute, const void* pointer, size_t bytes,
                          const std::string& label);

}  // namespace tfmem
