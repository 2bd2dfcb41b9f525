#include "custom_ops/ops/cuda/kernel_image.h"

#include <limits>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/sha256.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr absl::string_view kKernelFormat = "kernel 1";
constexpr absl::string_view kProgramsAttribute = "attr programs";
constexpr absl::string_view kOptimizeAgain = "; run tfmem.optimize again";
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
  return absl::InvalidArgumentError(absl::StrCat(kProgramsAttribute, ": ", what, kOptimizeAgain));
}

KernelHeader::KernelHeader(absl::string_view text)
    : in_(kProgramsAttribute, text, kOptimizeAgain) {}

absl::StatusOr<KernelHeader> KernelHeader::Parse(absl::string_view text) {
  KernelHeader header(text);
  TextReader& in = header.in_;
  if (!in.Format(kKernelFormat)) return in.failure();
  while (in.NextLine()) {
    absl::string_view key;
    if (!in.Word(&key)) return in.failure();
    if (!header.entries_.emplace(key, in.place()).second) {
      in.Wrong("'", key, "' stands there twice");
      return in.failure();
    }
  }
  return header;
}

bool KernelHeader::Find(absl::string_view key) {
  const auto found = entries_.find(key);
  if (found != entries_.end()) in_.GoTo(found->second);
  return found != entries_.end();
}

int64_t KernelHeader::Number(absl::string_view key, int64_t least, int64_t most) {
  int64_t value = least;
  if (!Find(key)) {
    in_.Wrong("there is no '", key, "'");
  } else if (in_.Number(least, most, &value)) {
    in_.End();
  }
  return value;
}

std::vector<int64_t> KernelHeader::Numbers(absl::string_view key, int64_t least, int64_t most) {
  std::vector<int64_t> numbers;
  if (Find(key)) in_.Numbers(least, most, &numbers);
  return numbers;
}

absl::StatusOr<KernelImage> ReadImage(KernelHeader* header, absl::string_view code) {
  KernelImage image;
  const absl::string_view kind = header->Text("kind");
  image.cubin = kind == "cubin";
  image.arch = header->Number("arch", 10, kMostArch);
  image.entry = std::string(header->Text("entry"));
  image.threads = header->Number("threads", 1, kMostThreads);
  image.shared = header->Number("shared", 0, kMost);
  image.cluster = header->Number("cluster", 1, kMostCluster);
  image.cooperative = header->Number("cooperative", 0, 1) != 0;
  image.digest = std::string(header->Text("digest"));
  if (!header->status().ok()) return header->status();
  if (!image.cubin && kind != "ptx") {
    return WrongProgram(absl::StrCat("kind is '", kind, "'; expected cubin or ptx"));
  }
  if (image.entry.empty() || image.digest.empty() || code.empty()) {
    return WrongProgram("no entry, no digest or no code");
  }
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
