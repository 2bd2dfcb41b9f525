#include "custom_ops/ops/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace tfmem {
namespace {

// The number after `key` in a file of "key number" lines; with no key, the file's first number.
std::optional<int64_t> ReadNumber(const char* path, const std::string& key = "") {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  if (key.empty()) return file >> value ? std::optional(value) : std::nullopt;
  while (file >> word) {
    if (word == key) return file >> value ? std::optional(value) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

int64_t AvailableHostBytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  if (auto kib = ReadNumber("/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  // Control groups, version 2. An unlimited group reads "max", which is no number.
  const auto limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const auto current = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit && current) {
    const int64_t cache = ReadNumber("/sys/fs/cgroup/memory.stat", "inactive_file").value_or(0);
    available = std::min(available, *limit - *current + cache);
  }
  return available;
}

}  // namespace tfmem
