// What MemOpProbe records, and how it is read.
#pragma once

#include <cstdint>
#include <vector>

#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

struct ProbeRow {
  int64_t index;
  int64_t host_ns;       // of a steady clock, when the op ran on the host
  int64_t device_ns;     // since the run's first row, on the compute stream; -1: no GPU
  int64_t bytes_in_use;  // -1: the allocator keeps no statistics
  int64_t peak_bytes;    // since the probe that ran before; -1: as above
};

// Overwrites row `index` of table `run`. `reached` is empty on the CPU, else a timing event that
// the compute stream records.
void RecordProbe(int64_t run, int64_t index, int64_t bytes_in_use, int64_t peak_bytes,
                 PooledEvent reached);

// The rows of `run` by index. Waits for the device to reach the last of them.
std::vector<ProbeRow> ReadProbes(int64_t run);

// Forgets table `run`, or all if -1.
void ClearProbes(int64_t run);

}  // namespace tfmem
