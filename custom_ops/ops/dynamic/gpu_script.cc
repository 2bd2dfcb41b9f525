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

// The table and the lists. The order is that of custom_ops/dynamic/codegen/table.py.
class Tables {
 public:
  Tables(const DynamicSpec& spec, const GpuProgram& program, const DynamicBatch& batch,
         const DynamicLayout& layout, const std::vector<LookedUp>& looked_up, GpuSent* sent)
      : spec_(spec), program_(program), batch_(batch), layout_(layout), sent_(*sent) {
    // The table, and behind it where each processor's script begins.
    sent_.words.resize(program.table + program.processors + 1);
    sent_.floats = layout.floats;
    Types();
    Kinds();
    for (size_t i = 0; i < looked_up.size(); ++i) LookUps(looked_up[i]);
    std::vector<uint32_t> first(batch.first_of.begin(), batch.first_of.end());
    Word(List(first));
    std::vector<uint32_t> losses;
    for (int64_t node = 0; node < batch.nodes; ++node) {
      const int64_t place = layout.losses[batch.kind_of[node]];
      losses.push_back(place < 0 ? kNowhere : place + batch.row_of[node]);
    }
    Word(List(losses));
  }

 private:
  void Word(int64_t value) { sent_.words[next_++] = static_cast<uint32_t>(value); }

  template <typename Values>
  int64_t List(const Values& values) {
    const int64_t at = sent_.words.size();
    sent_.words.insert(sent_.words.end(), values.begin(), values.end());
    return at;
  }

  // Positions of puts come behind those of types, so they are counted first.
  std::vector<std::vector<int64_t>> PutWords() const {
    std::vector<std::vector<int64_t>> found;
    int64_t at = 0;
    for (const auto& widths : spec_.types) at += widths.size() + 2;
    for (size_t i = 0; i < spec_.kinds.size(); ++i) {
      const DynamicKind& kind = spec_.kinds[i];
      at += 4 + kind.children.size() + kind.arguments.size() + kind.kept.size() +
            program_.spilled[i].size() + kind.outputs.size();
      found.emplace_back();
      for (int child : kind.children) {
        found.back().push_back(at);
        at += spec_.types[child].size();
      }
      ++at;
    }
    return found;
  }

  void Types() {
    const std::vector<std::vector<int64_t>> puts = PutWords();
    for (size_t type = 0; type < spec_.types.size(); ++type) {
      for (int64_t place : layout_.states[type]) Word(place);
      const TypeRows& rows = batch_.types[type];
      Word(List(rows.first_parent));
      std::vector<uint32_t> parents;
      for (const ParentEntry& parent : rows.parents) {
        parents.push_back(puts[parent.kind][parent.slot]);
        parents.push_back(parent.row);
      }
      Word(List(parents));
    }
  }

  void Kinds() {
    for (size_t i = 0; i < spec_.kinds.size(); ++i) {
      const KindRows& rows = batch_.kinds[i];
      Word(rows.count);
      Word(List(rows.nodes));
      Word(List(rows.examples));
      Word(List(rows.states));
      for (const auto& child : rows.children) Word(List(child));
      for (const auto& argument : rows.arguments) Word(List(argument));
      for (int64_t place : layout_.kept[i]) Word(place);
      for (int64_t width : program_.spilled[i]) {
        Word(sent_.floats);
        sent_.floats += (rows.count * StrideOf(width) + 15) / 16 * 16;
      }
      for (int64_t place : layout_.outputs[i]) Word(place);
      for (const auto& child : layout_.children[i]) {
        for (int64_t place : child) Word(place < 0 ? int64_t{kNowhere} : place);
      }
      Word(layout_.losses[i] < 0 ? int64_t{kNowhere} : layout_.losses[i]);
    }
  }

  void LookUps(const LookedUp& table) {
    std::vector<uint32_t> rows, entries;
    for (int64_t row = 0; row < table.rows(); ++row) {
      rows.push_back(table.entries[table.first[row]].row);
    }
    for (const LookedUp::Entry& entry : table.entries) {
      const DynamicStep& step = spec_.kinds[entry.kind].sections[kGradients][entry.step];
      const int64_t place = layout_.kept[entry.kind][step.values[0].number];
      entries.push_back(place + entry.node * StrideOf(step.width));
      entries.push_back(step.numbers[2]);
      entries.push_back(step.width);
    }
    sent_.looked_up.push_back(List(rows));
    Word(sent_.looked_up.back());
    Word(List(table.first));
    Word(List(entries));
  }

  const DynamicSpec& spec_;
  const GpuProgram& program_;
  const DynamicBatch& batch_;
  const DynamicLayout& layout_;
  GpuSent& sent_;
  int64_t next_ = 0;
};

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
      All(kBefore);
      for (int level = 1; level < batch_.levels; ++level) Level(level, kLevel);
      All(kAfter);
    }
    if (call_.backward) {
      All(kBackBefore);
      for (int level = batch_.levels - 1; level > 0; --level) Level(level, kBackLevel);
      All(kBackAfter);
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

  void All(int section) {
    std::vector<Rows> rows;
    for (size_t kind = 0; kind < spec_.kinds.size(); ++kind) {
      if (batch_.kinds[kind].count > 0) {
        rows.push_back({static_cast<int>(kind), 0, batch_.kinds[kind].count});
      }
    }
    Section(rows, section);
  }

  void Level(int level, int section) {
    std::vector<Rows> rows;
    auto group =
        std::lower_bound(batch_.groups.begin(), batch_.groups.end(), level,
                         [](const NodeGroup& group, int wanted) { return group.level < wanted; });
    for (; group != batch_.groups.end() && group->level == level; ++group) {
      rows.push_back({group->kind, group->first, group->count});
    }
    Section(rows, section);
  }

  // A phase for each round.
  void Section(const std::vector<Rows>& rows, int section) {
    int rounds = 0;
    for (const Rows& of : rows) {
      for (const GpuSegment& segment : program_.segments[of.kind][section]) {
        rounds = std::max(rounds, segment.round + 1);
      }
    }
    for (int round = 0; round < rounds; ++round) {
      // Products first: who runs them is given, and the rest goes to those that have less to do.
      for (const bool product : {true, false}) {
        for (const Rows& of : rows) {
          for (const GpuSegment& segment : program_.segments[of.kind][section]) {
            if (segment.round != round || (segment.count > 0) != product) continue;
            product ? Product(segment, of) : Blocks(segment, of);
          }
        }
      }
      EndPhase();
    }
  }

  void Product(const GpuSegment& segment, const Rows& rows) {
    for (int i = 0; i < segment.count; ++i) {
      const int64_t processor = (segment.first + i) % program_.processors;
      Add(processor, segment.cost * rows.count,
          {First(GpuOp::kRun, 4), static_cast<uint32_t>(segment.number),
           static_cast<uint32_t>(rows.first), static_cast<uint32_t>(rows.count)});
    }
  }

  void Blocks(const GpuSegment& segment, const Rows& rows) {
    const int64_t block = (rows.count + program_.processors - 1) / program_.processors;
    for (int64_t row = 0; row < rows.count; row += block) {
      const int64_t count = std::min(block, rows.count - row);
      Add(Least(), segment.cost * count,
          {First(GpuOp::kRun, 4), static_cast<uint32_t>(segment.number),
           static_cast<uint32_t>(rows.first + row), static_cast<uint32_t>(count)});
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

  // The first instruction of a phase comes behind a wait for all who took part in the one before.
  void Add(int64_t processor, int64_t cost, std::initializer_list<uint32_t> words) {
    std::vector<uint32_t>& script = scripts_[processor];
    if (phase_of_[processor] != phase_) {
      phase_of_[processor] = phase_;
      ++takes_part_;
      if (phase_ > 0) {
        script.insert(script.end(), {First(GpuOp::kWait, 3), static_cast<uint32_t>(phase_ - 1),
                                     static_cast<uint32_t>(took_part_)});
      }
    }
    script.insert(script.end(), words);
    load_[processor] += cost;
  }

  void EndPhase() {
    if (takes_part_ == 0) return;
    for (size_t i = 0; i < scripts_.size(); ++i) {
      if (phase_of_[i] != phase_) continue;
      scripts_[i].insert(scripts_[i].end(),
                         {First(GpuOp::kSignal, 2), static_cast<uint32_t>(phase_)});
    }
    took_part_ = takes_part_;
    takes_part_ = 0;
    ++phase_;
    std::fill(load_.begin(), load_.end(), 0);
  }

  const DynamicSpec& spec_;
  const GpuProgram& program_;
  const DynamicBatch& batch_;
  const DynamicLayout& layout_;
  const GpuCall call_;
  std::vector<std::vector<uint32_t>> scripts_;
  std::vector<int64_t> load_;
  std::vector<int> phase_of_;  // in which a processor was last given something to do
  int phase_ = 0;
  int takes_part_ = 0;
  int took_part_ = 0;
};

}  // namespace

absl::StatusOr<GpuSent> BuildGpuScript(const DynamicSpec& spec, const GpuProgram& program,
                                       const DynamicBatch& batch, const DynamicLayout& layout,
                                       const std::vector<LookedUp>& looked_up,
                                       const GpuCall& call) {
  GpuSent sent;
  Tables(spec, program, batch, layout, looked_up, &sent);
  if (sent.floats > kLargestPlace || sent.words.size() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", batch.nodes, " nodes needs ",
                                                   sent.floats, " numbers; a script addresses ",
                                                   kLargestPlace, ": give smaller batches"));
  }
  Builder(spec, program, batch, layout, call).Build(looked_up, &sent);
  return sent;
}

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
