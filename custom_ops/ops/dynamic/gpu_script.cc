#include "custom_ops/ops/dynamic/gpu_script.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tfmem {
namespace {

constexpr uint32_t kNowhere = 0xFFFFFFFF;
constexpr int64_t kLargestPlace = kNowhere - 1;
constexpr int64_t kGathered = 64;      // nodes of an instruction
constexpr int64_t kSummedLosses = 64;  // examples of an instruction
constexpr int64_t kTableRows = 16;     // of a table, summed by an instruction

uint32_t First(GpuOp op, int words) { return static_cast<uint32_t>(op) | words << 8; }

class Builder {
 public:
  Builder(const DynamicSpec& spec, const GpuProgram& program, const DynamicBatch& batch,
          const DynamicLayout& layout, const GpuCall& call)
      : spec_(spec),
        program_(program),
        batch_(batch),
        layout_(layout),
        call_(call),
        scripts_(program.processors),
        load_(program.processors),
        phase_of_(program.processors, -1) {}

  void Build(const std::vector<LookedUp>& looked_up, GpuSent* sent) {
    if (call_.forward) {
      All({kBefore});
      for (int level = 1; level < batch_.levels; ++level) Level(level, kLevel);
    }
    if (call_.forward && call_.backward) {
      All({kAfter, kBackBefore});
    } else {
      All({call_.forward ? kAfter : kBackBefore});
    }
    if (call_.backward) {
      for (int level = batch_.levels - 1; level > 0; --level) Level(level, kBackLevel);
      All({kBackAfter});
      Gradients(looked_up);
    }
    if (call_.forward) Results(sent);
    EndPhase();
    sent->phases = phase_;
    const int64_t table = program_.table;
    for (size_t i = 0; i < scripts_.size(); ++i) {
      sent->words[table + i] = sent->words.size();
      sent->words.insert(sent->words.end(), scripts_[i].begin(), scripts_[i].end());
    }
    sent->words[table + scripts_.size()] = sent->words.size();
  }

 private:
  struct Rows {
    int kind;
    int64_t first;
    int64_t count;
  };
  struct Round {
    bool product = false;
    std::vector<const GpuSegment*> segments;
  };

  void All(std::initializer_list<int> sections) {
    std::vector<Rows> rows;
    for (size_t kind = 0; kind < spec_.kinds.size(); ++kind) {
      if (batch_.kinds[kind].count > 0) {
        rows.push_back({static_cast<int>(kind), 0, batch_.kinds[kind].count});
      }
    }
    Run(rows, sections);
  }

  void Level(int level, int section) {
    std::vector<Rows> rows;
    auto group =
        std::lower_bound(batch_.groups.begin(), batch_.groups.end(), level,
                         [](const NodeGroup& group, int wanted) { return group.level < wanted; });
    for (; group != batch_.groups.end() && group->level == level; ++group) {
      rows.push_back({group->kind, group->first, group->count});
    }
    Run(rows, {section});
  }

  // A phase for each round. Where a section ends and the next begins with what one processor does
  // for a block of nodes, it does both in one.
  void Run(const std::vector<Rows>& rows, std::initializer_list<int> sections) {
    std::vector<std::vector<Round>> rounds;
    for (const Rows& of : rows) {
      std::vector<Round>& of_kind = rounds.emplace_back();
      for (const int section : sections) {
        size_t begin = of_kind.size();
        const std::vector<GpuSegment>& segments = program_.segments[of.kind][section];
        if (begin > 0 && !segments.empty() && segments[0].count == 0 && !of_kind.back().product) {
          --begin;
        }
        for (const GpuSegment& segment : segments) {
          of_kind.resize(std::max(of_kind.size(), begin + segment.round + 1));
          of_kind[begin + segment.round].segments.push_back(&segment);
          of_kind[begin + segment.round].product = segment.count > 0;
        }
      }
    }
    for (size_t round = 0;; ++round) {
      // Products first: who runs them is given, and the rest goes to those that have less to do.
      for (const bool product : {true, false}) {
        for (size_t i = 0; i < rows.size(); ++i) {
          if (round >= rounds[i].size() || rounds[i][round].product != product) continue;
          if (!product) {
            Blocks(rounds[i][round].segments, rows[i]);
            continue;
          }
          for (const GpuSegment* segment : rounds[i][round].segments) Product(*segment, rows[i]);
        }
      }
      if (tasks_.empty() && for_all_.empty()) break;
      EndPhase();
    }
  }

  void Product(const GpuSegment& segment, const Rows& rows) {
    const uint32_t words[] = {First(GpuOp::kRun, 4), static_cast<uint32_t>(segment.number),
                              static_cast<uint32_t>(rows.first), static_cast<uint32_t>(rows.count)};
    if (segment.count == program_.processors) {
      for_all_.insert(for_all_.end(), std::begin(words), std::end(words));
      return;
    }
    for (int i = 0; i < segment.count; ++i) {
      Add((segment.first + i) % program_.processors, segment.cost * rows.count,
          {words[0], words[1], words[2], words[3]});
    }
  }

  void Blocks(const std::vector<const GpuSegment*>& segments, const Rows& rows) {
    const int64_t block = (rows.count + program_.processors - 1) / program_.processors;
    for (int64_t row = 0; row < rows.count; row += block) {
      const int64_t count = std::min(block, rows.count - row), processor = Least();
      for (const GpuSegment* segment : segments) {
        Add(processor, segment->cost * count,
            {First(GpuOp::kRun, 4), static_cast<uint32_t>(segment->number),
             static_cast<uint32_t>(rows.first + row), static_cast<uint32_t>(count)});
      }
    }
  }

  void Gradients(const std::vector<LookedUp>& looked_up) {
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const DynamicParameter& parameter = spec_.parameters[i];
      const uint32_t number = i;
      if (parameter.sparse) {
        for (int64_t row = 0; row < looked_up[i].rows(); row += kTableRows) {
          const int64_t rows = std::min(kTableRows, looked_up[i].rows() - row);
          Add(Least(), 20 * rows,
              {First(GpuOp::kSumRows, 4), number, static_cast<uint32_t>(row),
               static_cast<uint32_t>(rows)});
        }
        continue;
      }
      for (int64_t row = 0; row < Tiles(parameter.rows); ++row) {
        for (int64_t column = 0; column < Tiles(parameter.columns); ++column) {
          Add(Least(), 20 * batch_.nodes + 500,
              {First(GpuOp::kGradient, 4), number, static_cast<uint32_t>(row),
               static_cast<uint32_t>(column)});
        }
      }
    }
  }

  static int64_t Tiles(int64_t count) { return (count + kGradientTile - 1) / kGradientTile; }

  // Losses, outputs and states.
  void Results(GpuSent* sent) {
    for (int64_t first = 0; first < batch_.examples; first += kSummedLosses) {
      const int64_t count = std::min(kSummedLosses, batch_.examples - first);
      Add(Least(), 100,
          {First(GpuOp::kLosses, 3), static_cast<uint32_t>(first), static_cast<uint32_t>(count)});
    }
    const int64_t outputs = MostOutputs(spec_);
    const int64_t pointer = kPointerWords + 3 * spec_.parameters.size();
    for (int64_t i = 0; i < outputs; ++i) {
      int64_t width = 0;
      std::vector<uint32_t> places;
      for (const DynamicKind& kind : spec_.kinds) {
        if (i < int64_t(kind.outputs.size())) width = kind.outputs[i];
      }
      for (int64_t node = 0; node < batch_.nodes; ++node) {
        const auto& of = layout_.outputs[batch_.kind_of[node]];
        places.push_back(i < int64_t(of.size()) ? of[i] + batch_.row_of[node] * StrideOf(width)
                                                : kNowhere);
      }
      Gather(pointer + i, width, places, sent);
    }
    if (call_.state_type < 0) return;
    const std::vector<int64_t>& widths = spec_.types[call_.state_type];
    for (size_t i = 0; i < widths.size(); ++i) {
      std::vector<uint32_t> places;
      for (int64_t node = 0; node < batch_.nodes; ++node) {
        const int kind = batch_.kind_of[node];
        const int64_t row = batch_.kinds[kind].states[batch_.row_of[node]];
        places.push_back(spec_.kinds[kind].type == call_.state_type
                             ? layout_.states[call_.state_type][i] + row * StrideOf(widths[i])
                             : kNowhere);
      }
      Gather(pointer + outputs + i, widths[i], places, sent);
    }
  }

  void Gather(int64_t pointer, int64_t width, const std::vector<uint32_t>& places, GpuSent* sent) {
    const uint32_t list = sent->words.size();
    sent->words.insert(sent->words.end(), places.begin(), places.end());
    for (int64_t first = 0; first < batch_.nodes; first += kGathered) {
      const int64_t count = std::min(kGathered, batch_.nodes - first);
      Add(Least(), count * width / 64,
          {First(GpuOp::kGather, 6), static_cast<uint32_t>(pointer), static_cast<uint32_t>(width),
           list, static_cast<uint32_t>(first), static_cast<uint32_t>(count)});
    }
  }

  int64_t Least() const { return std::min_element(load_.begin(), load_.end()) - load_.begin(); }

  void Add(int64_t processor, int64_t cost, std::initializer_list<uint32_t> words) {
    Task& task = tasks_.emplace_back();
    task.processor = processor;
    task.count = words.size();
    std::copy(words.begin(), words.end(), task.words);
    load_[processor] += cost;
  }

  // Whoever takes part in a phase waits for all who took part in the one before.
  void EndPhase() {
    if (tasks_.empty() && for_all_.empty()) return;
    const uint32_t phase = phase_;
    const uint32_t wait[] = {First(GpuOp::kWait, 3), phase - 1, static_cast<uint32_t>(took_part_)};
    const uint32_t signal[] = {First(GpuOp::kSignal, 2), phase};
    const int waits = phase == 0 ? 0 : std::size(wait);
    std::vector<uint32_t> words(wait, wait + waits);
    words.insert(words.end(), for_all_.begin(), for_all_.end());
    const bool only_for_all = tasks_.empty();
    if (only_for_all) words.insert(words.end(), std::begin(signal), std::end(signal));
    took_part_ = 0;
    const auto enter = [&](size_t processor) {
      phase_of_[processor] = phase_;
      scripts_[processor].insert(scripts_[processor].end(), words.begin(), words.end());
      ++took_part_;
    };
    if (!for_all_.empty()) {
      for (size_t i = 0; i < scripts_.size(); ++i) enter(i);
    }
    for (const Task& task : tasks_) {
      if (phase_of_[task.processor] != phase_) enter(task.processor);
      std::vector<uint32_t>& script = scripts_[task.processor];
      script.insert(script.end(), task.words, task.words + task.count);
    }
    for (size_t i = 0; i < scripts_.size() && !only_for_all; ++i) {
      if (phase_of_[i] != phase_) continue;
      scripts_[i].insert(scripts_[i].end(), std::begin(signal), std::end(signal));
    }
    ++phase_;
    tasks_.clear();
    for_all_.clear();
    std::fill(load_.begin(), load_.end(), 0);
  }

  struct Task {
    int64_t processor;
    int count;
    uint32_t words[6];
  };

  const DynamicSpec& spec_;
  const GpuProgram& program_;
  const DynamicBatch& batch_;
  const DynamicLayout& layout_;
  const GpuCall call_;
  std::vector<std::vector<uint32_t>> scripts_;
  std::vector<int64_t> load_;
  std::vector<Task> tasks_;        // of this phase
  std::vector<uint32_t> for_all_;  // instructions of this phase that every processor has
  std::vector<int> phase_of_;      // in which a processor was last given something to do
  int phase_ = 0;
  int took_part_ = 0;  // in the phase before
};

}  // namespace

absl::StatusOr<GpuSent> BuildGpuScript(const DynamicSpec& spec, const GpuProgram& program,
                                       const DynamicBatch& batch, const DynamicLayout& layout,
                                       const std::vector<LookedUp>& looked_up,
                                       const GpuCall& call) {
  GpuSent sent;
  WriteGpuTables(spec, program, batch, layout, looked_up, &sent);
  if (sent.floats > kLargestPlace || sent.words.size() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", batch.nodes, " nodes needs ",
                                                   sent.floats, " numbers; a script addresses ",
                                                   kLargestPlace, ": give smaller batches"));
  }
  Builder(spec, program, batch, layout, call).Build(looked_up, &sent);
  return sent;
}

}  // namespace tfmem
