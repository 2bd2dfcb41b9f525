#include <cstddef>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/script.h"

namespace tfmem {
namespace {

class Checker {
 public:
  Checker(const DynamicSpec& spec, const DynamicBatch& batch, const std::vector<int64_t>& looked_up,
          bool deals)
      : spec_(spec), batch_(batch), looked_up_(looked_up), deals_(deals) {}

  // Whether a processor's words are whole instructions that may run, in `phases` phases.
  bool Holds(const std::vector<uint32_t>& words, uint32_t phases, size_t* at) const {
    uint32_t signalled = 0, awaited = 0;
    for (*at = 0; *at < words.size(); *at += WordsOf(words[*at])) {
      const uint32_t* word = words.data() + *at;
      const ScriptOp op = OpOf(*word);
      if (WordsOf(*word) != Length(op) || words.size() - *at < size_t(WordsOf(*word))) return false;
      if (op == ScriptOp::kWait) {
        if (word[1] != awaited || awaited + 1 != signalled) return false;
        ++awaited;
      } else if (op == ScriptOp::kSignal) {
        if (word[1] != signalled || awaited != signalled) return false;
        ++signalled;
      } else if (awaited != signalled || !Work(op, word)) {
        return false;
      }
    }
    return signalled == phases;
  }

 private:
  static int Length(ScriptOp op) {
    if (op == ScriptOp::kSignal || op == ScriptOp::kWait) return 2;
    return op == ScriptOp::kSteps ? 5 : op == ScriptOp::kColumns ? 6 : 4;
  }

  bool IsRows(uint32_t kind, uint32_t first, uint32_t rows) const {
    return kind < batch_.kinds.size() && rows <= kBlockRows &&
           int64_t{first} + rows <= batch_.kinds[kind].count;
  }

  bool Steps(ScriptOp op, const uint32_t* word) const {
    const uint32_t kind = word[1] & 0xFFFF, section = word[1] >> 16;
    const uint32_t first = word[2] & 0xFFFF, last = word[2] >> 16;
    if (!deals_ || !IsRows(kind, word[3], word[4]) || section >= kGradients) return false;
    const std::vector<DynamicStep>& steps = spec_.kinds[kind].sections[section];
    if (first > last || last > steps.size()) return false;
    if (op == ScriptOp::kSteps) return true;
    for (uint32_t step = first; step < last; ++step) {
      if (steps[step].op != StepOp::kProduct) return false;
    }
    return (word[5] & 0xFFFF) < word[5] >> 16;
  }

  bool Work(ScriptOp op, const uint32_t* word) const {
    if (op == ScriptOp::kSteps || op == ScriptOp::kColumns) return Steps(op, word);
    if (op == ScriptOp::kRun) {
      const uint32_t kind = word[1] & 0xFFFF, from = word[1] >> 16 & 0xFF, to = word[1] >> 24;
      return IsRows(kind, word[2], word[3]) && from <= to && to < kGradients;
    }
    if (word[1] >= spec_.parameters.size()) return false;
    const DynamicParameter& parameter = spec_.parameters[word[1]];
    if (op == ScriptOp::kGradient) {
      return !parameter.sparse && word[2] < Blocks(parameter.rows, kGradientRows) &&
             word[3] < Blocks(parameter.columns, kGradientColumns);
    }
    return op == ScriptOp::kSumRows && parameter.sparse &&
           int64_t{word[2]} + word[3] <= looked_up_[word[1]];
  }

  const DynamicSpec& spec_;
  const DynamicBatch& batch_;
  const std::vector<int64_t>& looked_up_;
  const bool deals_;  // and there is memory for it
};

}  // namespace

absl::Status CheckScript(const DynamicSpec& spec, const DynamicBatch& batch,
                         const std::vector<int64_t>& looked_up, const Script& script) {
  const Checker checker(spec, batch, looked_up, script.deals);
  for (size_t i = 0; i < script.processors.size(); ++i) {
    size_t at = 0;
    if (checker.Holds(script.processors[i], script.phases, &at)) continue;
    return absl::InternalError(absl::StrCat("the script of virtual processor ", i,
                                            " is broken at word ", at, " of ",
                                            script.processors[i].size()));
  }
  return absl::OkStatus();
}

}  // namespace tfmem
