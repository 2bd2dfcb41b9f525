// What the op library counts about itself, and the switches tests and profiles set.
#pragma once

#include <atomic>
#include <cstdint>

namespace tfmem {

// "Flow" counters only grow and are reset on request; "level" counters say what exists now.
struct Counters {
  // Flow.
  std::atomic<int64_t> offloads{0};
  std::atomic<int64_t> prefetches{0};
  std::atomic<int64_t> bytes_out{0};
  std::atomic<int64_t> bytes_in{0};
  std::atomic<int64_t> stall_ns{0};       // what Release and Await made compute wait
  std::atomic<int64_t> driver_errors{0};  // failures with no step left to report them to
  // Level.
  std::atomic<int64_t> live_tickets{0};
  std::atomic<int64_t> pinned_bytes_allocated{0};
  std::atomic<int64_t> pinned_bytes_in_use{0};
  std::atomic<int64_t> spill_bytes_allocated{0};
  std::atomic<int64_t> spill_bytes_in_use{0};
  std::atomic<int64_t> open_spill_files{0};
  std::atomic<int64_t> open_events{0};
  std::atomic<int64_t> open_streams{0};
};

inline Counters& counters() {
  static Counters instance;
  return instance;
}

// Whether GPU waits are timed. Off by default: each timed wait costs two timing events. On the CPU
// waits are always timed.
inline std::atomic<bool>& stall_timing() {
  static std::atomic<bool> enabled{false};
  return enabled;
}

}  // namespace tfmem
