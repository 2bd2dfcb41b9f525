#include "custom_ops/ops/dynamic/script.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tfmem {
namespace {

constexpr double kWorthSharing = 4e4;  // nanoseconds of a phase below which one processor has it
constexpr int64_t kFewestRows = 4;

class Builder {
 public:
  Builder(const DynamicSpec& spec, const DynamicBatch& batch, const ScriptOptions& options)
      : spec_(spec), batch_(batch), options_(options) {
    script_.processors.resize(options.processors);
  }

  Script Build(const std::vector<int64_t>& looked_up) {
    if (options_.forward) {
      AllKinds(kBefore, kBefore);
      for (int level = 1; level < batch_.levels; ++level) Level(level, kLevel);
    }
    if (options_.forward && options_.backward) {
      AllKinds(kAfter, kBackBefore);
    } else if (options_.forward) {
      AllKinds(kAfter, kAfter);
    } else {
      AllKinds(kBackBefore, kBackBefore);
    }
    if (options_.backward) {
      for (int level = batch_.levels - 1; level > 0; --level) Level(level, kBackLevel);
      AllKinds(kBackAfter, kBackAfter);
      Gradients(looked_up);
    }
    return std::move(script_);
  }

 private:
  // An instruction that waits for its processor.
  struct Task {
    double work;
    std::vector<uint32_t> words;
  };

  void Rows(int kind, int64_t first, int64_t count, int from, int to) {
    double each = 0;
    for (int section = from; section <= to; ++section) each += spec_.kinds[kind].work[section];
    if (each == 0) return;
    int64_t block = kBlockRows;
    if (each * count > kWorthSharing) {
      const int64_t share = Blocks(count, options_.processors);
      block = std::max(kFewestRows, std::min(block, share));
    }
    for (int64_t row = first; row < first + count; row += block) {
      const int64_t rows = std::min(block, first + count - row);
      const uint32_t what = static_cast<uint32_t>(kind) | from << 16 | to << 24;
      tasks_.push_back({each * rows + 100,
                        {FirstWord(ScriptOp::kRun, 4), what, static_cast<uint32_t>(row),
                         static_cast<uint32_t>(rows)}});
    }
  }

  void AllKinds(int from, int to) {
    for (size_t kind = 0; kind < spec_.kinds.size(); ++kind) {
      Rows(kind, 0, batch_.kinds[kind].count, from, to);
    }
    EndPhase();
  }

  void Level(int level, int section) {
    const auto begin =
        std::lower_bound(batch_.groups.begin(), batch_.groups.end(), level,
                         [](const NodeGroup& group, int wanted) { return group.level < wanted; });
    for (auto group = begin; group != batch_.groups.end() && group->level == level; ++group) {
      Rows(group->kind, group->first, group->count, section, section);
    }
    EndPhase();
  }

  void Gradients(const std::vector<int64_t>& looked_up) {
    double nodes = 0;
    for (const KindRows& kind : batch_.kinds) nodes += kind.count;
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const DynamicParameter& parameter = spec_.parameters[i];
      const uint32_t number = i;
      if (parameter.sparse) {
        for (int64_t row = 0; row < looked_up[i]; row += kSummedRows) {
          const int64_t rows = std::min(kSummedRows, looked_up[i] - row);
          tasks_.push_back({0.5 * rows * parameter.columns,
                            {FirstWord(ScriptOp::kSumRows, 4), number, static_cast<uint32_t>(row),
                             static_cast<uint32_t>(rows)}});
        }
        continue;
      }
      const int64_t columns = std::min(parameter.columns, kGradientColumns);
      const double work = (nodes + 20) * 0.05 * columns * std::min(parameter.rows, kGradientRows);
      for (int64_t row = 0; row < Blocks(parameter.rows, kGradientRows); ++row) {
        for (int64_t column = 0; column < Blocks(parameter.columns, kGradientColumns); ++column) {
          tasks_.push_back({work,
                            {FirstWord(ScriptOp::kGradient, 4), number, static_cast<uint32_t>(row),
                             static_cast<uint32_t>(column)}});
        }
      }
    }
    EndPhase();
  }

  // Deals the tasks of a phase; one that has none is no phase.
  void EndPhase() {
    if (tasks_.empty()) return;
    double sum = 0;
    for (const Task& task : tasks_) sum += task.work;
    script_.work += sum;
    const size_t sharing = sum > kWorthSharing ? script_.processors.size() : 1;
    std::vector<double> load(sharing);
    if (script_.phases > 0) Everywhere(ScriptOp::kWait, script_.phases - 1);
    for (const Task& task : tasks_) {
      const size_t least = std::min_element(load.begin(), load.end()) - load.begin();
      load[least] += task.work;
      std::vector<uint32_t>& words = script_.processors[least];
      words.insert(words.end(), task.words.begin(), task.words.end());
    }
    Everywhere(ScriptOp::kSignal, script_.phases);
    script_.shared.push_back(sharing > 1);
    ++script_.phases;
    tasks_.clear();
  }

  void Everywhere(ScriptOp op, int phase) {
    for (std::vector<uint32_t>& words : script_.processors) {
      words.push_back(FirstWord(op, 2));
      words.push_back(phase);
    }
  }

  const DynamicSpec& spec_;
  const DynamicBatch& batch_;
  const ScriptOptions options_;
  Script script_;
  std::vector<Task> tasks_;
};

class Checker {
 public:
  Checker(const DynamicSpec& spec, const DynamicBatch& batch, const std::vector<int64_t>& looked_up)
      : spec_(spec), batch_(batch), looked_up_(looked_up) {}

  // Whether a processor's words are whole instructions that may run, in `phases` phases.
  bool Holds(const std::vector<uint32_t>& words, uint32_t phases, size_t* at) const {
    uint32_t signalled = 0, awaited = 0;
    for (*at = 0; *at < words.size(); *at += WordsOf(words[*at])) {
      const uint32_t* word = words.data() + *at;
      const ScriptOp op = OpOf(*word);
      const bool of_phase = op == ScriptOp::kSignal || op == ScriptOp::kWait;
      if (WordsOf(*word) != (of_phase ? 2 : 4) || words.size() - *at < size_t(WordsOf(*word))) {
        return false;
      }
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
  bool Work(ScriptOp op, const uint32_t* word) const {
    if (op == ScriptOp::kRun) {
      const uint32_t kind = word[1] & 0xFFFF, from = word[1] >> 16 & 0xFF, to = word[1] >> 24;
      return kind < batch_.kinds.size() && from <= to && to < kGradients && word[3] <= kBlockRows &&
             int64_t{word[2]} + word[3] <= batch_.kinds[kind].count;
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
};

}  // namespace

Script BuildScript(const DynamicSpec& spec, const DynamicBatch& batch,
                   const std::vector<int64_t>& looked_up, const ScriptOptions& options) {
  return Builder(spec, batch, options).Build(looked_up);
}

absl::Status CheckScript(const DynamicSpec& spec, const DynamicBatch& batch,
                         const std::vector<int64_t>& looked_up, const Script& script) {
  const Checker checker(spec, batch, looked_up);
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
