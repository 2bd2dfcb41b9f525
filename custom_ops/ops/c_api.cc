// What Python reads through ctypes (custom_ops/load.py). Functions that can fail return 0, or -1
// after putting a message into `error`.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"
#include "custom_ops/ops/memory/faults.h"
#include "custom_ops/ops/memory/gpu_link.h"
#include "custom_ops/ops/memory/host_memory.h"
#include "custom_ops/ops/memory/link_bandwidth.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "custom_ops/ops/memory/probe.h"
#include "custom_ops/ops/memory/spill.h"
#include "custom_ops/ops/memory/spill_directories.h"
#include "custom_ops/ops/memory/spill_file.h"
#include "custom_ops/ops/random/shared_kernels.h"

namespace {

// As much of a text as there is space for, and a zero behind it.
void Put(absl::string_view text, char* to, int64_t capacity) {
  if (capacity <= 0) return;
  text = text.substr(0, capacity - 1);
  std::memcpy(to, text.data(), text.size());
  to[text.size()] = '\0';
}

int Fail(const absl::Status& status, char* error, int64_t capacity) {
  Put(status.message(), error, capacity);
  return -1;
}

}  // namespace

extern "C" {

// Fills `values` in the order of the fields of load.py's Counters.
void tfmem_counters(int64_t* values) {
  for (tfmem::GpuLink* link : tfmem::GpuLink::All()) link->CollectStalls();
  const tfmem::Counters& c = tfmem::counters();
  const int64_t read[] = {
      c.offloads,
      c.prefetches,
      c.bytes_out,
      c.bytes_in,
      c.stall_ns,
      c.driver_errors,
      c.live_tickets,
      c.pinned_bytes_allocated,
      c.pinned_bytes_in_use,
      c.spill_bytes_allocated,
      c.spill_bytes_in_use,
      c.open_spill_files,
      c.open_events,
      c.open_streams,
  };
  std::copy(std::begin(read), std::end(read), values);
}

// Sets the counters of what flowed to zero; those of what exists stay.
void tfmem_reset_counters() {
  for (tfmem::GpuLink* link : tfmem::GpuLink::All()) link->ForgetStalls();
  tfmem::Counters& c = tfmem::counters();
  c.offloads = c.prefetches = c.bytes_out = c.bytes_in = c.stall_ns = c.driver_errors = 0;
}

void tfmem_set_stall_timing(bool enabled) { tfmem::stall_timing() = enabled; }

// Fault kinds are numbered as in faults.h.
void tfmem_inject_fault(int kind, int64_t after, int64_t times) {
  if (kind < 0 || kind >= tfmem::kFaultKinds) return;
  tfmem::InjectFault(static_cast<tfmem::Fault>(kind), after, times);
}

// The widest vectors the CPU kernels may use, in bytes: 16, 32 or 64. For tests.
void tfmem_limit_vector_bytes(int bytes) { tfmem::LimitVectorBytes(bytes); }

// Frees what the pools hold idle. With `keep_pinned` pinned blocks stay, and count as unused until
// they are taken again.
void tfmem_trim(bool keep_pinned) {
  tfmem::TrimSpillFiles();
  if (keep_pinned) {
    tfmem::MarkPinnedBlocksUnused();
  } else {
    tfmem::TrimPinnedBlocks();
  }
  tfmem::TrimGpuKernels();
  for (tfmem::GpuLink* link : tfmem::GpuLink::All()) link->TrimEvents();
}

// Frees the idle pinned blocks that nothing took since the last `tfmem_trim(true)`.
void tfmem_trim_unused() { tfmem::TrimUnusedPinnedBlocks(); }

// Copies at most `capacity` rows of run `run`; returns how many there are.
int64_t tfmem_read_probes(int64_t run, tfmem::ProbeRow* rows, int64_t capacity) {
  const std::vector<tfmem::ProbeRow> read = tfmem::ReadProbes(run);
  const int64_t count = read.size();
  std::copy_n(read.begin(), std::min(count, capacity), rows);
  return count;
}

void tfmem_clear_probes(int64_t run) { tfmem::ClearProbes(run); }

// The key of a directory for spill files, for the graphs of this process; "" for none.
void tfmem_spill_directory_key(const char* directory, char* key, int64_t capacity) {
  Put(tfmem::SpillDirectoryKey(directory), key, capacity);
}

bool tfmem_share_op(const char* op) { return tfmem::ShareOp(op); }

int64_t tfmem_open_stream() { return tfmem::OpenStream(); }

void tfmem_close_stream(int64_t stream) { tfmem::CloseStream(stream); }

// bandwidth: to host, to device, and both again with both directions busy; bytes/s.
int tfmem_link_bandwidth(int ordinal, int64_t bytes, double* bandwidth, char* error,
                         int64_t capacity) {
  const auto result = tfmem::MeasureLinkBandwidth(ordinal, bytes);
  if (!result.ok()) return Fail(result.status(), error, capacity);
  bandwidth[0] = result->to_host;
  bandwidth[1] = result->to_device;
  bandwidth[2] = result->both_to_host;
  bandwidth[3] = result->both_to_device;
  return 0;
}

// bandwidth: of each of `count` GPUs to host and to device, while all of them are busy in both
// directions; bytes/s.
int tfmem_links_bandwidth(const int* ordinals, int64_t count, int64_t bytes, double* bandwidth,
                          char* error, int64_t capacity) {
  const auto result = tfmem::MeasureLinksTogether({ordinals, static_cast<size_t>(count)}, bytes);
  if (!result.ok()) return Fail(result.status(), error, capacity);
  for (const tfmem::BusyBandwidth& link : *result) {
    *bandwidth++ = link.to_host;
    *bandwidth++ = link.to_device;
  }
  return 0;
}

// values: bytes available, bytes there at all; INT64_MAX where the system does not say.
void tfmem_host_memory(const char* root, int64_t* values) {
  const tfmem::HostMemory memory = tfmem::ReadHostMemory(root);
  values[0] = memory.available;
  values[1] = memory.limit;
}

// bandwidth: write, read; bytes/s.
int tfmem_spill_bandwidth(const char* directory, int64_t bytes, double* bandwidth, char* error,
                          int64_t capacity) {
  tfmem::SpillOptions options;
  options.directory = directory;
  const auto result = tfmem::MeasureSpillBandwidth(options, bytes);
  if (!result.ok()) return Fail(result.status(), error, capacity);
  bandwidth[0] = result->write_bytes_per_second;
  bandwidth[1] = result->read_bytes_per_second;
  return 0;
}

}  // extern "C"
