#include "custom_ops/ops/dynamic/script.h"

#include <algorithm>
#include <utility>

#include "custom_ops/ops/cpu/costs.h"

namespace tfmem {
namespace {

// Nanoseconds: of a phase below which one processor has it; of one that are a processor's, at
// least; for each processor, in two phases more.
constexpr double kWorthSharing = cpu_costs::kSharedPhaseNs;
constexpr double kShare = cpu_costs::kDealtShareNs;
constexpr double kClaim = cpu_costs::kClaimNs;
constexpr int64_t kFewestRows = 4;
constexpr int64_t kDealtRows = 16;     // whose products may be dealt
constexpr int kMostProducts = 64;      // that are dealt at once
constexpr size_t kMostSteps = 0xFFFF;  // of a section, as half a word counts them

// Steps [first, last) of a section: products of which none reads or overwrites what another one
// writes or reads, so that each can be cut into columns and all of them dealt at once. A product on
// which another one builds up has the same columns, and may be before it.
struct ProductGroup {
  int first = 0;
  int last = 0;
  double work = 0;  // about nanoseconds for a node
};

// The longest groups that there are, up to a bound, in order.
std::vector<ProductGroup> ProductGroups(const std::vector<DynamicStep>& steps) {
  std::vector<ProductGroup> found;
  const auto joins = [&](const ProductGroup& group, const DynamicStep& step) {
    for (int i = group.first; i < group.last; ++i) {
      if (steps[i].target == step.values[0] || steps[i].values[0] == step.target) return false;
    }
    return true;
  };
  const int count = steps.size();
  for (int i = 0; i < count; ++i) {
    const DynamicStep& step = steps[i];
    if (step.op != StepOp::kProduct || step.values[0] == step.target) continue;
    if (found.empty() || found.back().last != i || i - found.back().first == kMostProducts ||
        !joins(found.back(), step)) {
      found.push_back({i, i, 0});
    }
    found.back().last = i + 1;
    found.back().work += step.work;
  }
  return found;
}

class Builder {
 public:
  Builder(const DynamicSpec& spec, const DynamicBatch& batch, const ScriptOptions& options)
      : spec_(spec), batch_(batch), options_(options) {
    script_.processors.resize(options.processors);
    for (const DynamicKind& kind : spec.kinds) {
      products_.emplace_back();
      for (int section = 0; section < kGradients; ++section) {
        products_.back().push_back(ProductGroups(kind.sections[section]));
      }
    }
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
    Close();
    Bridge();
    return std::move(script_);
  }

 private:
  // An instruction that waits for its processor.
  struct Task {
    double work;
    std::vector<uint32_t> words;
  };

  // What runs between two waits where products are dealt: the first processor's instructions, or
  // each processor's, which have one each.
  struct Stage {
    bool dealt = false;
    double work = 0;
    std::vector<std::vector<uint32_t>> instructions;
  };

  // The stages of rows, begun and ended by one of the first processor; empty if none is dealt.
  std::vector<Stage> Dealt(int kind, int64_t first, int64_t count, int from, int to) const {
    if (options_.processors < 2 || count > kDealtRows) return {};
    const double worth = options_.worth_dealing + kClaim * (options_.processors - 2);
    const uint32_t row = first, rows = count;
    std::vector<Stage> stages(1);
    const auto steps = [&](uint32_t what, uint32_t begin, uint32_t end, double work) {
      if (begin == end) return;
      stages.back().work += work;
      stages.back().instructions.push_back(
          {FirstWord(ScriptOp::kSteps, 5), what, begin | end << 16, row, rows});
    };
    for (int section = from; section <= to; ++section) {
      const DynamicKind& of = spec_.kinds[kind];
      if (of.sections[section].size() > kMostSteps) return {};
      const uint32_t what = static_cast<uint32_t>(kind) | section << 16;
      int done = 0;
      double work = of.work[section] * count;
      for (const ProductGroup& group : products_[kind][section]) {
        const double own = group.work * count;
        if (own < worth) continue;
        steps(what, done, group.first, 0);
        Stage products{true, own, {}};
        const uint32_t parts = std::clamp<int64_t>(own / kShare, 1, options_.processors);
        for (uint32_t part = 0; part < parts; ++part) {
          products.instructions.push_back({FirstWord(ScriptOp::kColumns, 6), what,
                                           static_cast<uint32_t>(group.first) | group.last << 16,
                                           row, rows, part | parts << 16});
        }
        stages.push_back(std::move(products));
        stages.emplace_back();
        done = group.last;
        work -= own;
      }
      steps(what, done, of.sections[section].size(), work);
    }
    return stages.size() > 1 ? stages : std::vector<Stage>();
  }

  void Rows(int kind, int64_t first, int64_t count, int from, int to) {
    double each = 0;
    for (int section = from; section <= to; ++section) each += spec_.kinds[kind].work[section];
    if (each == 0) return;
    if (std::vector<Stage> stages = Dealt(kind, first, count, from, to); !stages.empty()) {
      dealt_.push_back(std::move(stages));
      return;
    }
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
          tasks_.push_back({cpu_costs::kSummedNumberNs * rows * parameter.columns,
                            {FirstWord(ScriptOp::kSumRows, 4), number, static_cast<uint32_t>(row),
                             static_cast<uint32_t>(rows)}});
        }
        continue;
      }
      const int64_t columns = std::min(parameter.columns, kGradientColumns);
      const double work = (nodes + 20) * cpu_costs::kNodeMultiplicationNs * columns *
                          std::min(parameter.rows, kGradientRows);
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

  // Rows that are not dealt run in a phase, then those that are, stage by stage.
  void EndPhase() {
    EndTasks();
    size_t stages = 0;
    for (const std::vector<Stage>& each : dealt_) stages = std::max(stages, each.size());
    for (size_t stage = 0; stage < stages; ++stage) {
      if (stage % 2 == 1) Close();  // of the first processor
      Open();
      for (const std::vector<Stage>& each : dealt_) {
        if (stage < each.size()) Put(each[stage]);
      }
      if (stage % 2 == 1) Close();
    }
    script_.deals = script_.deals || stages > 0;
    dealt_.clear();
  }

  void Put(const Stage& stage) {
    sum_ += stage.work;
    for (size_t i = 0; i < stage.instructions.size(); ++i) {
      const std::vector<uint32_t>& words = stage.instructions[i];
      std::vector<uint32_t>& to = script_.processors[stage.dealt ? i : 0];
      to.insert(to.end(), words.begin(), words.end());
    }
  }

  // A phase of the first processor alone stays open for what it has to do next; meanwhile the
  // others wait for their share of a product.
  void Open() {
    if (open_) return;
    if (script_.phases > 0) Everywhere(ScriptOp::kWait, script_.phases - 1);
    open_ = true;
  }

  void Close() {
    if (!open_) return;
    Everywhere(ScriptOp::kSignal, script_.phases);
    script_.shared.push_back(true);
    script_.work += sum_;
    work_.push_back(std::exchange(sum_, 0));
    ++script_.phases;
    open_ = false;
  }

  // Deals the tasks of a phase; one that has none is no phase.
  void EndTasks() {
    if (tasks_.empty()) return;
    Close();
    for (const Task& task : tasks_) sum_ += task.work;
    const size_t sharing = sum_ > kWorthSharing ? script_.processors.size() : 1;
    std::vector<double> load(sharing);
    Open();
    for (const Task& task : tasks_) {
      const size_t least = std::min_element(load.begin(), load.end()) - load.begin();
      load[least] += task.work;
      std::vector<uint32_t>& words = script_.processors[least];
      words.insert(words.end(), task.words.begin(), task.words.end());
    }
    Close();
    script_.shared.back() = sharing > 1;
    tasks_.clear();
  }

  // Short phases of the first processor between some that are shared: scheduling the others again
  // takes longer than they wait.
  void Bridge() {
    for (int phase = 0; phase < script_.phases;) {
      int end = phase;
      double work = 0;
      for (; end < script_.phases && !script_.shared[end]; ++end) work += work_[end];
      if (phase > 0 && end < script_.phases && work <= kWorthSharing) {
        std::fill(script_.shared.begin() + phase, script_.shared.begin() + end, true);
      }
      phase = end + 1;
    }
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
  std::vector<std::vector<std::vector<ProductGroup>>> products_;  // of each kind and section
  Script script_;
  std::vector<Task> tasks_;
  std::vector<std::vector<Stage>> dealt_;
  bool open_ = false;         // a phase of the first processor
  double sum_ = 0;            // work of the phase that is open
  std::vector<double> work_;  // of each phase
};

}  // namespace

Script BuildScript(const DynamicSpec& spec, const DynamicBatch& batch,
                   const std::vector<int64_t>& looked_up, const ScriptOptions& options) {
  return Builder(spec, batch, options).Build(looked_up);
}

}  // namespace tfmem
