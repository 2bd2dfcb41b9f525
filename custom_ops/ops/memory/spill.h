// Mechanism "file": moves host tensors to files and back on two I/O threads. Knows no TensorFlow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/memory/ticket.h"

namespace tfmem {

struct SpillOptions {
  std::string directory;  // empty: the system's directory for temporary files
  int64_t budget = 0;     // bytes that all spill files of the process may take; 0: no limit
};

// An event that happens once, and then runs the callbacks that were registered.
class Completion {
 public:
  using Callback = std::function<void(const absl::Status&)>;

  // Runs all callbacks on the calling thread.
  void Complete(absl::Status status);
  // Runs `callback` now if the event happened, else on the thread that completes it.
  void Then(Callback callback);

 private:
  std::mutex mutex_;
  bool complete_ = false;
  absl::Status status_;
  std::vector<Callback> callbacks_;
};

struct SpillCopy;  // what the I/O threads share with a ticket

// A stretch of memory. What a ticket moves may lie in several, which are one file.
struct SpillPart {
  void* data;
  size_t bytes;
};
using SpillParts = std::vector<SpillPart>;

class FileTicket : public Ticket {
 public:
  // Starts writing `parts`. `owner` keeps them alive and is dropped as soon as they are written,
  // before any callback runs.
  FileTicket(std::string label, const SpillOptions& options, SpillParts parts, Owner owner);
  // Cancels what has not been written or read yet; the file goes back to the pool when the I/O
  // threads are done with it.
  ~FileTicket() override;

  void WhenWritten(Completion::Callback callback);

  // Starts reading back to `parts`, which are as large as those that were written, once written.
  // `owner` is dropped before any callback runs.
  void StartRead(SpillParts parts, Owner owner);
  // Fails the callback if no read whose first part is at `target` was started.
  void WhenRead(const void* target, Completion::Callback callback);

 private:
  struct Read {
    const void* target;
    std::shared_ptr<Completion> completion;
  };
  const LiveTicket live_;
  const std::shared_ptr<SpillCopy> copy_;
  std::mutex mutex_;
  std::vector<Read> reads_;
};

struct SpillBandwidth {
  double write_bytes_per_second;
  double read_bytes_per_second;
};

// Writes and reads one file of `bytes` bytes in options.directory.
absl::StatusOr<SpillBandwidth> MeasureSpillBandwidth(const SpillOptions& options, size_t bytes);

}  // namespace tfmem
