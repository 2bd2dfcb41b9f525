#include "custom_ops/ops/recurrent/recurrent_program.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int64_t kMostGroups = 65535;  // CUDA's limit of a grid's second dimension
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostStages = 1 << 16;

}  // namespace

absl::StatusOr<RecurrentProgram> ReadRecurrentProgram(absl::string_view text,
                                                      absl::string_view code) {
  TFMEM_ASSIGN_OR_RETURN(KernelHeader header, KernelHeader::Parse(text));
  RecurrentProgram program;
  program.rows = header.Number("rows", 1, kMost);
  program.ctas = header.Number("ctas", 1, kMost);
  program.scratch = header.Number("scratch", 0, std::numeric_limits<int64_t>::max());
  program.stages = header.Number("stages", 0, kMostStages);
  program.max_batch = header.Number("max_batch", 0, kMost);
  TFMEM_ASSIGN_OR_RETURN(program.image, ReadImage(&header, code));
  if (program.ctas % program.image.cluster != 0) {
    return WrongProgram(
        absl::StrCat(program.ctas, " CTAs do not divide into clusters of ", program.image.cluster));
  }
  if (const absl::string_view name = header.Text("fallback"); !name.empty()) {
    KernelImage& fallback = program.fallback.emplace(program.image);
    fallback.entry = std::string(name);
    fallback.shared = 0;
    fallback.cluster = 1;
    fallback.cooperative = false;
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

}  // namespace tfmem
