// What has to hold before scripts run on a GPU.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/gpu_script.h"

namespace tfmem {

absl::Status CheckGpuScript(const DynamicSpec& spec, const GpuProgram& program,
                            const DynamicBatch& batch, const GpuSent& sent) {
  const std::vector<uint32_t>& words = sent.words;
  std::vector<int> kind_of;
  for (size_t kind = 0; kind < program.segments.size(); ++kind) {
    for (const auto& section : program.segments[kind]) {
      for (const GpuSegment& segment : section) {
        kind_of.resize(std::max<size_t>(kind_of.size(), segment.number + 1), -1);
        kind_of[segment.number] = kind;
      }
    }
  }
  std::vector<int64_t> signals(sent.phases), awaited(sent.phases, -1);
  const int64_t pointers = kPointerWords + 3 * spec.parameters.size();
  for (int64_t processor = 0; processor < program.processors; ++processor) {
    const uint64_t begin = words[program.table + processor];
    const uint64_t end = words[program.table + processor + 1];
    int64_t phase = -1;  // that was waited for last
    bool broken = begin > end || end > words.size();
    uint64_t at = begin;
    while (!broken && at < end) {
      const uint32_t* word = words.data() + at;
      const uint64_t length = *word >> 8;
      constexpr uint64_t kLengths[] = {0, 4, 4, 4, 2, 3, 6, 3};
      const uint32_t op = *word & 0xFF;
      broken = op < 1 || op > 7 || length != kLengths[op] || length > end - at;
      if (broken) break;
      switch (static_cast<GpuOp>(op)) {
        case GpuOp::kRun:
          broken = word[1] >= kind_of.size() || kind_of[word[1]] < 0 ||
                   uint64_t{word[2]} + word[3] > uint64_t(batch.kinds[kind_of[word[1]]].count);
          break;
        case GpuOp::kGradient:
          broken = word[1] >= spec.parameters.size() || spec.parameters[word[1]].sparse;
          break;
        case GpuOp::kSumRows:
          broken = word[1] >= spec.parameters.size() || !spec.parameters[word[1]].sparse;
          break;
        case GpuOp::kSignal:
          broken = word[1] >= signals.size() || int64_t{word[1]} <= phase;
          if (!broken) ++signals[word[1]];
          break;
        case GpuOp::kWait:
          broken = word[1] >= awaited.size() || int64_t{word[1]} <= phase;
          if (broken) break;
          phase = word[1];
          broken = awaited[phase] >= 0 && awaited[phase] != word[2];
          awaited[phase] = word[2];
          break;
        case GpuOp::kGather:
          broken = int64_t{word[1]} < pointers || int64_t{word[1]} >= program.words ||
                   uint64_t{word[4]} + word[5] > uint64_t(batch.nodes) ||
                   uint64_t{word[3]} + batch.nodes > words.size();
          break;
        case GpuOp::kLosses:
          broken = uint64_t{word[1]} + word[2] > uint64_t(batch.examples);
          break;
      }
      if (!broken) at += length;
    }
    if (!broken) continue;
    return absl::InternalError(absl::StrCat("the script of virtual processor ", processor,
                                            " is broken at word ", at - begin, " of ",
                                            end - begin));
  }
  for (size_t phase = 0; phase < signals.size(); ++phase) {
    if (awaited[phase] < 0 || awaited[phase] == signals[phase]) continue;
    return absl::InternalError(absl::StrCat(signals[phase], " virtual processors signal phase ",
                                            phase, "; others wait for ", awaited[phase]));
  }
  return absl::OkStatus();
}

}  // namespace tfmem
