#include "custom_ops/ops/memory/pinned_pool.h"

#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/faults.h"
#include "custom_ops/ops/memory/host_memory.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

class PinnedPool {
 public:
  absl::StatusOr<PinnedBlock> Acquire(GpuLink* link, size_t bytes, int64_t budget,
                                      const std::string& label) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto idle = idle_.find(bytes);
    if (idle != idle_.end() && !idle->second.empty()) {
      // The block that has been idle longest is the likeliest to be ready.
      PinnedBlock block = std::move(idle->second.front());
      idle->second.pop_front();
      counters().pinned_bytes_in_use += bytes;
      return block;
    }
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kAllocate, label));
    // Idle blocks of other sizes only hold memory back.
    absl::Status room = CheckRoom(bytes, budget, label);
    if (!room.ok()) {
      FreeIdle();
      room = CheckRoom(bytes, budget, label);
      if (!room.ok()) return room;
    }
    absl::StatusOr<PinnedBlock> block = Allocate(link, bytes);
    if (!block.ok()) {
      FreeIdle();
      block = Allocate(link, bytes);
    }
    if (!block.ok()) {
      return absl::Status(block.status().code(),
                          absl::StrCat("no pinned host memory for '", label, "' (", bytes,
                                       " bytes): ", block.status().message()));
    }
    return block;
  }

  void GiveBack(PinnedBlock block) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters().pinned_bytes_in_use -= block.bytes_;
    std::deque<PinnedBlock>& idle = idle_[block.bytes_];
    idle.push_back(std::move(block));
  }

  void Trim() {
    std::lock_guard<std::mutex> lock(mutex_);
    FreeIdle();
  }

 private:
  static absl::Status CheckRoom(size_t bytes, int64_t budget, const std::string& label) {
    const int64_t needed = static_cast<int64_t>(bytes);
    const int64_t taken = counters().pinned_bytes_allocated;
    if (budget > 0 && taken + needed > budget) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "host budget: '", label, "' needs ", needed, " pinned bytes, but ", taken, " of the ",
          budget, " bytes are taken; raise host_budget (0: no limit), or the memory budget, so ",
          "that less is moved"));
    }
    // Pinned memory cannot be swapped out: asking for too much gets processes killed.
    const int64_t available = ReadHostMemory().available;
    if (needed > available) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "host memory is exhausted: '", label, "' needs ", needed, " pinned bytes, ", available,
          " are available; raise the memory budget, so that less is moved"));
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<PinnedBlock> Allocate(GpuLink* link, size_t bytes) {
    cuda::ScopedContext current(link->driver(), link->context());
    if (!current.status().ok()) return current.status();
    void* data = nullptr;
    TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuMemHostAlloc, &data, bytes,
                               cuda::kMemHostAllocPortable);
    counters().pinned_bytes_allocated += bytes;
    counters().pinned_bytes_in_use += bytes;
    PinnedBlock block;
    block.link_ = link;
    block.data_ = data;
    block.bytes_ = bytes;
    return block;
  }

  // Frees idle blocks whose copies are done; never waits for the others.
  void FreeIdle() {
    for (auto& [bytes, blocks] : idle_) {
      std::deque<PinnedBlock> busy;
      for (PinnedBlock& block : blocks) {
        if (block.last_use_) {
          absl::StatusOr<bool> passed = block.last_use_.Passed();
          if (!passed.ok() || !*passed) {
            busy.push_back(std::move(block));
            continue;
          }
        }
        Free(std::move(block));
      }
      blocks = std::move(busy);
    }
  }

  static void Free(PinnedBlock block) {
    const cuda::Driver& driver = block.link_->driver();
    cuda::ScopedContext current(driver, block.link_->context());
    cuda::ReportLostError(current.status());
    cuda::ReportLostError(cuda::Check(driver.cuMemFreeHost(block.data_), "cuMemFreeHost"));
    counters().pinned_bytes_allocated -= block.bytes_;
    block.data_ = nullptr;  // nothing left to give back
  }

  std::mutex mutex_;
  std::map<size_t, std::deque<PinnedBlock>> idle_;
};

absl::StatusOr<PinnedBlock> PinnedBlock::Acquire(GpuLink* link, size_t bytes, int64_t budget,
                                                 const std::string& label) {
  return ProcessWide<PinnedPool>().Acquire(link, bytes, budget, label);
}

PinnedBlock::~PinnedBlock() {
  if (data_ != nullptr) ProcessWide<PinnedPool>().GiveBack(std::move(*this));
}

PinnedBlock& PinnedBlock::operator=(PinnedBlock&& other) noexcept {
  std::swap(link_, other.link_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(last_use_, other.last_use_);
  return *this;
}

void TrimPinnedBlocks() { ProcessWide<PinnedPool>().Trim(); }

}  // namespace tfmem
