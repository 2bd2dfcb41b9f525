#include "custom_ops/ops/memory/spill_directories.h"

#include <map>
#include <mutex>
#include <random>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/process_wide.h"

namespace tfmem {
namespace {

struct Directories {
  std::mutex mutex;
  std::map<std::string, std::string> key_of;
  std::map<std::string, std::string> by_key;
};

std::string NewKey() {
  std::random_device random;  // the operating system's
  std::string key;
  for (int word = 0; word < 4; ++word) absl::StrAppend(&key, absl::Hex(random(), absl::kZeroPad8));
  return key;
}

}  // namespace

std::string SpillDirectoryKey(const std::string& directory) {
  if (directory.empty()) return "";
  Directories& all = ProcessWide<Directories>();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::string& key = all.key_of[directory];
  if (key.empty()) {
    key = NewKey();
    all.by_key[key] = directory;
  }
  return key;
}

std::optional<std::string> FindSpillDirectory(const std::string& key) {
  if (key.empty()) return "";
  Directories& all = ProcessWide<Directories>();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_key.find(key);
  if (found == all.by_key.end()) return std::nullopt;
  return found->second;
}

}  // namespace tfmem
