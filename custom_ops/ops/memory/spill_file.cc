#include "custom_ops/ops/memory/spill_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/faults.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

// Small enough that a cancelled step soon stops, large enough that the calls cost nothing.
constexpr size_t kChunkBytes = 8 << 20;

absl::Status DirectoryError(const std::string& directory, int error) {
  const std::string found = absl::StrCat("spill directory '", directory, "': ", strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(
          absl::StrCat(found, "; create it, or set spill_directory to a directory that exists"));
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(
          absl::StrCat(found, "; set spill_directory to a directory that can be written to"));
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(
          absl::StrCat(found, "; raise the limit on open files (ulimit -n)"));
    case EFBIG:
      return absl::ResourceExhaustedError(
          absl::StrCat(found, "; raise the limit on the size of a file (ulimit -f)"));
    default:
      return absl::UnavailableError(found);
  }
}

absl::Status NoSpace(const std::string& directory, int descriptor, size_t bytes,
                     const std::string& label) {
  struct statvfs info = {};
  const bool known = ::fstatvfs(descriptor, &info) == 0;
  return absl::ResourceExhaustedError(absl::StrCat(
      "spill directory '", directory, "' is full: '", label, "' needs ", bytes, " bytes, ",
      known ? absl::StrCat(static_cast<uint64_t>(info.f_bavail) * info.f_frsize) : "too few",
      " are free; free some, or set spill_directory to a larger file system"));
}

int OpenUnnamed(const std::string& directory) {
  int descriptor = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  // Some file systems (overlays, network ones) know no O_TMPFILE, and old kernels take it for an
  // attempt to open the directory itself.
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) {
    return descriptor;
  }
  std::string path = directory + "/tfmem-XXXXXX";
  descriptor = ::mkostemp(path.data(), O_CLOEXEC);
  if (descriptor >= 0) ::unlink(path.c_str());
  return descriptor;
}

}  // namespace

class SpillFilePool {
 public:
  absl::StatusOr<SpillFile> Acquire(const std::string& directory, size_t bytes, int64_t budget,
                                    const std::string& label) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto idle = idle_.find({directory, bytes});
      if (idle != idle_.end() && !idle->second.empty()) {
        SpillFile file = Wrap(idle->second.back(), directory, bytes);
        idle->second.pop_back();
        return file;
      }
      if (!Reserve(bytes, budget)) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "spill budget: '", label, "' needs ", bytes, " bytes, but ",
            counters().spill_bytes_allocated.load(), " of the ", budget,
            " bytes are taken; raise spill_budget (0: no limit), or the memory budget, so that ",
            "less is moved"));
      }
    }
    // Slow on some file systems, so without the lock; the bytes are reserved.
    absl::StatusOr<int> descriptor = Create(directory, bytes, label);
    if (!descriptor.ok()) {
      std::lock_guard<std::mutex> lock(mutex_);
      counters().spill_bytes_allocated -= bytes;
      return descriptor.status();
    }
    ++counters().open_spill_files;
    return Wrap(*descriptor, directory, bytes);
  }

  void GiveBack(const SpillFile& file) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters().spill_bytes_in_use -= file.bytes_;
    idle_[{file.directory_, file.bytes_}].push_back(file.descriptor_);
  }

  void CloseIdle() {
    std::lock_guard<std::mutex> lock(mutex_);
    CloseIdleLocked();
  }

 private:
  using Key = std::pair<std::string, size_t>;

  static SpillFile Wrap(int descriptor, const std::string& directory, size_t bytes) {
    counters().spill_bytes_in_use += bytes;
    SpillFile file;
    file.descriptor_ = descriptor;
    file.directory_ = directory;
    file.bytes_ = bytes;
    return file;
  }

  static absl::StatusOr<int> Create(const std::string& directory, size_t bytes,
                                    const std::string& label) {
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kAllocate, label));
    const int descriptor = OpenUnnamed(directory);
    if (descriptor < 0) return DirectoryError(directory, errno);
    // Takes the space now: a write that fails half-way would be found too late to say how much
    // was missing.
    const int error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
    if (error == 0) return descriptor;
    absl::Status status = error == ENOSPC || error == EDQUOT
                              ? NoSpace(directory, descriptor, bytes, label)
                              : DirectoryError(directory, error);
    ::close(descriptor);
    return status;
  }

  bool Reserve(size_t bytes, int64_t budget) {
    auto fits = [&] {
      return budget <= 0 ||
             counters().spill_bytes_allocated + static_cast<int64_t>(bytes) <= budget;
    };
    // Idle files of other sizes only hold the budget back.
    if (!fits()) CloseIdleLocked();
    if (!fits()) return false;
    counters().spill_bytes_allocated += bytes;
    return true;
  }

  void CloseIdleLocked() {
    for (const auto& [key, descriptors] : idle_) {
      for (int descriptor : descriptors) {
        ::close(descriptor);
        counters().spill_bytes_allocated -= key.second;
        --counters().open_spill_files;
      }
    }
    idle_.clear();
  }

  std::mutex mutex_;
  std::map<Key, std::vector<int>> idle_;
};

absl::StatusOr<SpillFile> SpillFile::Acquire(const std::string& directory, size_t bytes,
                                             int64_t budget, const std::string& label) {
  if (!directory.empty())
    return ProcessWide<SpillFilePool>().Acquire(directory, bytes, budget, label);
  std::error_code error;
  const std::filesystem::path system = std::filesystem::temp_directory_path(error);
  if (error) return DirectoryError("the system's directory for temporary files", error.value());
  return ProcessWide<SpillFilePool>().Acquire(system.string(), bytes, budget, label);
}

SpillFile::~SpillFile() {
  if (descriptor_ >= 0) ProcessWide<SpillFilePool>().GiveBack(*this);
}

SpillFile& SpillFile::operator=(SpillFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(bytes_, other.bytes_);
  std::swap(directory_, other.directory_);
  return *this;
}

absl::Status SpillFile::Write(const void* data, size_t begin, size_t bytes,
                              const std::function<bool()>& cancelled) const {
  const char* source = static_cast<const char*>(data);
  for (size_t offset = 0; offset < bytes;) {
    if (cancelled()) return absl::CancelledError("the step that spilled the tensor has ended");
    const ssize_t written =
        ::pwrite(descriptor_, source + offset, std::min(kChunkBytes, bytes - offset),
                 static_cast<off_t>(begin + offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return absl::UnavailableError(absl::StrCat("cannot write ", bytes_,
                                                 " bytes to spill directory '", directory_,
                                                 "': ", strerror(errno)));
    }
    offset += written;
  }
  return absl::OkStatus();
}

absl::Status SpillFile::Read(void* data, size_t begin, size_t bytes,
                             const std::function<bool()>& cancelled) const {
  char* target = static_cast<char*>(data);
  for (size_t offset = 0; offset < bytes;) {
    if (cancelled()) return absl::CancelledError("the step that spilled the tensor has ended");
    const ssize_t read =
        ::pread(descriptor_, target + offset, std::min(kChunkBytes, bytes - offset),
                static_cast<off_t>(begin + offset));
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0) {
      return absl::DataLossError(
          absl::StrCat("cannot read ", bytes_, " bytes back from spill directory '", directory_,
                       "': ", read == 0 ? "file is too short" : strerror(errno)));
    }
    offset += read;
  }
  return absl::OkStatus();
}

void TrimSpillFiles() { ProcessWide<SpillFilePool>().CloseIdle(); }

}  // namespace tfmem
