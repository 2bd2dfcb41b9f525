#include "custom_ops/ops/memory/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace tfmem {
namespace {

// What a control group's files are called.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // in memory.stat: page cache that the kernel takes back first
};

constexpr GroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                  "memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                  "inactive_file"};

// The number after `key` in a file of "key number" lines; with no key, the file's first number.
std::optional<int64_t> ReadNumber(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  if (key.empty()) return file >> value ? std::optional(value) : std::nullopt;
  while (file >> word) {
    if (word == key) return file >> value ? std::optional(value) : std::nullopt;
  }
  return std::nullopt;
}

// Lowers `memory` to what the group `path` and those above it allow. In a container the path may be
// the host's, which is not there: its own group is then at the mount.
void Restrict(const std::string& root, const GroupFiles& files, std::string path,
              HostMemory& memory) {
  while (true) {
    const std::string folder = root + files.mount + path + "/";
    // An unlimited group reads "max", which is no number, or one that no machine has.
    if (const auto limit = ReadNumber(folder + files.limit); limit && *limit >= 0) {
      memory.limit = std::min(memory.limit, *limit);
      if (const auto usage = ReadNumber(folder + files.usage)) {
        const int64_t cache = ReadNumber(folder + "memory.stat", files.reclaimable).value_or(0);
        const int64_t used = std::max<int64_t>(*usage - cache, 0);
        memory.available = std::min(memory.available, std::max<int64_t>(*limit - used, 0));
      }
    }
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return;
    path.resize(slash);
  }
}

// Lines of /proc/self/cgroup are "number:controllers:/path"; version 2 names no controllers.
bool NamesMemory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

}  // namespace

HostMemory ReadHostMemory(const std::string& root) {
  HostMemory memory = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max()};
  const std::string machine = root + "/proc/meminfo";
  if (auto kib = ReadNumber(machine, "MemAvailable:")) memory.available = *kib * 1024;
  if (auto kib = ReadNumber(machine, "MemTotal:")) memory.limit = *kib * 1024;
  Restrict(root, kVersion2, "", memory);
  Restrict(root, kVersion1, "", memory);
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (path.size() < 2) continue;  // "/" is the mount
    if (controllers.empty()) Restrict(root, kVersion2, path, memory);
    if (NamesMemory(controllers)) Restrict(root, kVersion1, path, memory);
  }
  return memory;
}

}  // namespace tfmem
