// Page-locked host memory, pooled across steps at exact size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

// A pinned block. Goes back to the pool when destroyed, with the event that must pass before
// its next user writes to it.
class PinnedBlock {
 public:
  // Takes an idle block of this size, or allocates one through `link`.
  //
  // `budget` bounds the pinned bytes of the process (0: no limit). Idle blocks are freed before a
  // budget or the host's memory is found exhausted (ResourceExhausted). `label` is the tensor's
  // name, for messages.
  static absl::StatusOr<PinnedBlock> Acquire(GpuLink* link, size_t bytes, int64_t budget,
                                             const std::string& label);

  PinnedBlock() = default;
  ~PinnedBlock();
  PinnedBlock(PinnedBlock&& other) noexcept { *this = std::move(other); }
  PinnedBlock& operator=(PinnedBlock&& other) noexcept;

  void* data() const { return data_; }
  // Never gives the block back: a copy may touch it, and no event tells when that ends.
  void Abandon() { data_ = nullptr; }
  // The copies of the block's last user. A new writer makes its stream wait for them.
  const PooledEvent& last_use() const { return last_use_; }
  void set_last_use(PooledEvent event) { last_use_ = std::move(event); }

 private:
  friend class PinnedPool;
  GpuLink* link_ = nullptr;  // whose context allocated the block
  void* data_ = nullptr;
  size_t bytes_ = 0;
  PooledEvent last_use_;
  bool registered_ = false;  // memory of the system's, which the driver has locked
  bool used_ = true;         // since `MarkPinnedBlocksUnused`
};

// Frees all idle blocks whose copies are done.
void TrimPinnedBlocks();

// From now on blocks count as used once they are taken.
void MarkPinnedBlocksUnused();

// Frees the idle blocks that were not used since then.
void TrimUnusedPinnedBlocks();

}  // namespace tfmem
