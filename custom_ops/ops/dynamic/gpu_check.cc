// What has to hold before scripts run on a GPU.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/gpu_script.h"

namespace tfmem {
namespace {

constexpr uint32_t kLengths[] = {0, 4, 4, 4, 2, 3, 6, 3, 3, 5};  // of each op

class Checker {
 public:
  Checker(const DynamicSpec& spec, const GpuProgram& program, const DynamicBatch& batch,
          const std::vector<LookedUp>& looked_up, const GpuSent& sent)
      : spec_(spec),
        program_(program),
        batch_(batch),
        looked_up_(looked_up),
        sent_(sent),
        words_(sent.words) {
    for (size_t kind = 0; kind < program.segments.size(); ++kind) {
      for (const auto& section : program.segments[kind]) {
        for (const GpuSegment& segment : section) {
          kind_of_.resize(std::max<size_t>(kind_of_.size(), segment.number + 1), -1);
          kind_of_[segment.number] = kind;
          outputs_.resize(kind_of_.size());
          outputs_[segment.number] = segment.outputs;
        }
      }
    }
    signals_.resize(sent.phases);
    awaited_.resize(sent.phases, -1);
  }

  absl::Status Check() {
    const uint64_t table = program_.table, first = words_[table];
    if (first > words_.size() || uint64_t(sent_.common) > first) {
      return absl::InternalError("scripts lie outside of what is sent");
    }
    // What is common is checked once; then how often each word of it is called.
    callers_.resize(first - sent_.common + 1);
    ends_.resize(callers_.size(), -2);
    int64_t phase = -1;
    uint64_t at = sent_.common;
    if (!Script(&at, first, false, &phase)) return Broken("what is common", at - sent_.common);
    ends_.back() = phase;
    for (int64_t processor = 0; processor < program_.processors; ++processor) {
      const uint64_t begin = words_[table + processor], end = words_[table + processor + 1];
      phase = -1;
      at = begin;
      if (begin < first || begin > end || end > words_.size() || !Script(&at, end, true, &phase)) {
        return Broken(absl::StrCat("virtual processor ", processor), at - begin);
      }
    }
    int64_t callers = 0;
    for (at = sent_.common; at < first; at += words_[at] >> 8) {
      callers += callers_[at - sent_.common];
      if ((words_[at] & 0xFF) == static_cast<uint32_t>(GpuOp::kSignal)) {
        signals_[words_[at + 1]] += callers;
      }
    }
    for (size_t i = 0; i < signals_.size(); ++i) {
      if (awaited_[i] < 0 || awaited_[i] == signals_[i]) continue;
      return absl::InternalError(absl::StrCat(signals_[i], " virtual processors signal phase ", i,
                                              "; others wait for ", awaited_[i]));
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status Broken(const std::string& whose, uint64_t at) {
    return absl::InternalError(absl::StrCat("the script of ", whose, " is broken at word ", at));
  }

  // Whether [*at, end) are whole instructions that may run, a processor's or what is common, after
  // those that waited for `phase`.
  bool Script(uint64_t* at, uint64_t end, bool own, int64_t* phase) {
    while (*at < end) {
      const uint32_t* word = words_.data() + *at;
      const uint32_t op = *word & 0xFF, length = *word >> 8;
      if (op < 1 || op >= std::size(kLengths) || length != kLengths[op] || length > end - *at) {
        return false;
      }
      if (!own) ends_[*at - sent_.common] = *phase;
      if (!Instruction(static_cast<GpuOp>(op), word, own, phase)) return false;
      *at += length;
    }
    return true;
  }

  bool Instruction(GpuOp op, const uint32_t* word, bool own, int64_t* phase) {
    switch (op) {
      case GpuOp::kRun:
        return RowsExist(word);
      case GpuOp::kMultiply:
        return RowsExist(word) && word[3] <= kTile && int64_t{word[4]} < outputs_[word[1]] &&
               word[4] % kTile == 0;
      case GpuOp::kGradient:
        return word[1] < spec_.parameters.size() && !spec_.parameters[word[1]].sparse &&
               int64_t{word[2]} * kTile < spec_.parameters[word[1]].rows &&
               int64_t{word[3]} * kTile < spec_.parameters[word[1]].columns;
      case GpuOp::kSumRows:
        return word[1] < spec_.parameters.size() && spec_.parameters[word[1]].sparse &&
               uint64_t{word[2]} + word[3] <= uint64_t(looked_up_[word[1]].rows());
      case GpuOp::kSignal:
        if (word[1] >= signals_.size() || int64_t{word[1]} <= *phase) return false;
        if (own) ++signals_[word[1]];
        return true;
      case GpuOp::kWait:
        if (word[1] >= awaited_.size() || int64_t{word[1]} <= *phase) return false;
        *phase = word[1];
        if (awaited_[*phase] >= 0 && awaited_[*phase] != word[2]) return false;
        awaited_[*phase] = word[2];
        return true;
      case GpuOp::kGather:
        return int64_t{word[1]} >= kPointerWords + 3 * int64_t(spec_.parameters.size()) &&
               int64_t{word[1]} < program_.words &&
               uint64_t{word[4]} + word[5] <= uint64_t(batch_.nodes) &&
               uint64_t{word[3]} + batch_.nodes <= words_.size();
      case GpuOp::kLosses:
        return uint64_t{word[1]} + word[2] <= uint64_t(batch_.examples);
      case GpuOp::kCall:
        return own && Call(word[1], word[2], phase);
    }
    return false;
  }

  // Whether a segment runs for rows that there are.
  bool RowsExist(const uint32_t* word) const {
    return word[1] < kind_of_.size() && kind_of_[word[1]] >= 0 &&
           uint64_t{word[2]} + word[3] <= uint64_t(batch_.kinds[kind_of_[word[1]]].count);
  }

  bool Call(uint64_t begin, uint64_t end, int64_t* phase) {
    const uint64_t common = sent_.common;
    if (begin < common || begin >= end || end - common >= callers_.size()) return false;
    const int64_t before = ends_[begin - common], behind = ends_[end - common];
    if (before == -2 || behind == -2) return false;  // amid an instruction
    // Waits that follow each other are for later phases, so the first is what has to be looked at.
    const uint32_t* word = words_.data() + begin;
    const bool waits = (*word & 0xFF) == static_cast<uint32_t>(GpuOp::kWait);
    if (waits ? int64_t{word[1]} <= *phase : *phase >= 0) return false;
    *phase = behind;
    ++callers_[begin - common];
    --callers_[end - common];
    return true;
  }

  const DynamicSpec& spec_;
  const GpuProgram& program_;
  const DynamicBatch& batch_;
  const std::vector<LookedUp>& looked_up_;
  const GpuSent& sent_;
  const std::vector<uint32_t>& words_;
  std::vector<int> kind_of_;      // of each segment
  std::vector<int64_t> outputs_;  // of each that may be computed in tiles
  std::vector<int64_t> signals_;  // of each phase, by how many processors
  std::vector<int64_t> awaited_;  // and how many are waited for
  std::vector<int64_t> callers_;  // of each word of what is common, how many more than of the last
  std::vector<int64_t> ends_;     // and the phase waited for before it; -2: amid an instruction
};

}  // namespace

absl::Status CheckGpuScript(const DynamicSpec& spec, const GpuProgram& program,
                            const DynamicBatch& batch, const std::vector<LookedUp>& looked_up,
                            const GpuSent& sent) {
  return Checker(spec, program, batch, looked_up, sent).Check();
}

}  // namespace tfmem
