#include "custom_ops/ops/cuda/kernel_image.h"

#include <limits>
#include <mutex>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/sha256.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr absl::string_view kFormat = "kernel 1";
constexpr absl::string_view kFormatWithCode = "program 4";
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostArch = 9999;
constexpr int64_t kMostThreads = 1024;  // CUDA's limit of a CTA
constexpr int64_t kMostCluster = 16;    // CUDA's limit

struct Shared {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<const std::string>> codes;  // by digest
};

}  // namespace

absl::Status WrongProgram(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("attr programs: ", what, "; run tfmem.optimize again"));
}

absl::StatusOr<KernelHeader> KernelHeader::Parse(absl::string_view text) {
  KernelHeader header;
  const absl::string_view first = text.substr(0, text.find('\n'));
  if (first == kFormatWithCode) {
    const size_t end = text.find("\n\n");
    if (end == absl::string_view::npos) return WrongProgram("no empty line behind the header");
    header.code_ = std::string(text.substr(end + 2));
    text = text.substr(0, end);
  } else if (first != kFormat) {
    return WrongProgram(absl::StrCat("expected '", kFormat, "' or '", kFormatWithCode,
                                     "' on the first line, found '", first.substr(0, 40),
                                     "': another version of tfmem wrote it"));
  }
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::pair<std::string, std::string> entry = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    if (!header.entries_.insert(entry).second) {
      return WrongProgram(absl::StrCat("'", entry.first, "' stands there twice"));
    }
  }
  return header;
}

std::string KernelHeader::Text(absl::string_view key) const {
  auto found = entries_.find(std::string(key));
  return found == entries_.end() ? "" : found->second;
}

int64_t KernelHeader::Number(absl::string_view key, int64_t least, int64_t most) {
  int64_t value = 0;
  const std::string text = Text(key);
  if ((!absl::SimpleAtoi(text, &value) || value < least || value > most) && status_.ok()) {
    status_ = WrongProgram(
        absl::StrCat("'", key, "' is '", text, "'; expected a number from ", least, " to ", most));
  }
  return value;
}

absl::StatusOr<KernelImage> ReadImage(KernelHeader* header, absl::string_view code) {
  KernelImage image;
  image.cubin = header->Text("kind") == "cubin";
  image.arch = header->Number("arch", 10, kMostArch);
  image.entry = header->Text("entry");
  image.threads = header->Number("threads", 1, kMostThreads);
  image.shared = header->Number("shared", 0, kMost);
  image.cluster = header->Number("cluster", 1, kMostCluster);
  image.cooperative = header->Number("cooperative", 0, 1) != 0;
  image.digest = header->Text("digest");
  if (!header->status().ok()) return header->status();
  if (!image.cubin && header->Text("kind") != "ptx") {
    return WrongProgram(
        absl::StrCat("kind is '", header->Text("kind"), "'; expected cubin or ptx"));
  }
  if (image.digest.empty()) {  // "program 4"
    code = header->code();
    image.digest = Sha256(code);
  }
  if (image.entry.empty() || code.empty()) return WrongProgram("no entry, or no code");
  TFMEM_ASSIGN_OR_RETURN(image.code, ShareCode(image.digest, code));
  return image;
}

absl::StatusOr<KernelCode> ShareCode(const std::string& digest, absl::string_view code) {
  Shared& all = ProcessWide<Shared>();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (auto found = all.codes.find(digest); found != all.codes.end()) {
    if (KernelCode same = found->second.lock(); same != nullptr && *same == code) return same;
  }
  if (const std::string computed = Sha256(code); computed != digest) {
    return WrongProgram(absl::StrCat("the code of a kernel has the digest ", computed,
                                     ", expected ", digest.substr(0, 64),
                                     ": the graph was changed, or is damaged"));
  }
  for (auto entry = all.codes.begin(); entry != all.codes.end();) {
    entry = entry->second.expired() ? all.codes.erase(entry) : std::next(entry);
  }
  KernelCode made = std::make_shared<const std::string>(code);
  all.codes[digest] = made;
  return made;
}

}  // namespace tfmem
