#include "custom_ops/ops/gpu_program.h"

#include <algorithm>
#include <limits>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tfmem {
namespace {

constexpr absl::string_view kFormat = "program 4";
constexpr int64_t kMostGroups = 65535;  // CUDA's limit of a grid's second dimension
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostArch = 9999;
constexpr int64_t kMostThreads = 1024;  // CUDA's limit of a CTA
constexpr int64_t kMostCluster = 16;    // CUDA's limit
constexpr int64_t kMostStages = 1 << 16;

template <typename... Parts>
absl::Status Wrong(Parts... parts) {
  return absl::InvalidArgumentError(
      absl::StrCat("attr programs: ", parts..., "; run tfmem.optimize again"));
}

// The lines "key value" of a header.
class Header {
 public:
  explicit Header(absl::string_view text) {
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      const std::pair<absl::string_view, absl::string_view> entry =
          absl::StrSplit(line, absl::MaxSplits(' ', 1));
      if (!entries_.insert(entry).second && status_.ok()) {
        status_ = Wrong("'", entry.first, "' stands there twice");
      }
    }
  }

  std::string Text(absl::string_view key) const {
    auto found = entries_.find(key);
    return found == entries_.end() ? "" : std::string(found->second);
  }

  int64_t Number(absl::string_view key, int64_t least, int64_t most) {
    int64_t value = 0;
    auto found = entries_.find(key);
    if (found == entries_.end() || !absl::SimpleAtoi(found->second, &value) || value < least ||
        value > most) {
      if (status_.ok()) {
        status_ =
            Wrong("'", key, "' is '", Text(key), "'; expected a number from ", least, " to ", most);
      }
    }
    return value;
  }

  const absl::Status& status() const { return status_; }

 private:
  std::map<absl::string_view, absl::string_view> entries_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<GpuProgram> ParseGpuProgram(absl::string_view bytes) {
  const size_t end = bytes.find("\n\n");
  if (bytes.substr(0, bytes.find('\n')) != kFormat || end == absl::string_view::npos) {
    return Wrong("expected '", kFormat, "' on the first line and an empty line after the header");
  }
  Header header(bytes.substr(0, end));
  GpuProgram program;
  program.cubin = header.Text("kind") == "cubin";
  program.arch = header.Number("arch", 10, kMostArch);
  program.entry = header.Text("entry");
  program.fallback = header.Text("fallback");
  program.rows = header.Number("rows", 1, kMost);
  program.ctas = header.Number("ctas", 1, kMost);
  program.cluster = header.Number("cluster", 1, kMostCluster);
  program.threads = header.Number("threads", 1, kMostThreads);
  program.shared = header.Number("shared", 0, kMost);
  program.scratch = header.Number("scratch", 0, std::numeric_limits<int64_t>::max());
  program.cooperative = header.Number("cooperative", 0, 1) != 0;
  program.stages = header.Number("stages", 0, kMostStages);
  program.max_batch = header.Number("max_batch", 0, kMost);
  program.image = std::string(bytes.substr(end + 2));  // c_str() ends with the zero
  if (!header.status().ok()) return header.status();
  if (!program.cubin && header.Text("kind") != "ptx") {
    return Wrong("kind is '", header.Text("kind"), "'; expected cubin or ptx");
  }
  if (program.entry.empty() || program.image.empty()) return Wrong("no entry, or no image");
  if (program.cluster > 1 && program.ctas % program.cluster != 0) {
    return Wrong(program.ctas, " CTAs do not divide into clusters of ", program.cluster);
  }
  return program;
}

std::vector<GroupRange> CutLaunches(int64_t groups, int64_t at_once) {
  at_once = std::clamp<int64_t>(at_once, 1, kMostGroups);
  std::vector<GroupRange> launches;
  for (int64_t first = 0; first < groups; first += at_once) {
    launches.push_back({first, std::min(at_once, groups - first)});
  }
  return launches;
}

std::vector<Turn> Turns(int64_t time, int64_t stages) {
  if (stages == 0 || time == 0) return {{0, std::max<int64_t>(stages - 1, 0)}};
  std::vector<Turn> turns;
  for (int64_t step = 0; step < time; ++step) {
    for (int64_t stage = 0; stage < stages; ++stage) turns.push_back({step, stage});
  }
  return turns;
}

KernelParameter::KernelParameter(int64_t time, int64_t batch, const SequenceLines& lines,
                                 uint64_t scratch, uint64_t status,
                                 const std::vector<bool>& reverse) {
  uint64_t reversed = 0;
  for (size_t i = 0; i < reverse.size(); ++i) reversed |= uint64_t{reverse[i]} << i;
  words = {static_cast<uint64_t>(time) | static_cast<uint64_t>(batch) << 32,
           0,
           scratch,
           status,
           reversed,
           static_cast<uint64_t>(lines.step) | static_cast<uint64_t>(lines.row) << 32,
           0};
}

void KernelParameter::SetGroups(int64_t first, int64_t total) {
  words[1] = static_cast<uint64_t>(first) | static_cast<uint64_t>(total) << 32;
}

void KernelParameter::SetTurn(const Turn& turn) {
  words[6] = static_cast<uint64_t>(turn.step) | static_cast<uint64_t>(turn.stage) << 32;
}

void KernelParameter::Add(const std::vector<const void*>& pointers) {
  for (const void* pointer : pointers) words.push_back(reinterpret_cast<uint64_t>(pointer));
}

void KernelParameter::Add(const std::vector<void*>& pointers) {
  Add(std::vector<const void*>(pointers.begin(), pointers.end()));
}

}  // namespace tfmem
