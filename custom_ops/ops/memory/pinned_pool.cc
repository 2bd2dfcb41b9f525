#include "custom_ops/ops/memory/pinned_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/faults.h"
#include "custom_ops/ops/memory/host_memory.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
// Blocks of this size and more are touched by several threads, each of which has as much to do.
constexpr size_t kLarge = size_t{16} << 20;
constexpr size_t kMostThreads = 16;

// Memory of whole huge pages, where the system has them, every page of which is there. The driver
// would make one small page after the other. Null if the system has no room.
void* Touched(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish
  madvise(data, bytes, MADV_DONTFORK);  // copies go on while a child has its own pages
  const size_t cores = std::max(std::thread::hardware_concurrency(), 1u);
  const size_t threads = std::min({bytes / kLarge, cores, kMostThreads});
  const size_t part = (bytes / threads + kHugePage - 1) / kHugePage * kHugePage;
  std::vector<std::thread> workers;
  for (size_t begin = 0; begin < bytes; begin += part) {
    const auto touch = [=] {
      for (size_t at = begin; at < std::min(begin + part, bytes); at += kPage) {
        static_cast<volatile char*>(data)[at] = 0;
      }
    };
    try {
      workers.emplace_back(touch);
    } catch (const std::system_error&) {  // the system gives this process no more threads
      touch();
    }
  }
  for (std::thread& worker : workers) worker.join();
  return data;
}

}  // namespace

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
      block.used_ = true;
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

  void MarkUnused() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [bytes, blocks] : idle_) {
      for (PinnedBlock& block : blocks) block.used_ = false;
    }
  }

  void TrimUnused() {
    std::lock_guard<std::mutex> lock(mutex_);
    FreeIdle([](const PinnedBlock& block) { return !block.used_; });
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
    const cuda::Driver& driver = link->driver();
    void* data = bytes < kLarge ? nullptr : Touched(bytes);
    const bool registered =
        data != nullptr &&
        driver.cuMemHostRegister_v2(data, bytes, cuda::kMemHostRegisterPortable) == 0;
    if (!registered) {
      if (data != nullptr) munmap(data, bytes);
      TFMEM_CUDA_RETURN_IF_ERROR(driver, cuMemHostAlloc, &data, bytes, cuda::kMemHostAllocPortable);
    }
    counters().pinned_bytes_allocated += bytes;
    counters().pinned_bytes_in_use += bytes;
    PinnedBlock block;
    block.link_ = link;
    block.data_ = data;
    block.bytes_ = bytes;
    block.registered_ = registered;
    return block;
  }

  // Frees those idle blocks that are `wanted` and whose copies are done; never waits for the
  // others.
  template <typename Wanted>
  void FreeIdle(Wanted wanted) {
    for (auto& [bytes, blocks] : idle_) {
      std::deque<PinnedBlock> busy;
      for (PinnedBlock& block : blocks) {
        if (!wanted(block) || !IsFree(block)) {
          busy.push_back(std::move(block));
        } else {
          Free(std::move(block));
        }
      }
      blocks = std::move(busy);
    }
  }

  void FreeIdle() {
    FreeIdle([](const PinnedBlock&) { return true; });
  }

  static bool IsFree(const PinnedBlock& block) {
    if (!block.last_use_) return true;
    absl::StatusOr<bool> passed = block.last_use_.Passed();
    return passed.ok() && *passed;
  }

  static void Free(PinnedBlock block) {
    const cuda::Driver& driver = block.link_->driver();
    cuda::ScopedContext current(driver, block.link_->context());
    cuda::ReportLostError(current.status());
    if (block.registered_) {
      cuda::ReportLostError(
          cuda::Check(driver.cuMemHostUnregister(block.data_), "cuMemHostUnregister"));
      munmap(block.data_, block.bytes_);
    } else {
      cuda::ReportLostError(cuda::Check(driver.cuMemFreeHost(block.data_), "cuMemFreeHost"));
    }
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
  std::swap(registered_, other.registered_);
  std::swap(used_, other.used_);
  return *this;
}

void TrimPinnedBlocks() { ProcessWide<PinnedPool>().Trim(); }

void MarkPinnedBlocksUnused() { ProcessWide<PinnedPool>().MarkUnused(); }

void TrimUnusedPinnedBlocks() { ProcessWide<PinnedPool>().TrimUnused(); }

}  // namespace tfmem
