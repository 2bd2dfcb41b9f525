// Unlinked files of exact size, pooled across steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tfmem {

// A file of `bytes` allocated bytes that has no name: it vanishes with its descriptor, so a crash
// leaves nothing on disk. Goes back to the pool when destroyed.
class SpillFile {
 public:
  // Takes an idle file of this directory and size, or makes one.
  //
  // `budget` bounds the bytes of all spill files of the process (0: no limit); idle files are
  // closed before it is refused. `label` is the tensor's name, for messages. Fails with NotFound,
  // PermissionDenied or ResourceExhausted, naming the directory.
  static absl::StatusOr<SpillFile> Acquire(const std::string& directory, size_t bytes,
                                           int64_t budget, const std::string& label);

  SpillFile() = default;
  ~SpillFile();
  SpillFile(SpillFile&& other) noexcept { *this = std::move(other); }
  SpillFile& operator=(SpillFile&& other) noexcept;

  // Both are for the `bytes` bytes of the file from `begin` on, and stop with Cancelled between two
  // chunks once `cancelled` says so.
  absl::Status Write(const void* data, size_t begin, size_t bytes,
                     const std::function<bool()>& cancelled) const;
  absl::Status Read(void* data, size_t begin, size_t bytes,
                    const std::function<bool()>& cancelled) const;

 private:
  friend class SpillFilePool;
  int descriptor_ = -1;
  size_t bytes_ = 0;
  std::string directory_;
};

// Closes all idle files.
void TrimSpillFiles();

}  // namespace tfmem
