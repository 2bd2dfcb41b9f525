#include "custom_ops/ops/dynamic/gpu_script.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/loads.h"

namespace tfmem {
namespace {
constexpr int64_t kLargestPlace = kNowhere - 1;
constexpr int kCallWords = 3;
constexpr int64_t kGathered = 64;      // nodes of an instruction
constexpr int64_t kSummedLosses = 64;  // examples of an instruction
constexpr int64_t kTableRows = 16;     // of a table, summed by an instruction, at most
constexpr int64_t kTableEntries = 32;  // and nodes that looked them up, unless it is one row

// Cycles of a tile of a product, by what is slower: the tensor cores, or to bring both factors from
// L2. Tiles of half the rows have separate numbers.
constexpr int64_t kTileDepth = 32;  // terms of its sums at a time
constexpr int64_t kCyclesOfStep = 700, kCyclesOfHalfStep = 520, kCyclesOfTile = 2500;

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
        loads_(program.processors),
        called_(program.processors),
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
    const uint32_t common = sent->common = sent->words.size();
    size_t words = common + common_.size();
    for (const std::vector<uint32_t>& script : scripts_) words += script.size() + kCallWords;
    sent->words.reserve(words);
    sent->words.insert(sent->words.end(), common_.begin(), common_.end());
    for (size_t i = 0; i < scripts_.size(); ++i) {
      Call(i, common_.size());
      sent->words[table + i] = sent->words.size();
      for (size_t at = 0; at < scripts_[i].size(); at += scripts_[i][at] >> 8) {
        if ((scripts_[i][at] & 0xFF) != static_cast<uint32_t>(GpuOp::kCall)) continue;
        scripts_[i][at + 1] += common;
        scripts_[i][at + 2] += common;
      }
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
  // What may run between two barriers: products, and what one processor does for a block of nodes.
  struct Round {
    std::vector<const GpuSegment*> products, blocks;
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

  // A phase for each round. Rounds without products that follow each other are one: the processor
  // that has a block of nodes does all of them.
  void Run(const std::vector<Rows>& rows, std::initializer_list<int> sections) {
    std::vector<std::vector<Round>> rounds;
    for (const Rows& of : rows) {
      std::vector<Round>& of_kind = rounds.emplace_back();
      for (const int section : sections) AddRounds(program_.segments[of.kind][section], &of_kind);
    }
    for (size_t round = 0;; ++round) {
      // Products first: their processors are given. The rest goes to those that have less to do.
      for (size_t i = 0; i < rows.size(); ++i) {
        if (round >= rounds[i].size()) continue;
        for (const GpuSegment* segment : rounds[i][round].products) Product(*segment, rows[i]);
      }
      for (size_t i = 0; i < rows.size(); ++i) {
        if (round < rounds[i].size()) Blocks(rounds[i][round].blocks, rows[i]);
      }
      if (tasks_.empty() && for_all_.empty()) break;
      EndPhase();
    }
  }

  static void AddRounds(const std::vector<GpuSegment>& segments, std::vector<Round>* rounds) {
    for (size_t begin = 0, end = 0; begin < segments.size(); begin = end) {
      Round next;
      for (; end < segments.size() && segments[end].round == segments[begin].round; ++end) {
        (segments[end].count > 0 ? next.products : next.blocks).push_back(&segments[end]);
      }
      if (next.products.empty() && !rounds->empty() && rounds->back().products.empty()) {
        std::vector<const GpuSegment*>& blocks = rounds->back().blocks;
        blocks.insert(blocks.end(), next.blocks.begin(), next.blocks.end());
      } else {
        rounds->push_back(std::move(next));
      }
    }
  }

  // The weights that lie on chip meet all vectors, which each processor reads; or processors have
  // tiles of nodes by outputs, for which tensor cores multiply and weights come from L2.
  void Product(const GpuSegment& segment, const Rows& rows) {
    if (segment.outputs > 0) {
      const int64_t whole = TilesCycles(segment, rows.count, kTile);
      const int64_t half = TilesCycles(segment, rows.count, kTile / 2);
      if (std::min(whole, half) < segment.cost * rows.count) {
        ProductTiles(segment, rows, whole <= half ? kTile : kTile / 2);
        return;
      }
    }
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

  static int64_t TileCycles(const GpuSegment& segment, int64_t rows) {
    const int64_t steps = (segment.depth + kTileDepth - 1) / kTileDepth;
    return kCyclesOfTile + steps * (rows > kTile / 2 ? kCyclesOfStep : kCyclesOfHalfStep);
  }

  // Cycles of all tiles of so many rows each.
  int64_t TilesCycles(const GpuSegment& segment, int64_t count, int64_t rows) const {
    const int64_t tiles = ((count + rows - 1) / rows) * Tiles(segment.outputs);
    return (tiles + program_.processors - 1) / program_.processors * TileCycles(segment, rows);
  }

  void ProductTiles(const GpuSegment& segment, const Rows& rows, int64_t height) {
    for (int64_t row = 0; row < rows.count; row += height) {
      const int64_t count = std::min(height, rows.count - row);
      for (int64_t output = 0; output < segment.outputs; output += kTile) {
        Add(loads_.Least(), TileCycles(segment, count),
            {First(GpuOp::kMultiply, 5), static_cast<uint32_t>(segment.number),
             static_cast<uint32_t>(rows.first + row), static_cast<uint32_t>(count),
             static_cast<uint32_t>(output)});
      }
    }
  }

  void Blocks(const std::vector<const GpuSegment*>& segments, const Rows& rows) {
    if (segments.empty()) return;
    const int64_t block = (rows.count + program_.processors - 1) / program_.processors;
    for (int64_t row = 0; row < rows.count; row += block) {
      const int64_t count = std::min(block, rows.count - row), processor = loads_.Least();
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
      if (call_.update && !parameter.trained) continue;
      const uint32_t number = i;
      if (parameter.sparse) {
        // A processor has so many rows that few are summed: one that all nodes look up is its own.
        const std::vector<int64_t>& first = looked_up[i].first;
        for (int64_t row = 0, end = 0; row < looked_up[i].rows(); row = end) {
          for (end = row + 1; end < looked_up[i].rows() && end - row < kTableRows; ++end) {
            if (first[end + 1] - first[row] > kTableEntries) break;
          }
          Add(loads_.Least(), 500 + 200 * (first[end] - first[row]),
              {First(GpuOp::kSumRows, 4), number, static_cast<uint32_t>(row),
               static_cast<uint32_t>(end - row)});
        }
        continue;
      }
      for (int64_t row = 0; row < Tiles(parameter.rows); ++row) {
        for (int64_t column = 0; column < Tiles(parameter.columns); ++column) {
          Add(loads_.Least(), 20 * batch_.nodes + 3000,
              {First(GpuOp::kGradient, 4), number, static_cast<uint32_t>(row),
               static_cast<uint32_t>(column)});
        }
      }
    }
  }

  static int64_t Tiles(int64_t count) { return (count + kTile - 1) / kTile; }

  // Losses, outputs and states.
  void Results(GpuSent* sent) {
    for (int64_t first = 0; first < batch_.examples; first += kSummedLosses) {
      const int64_t count = std::min(kSummedLosses, batch_.examples - first);
      Add(loads_.Least(), 100,
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
      Add(loads_.Least(), count * width / 64,
          {First(GpuOp::kGather, 6), static_cast<uint32_t>(pointer), static_cast<uint32_t>(width),
           list, static_cast<uint32_t>(first), static_cast<uint32_t>(count)});
    }
  }

  void Add(int64_t processor, int64_t cost, std::initializer_list<uint32_t> words) {
    Task& task = tasks_.emplace_back();
    task.processor = processor;
    task.count = words.size();
    std::copy(words.begin(), words.end(), task.words);
    loads_.Add(processor, cost);
  }

  // A processor that takes part in a phase waits for all that took part in the one before.
  void EndPhase() {
    if (tasks_.empty() && for_all_.empty()) return;
    const uint32_t phase = phase_;
    const uint32_t wait[] = {First(GpuOp::kWait, 3), phase - 1, static_cast<uint32_t>(took_part_)};
    const uint32_t signal[] = {First(GpuOp::kSignal, 2), phase};
    const int waits = phase == 0 ? 0 : std::size(wait);
    std::vector<uint32_t> words(wait, wait + waits);
    words.insert(words.end(), for_all_.begin(), for_all_.end());
    const size_t before = common_.size();
    took_part_ = 0;
    if (!for_all_.empty()) {
      common_.insert(common_.end(), words.begin(), words.end());
      common_.insert(common_.end(), std::begin(signal), std::end(signal));
      took_part_ = scripts_.size();
    }
    std::vector<int64_t> own;
    for (const Task& task : tasks_) {
      std::vector<uint32_t>& script = scripts_[task.processor];
      if (phase_of_[task.processor] != phase_) {
        phase_of_[task.processor] = phase_;
        own.push_back(task.processor);
        Call(task.processor, before);
        called_[task.processor] = common_.size();
        script.insert(script.end(), words.begin(), words.end());
      }
      script.insert(script.end(), task.words, task.words + task.count);
    }
    for (const int64_t processor : own) {
      scripts_[processor].insert(scripts_[processor].end(), std::begin(signal), std::end(signal));
    }
    if (for_all_.empty()) took_part_ = own.size();
    ++phase_;
    tasks_.clear();
    for_all_.clear();
    loads_.Clear();
  }

  // What the processor has not yet done of what is common, up to `end`.
  void Call(int64_t processor, size_t end) {
    size_t& begin = called_[processor];
    if (begin < end) {
      scripts_[processor].insert(scripts_[processor].end(),
                                 {First(GpuOp::kCall, kCallWords), static_cast<uint32_t>(begin),
                                  static_cast<uint32_t>(end)});
    }
    begin = end;
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
  Loads loads_;
  std::vector<Task> tasks_;        // of this phase
  std::vector<uint32_t> common_;   // whole phases of those that have nothing else to do in them
  std::vector<size_t> called_;     // how much of that each processor has done
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
  if (sent.floats < 0 || sent.floats > kLargestPlace ||
      sent.words.size() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", batch.nodes, " nodes needs ",
                                                   sent.floats, " numbers; a script addresses ",
                                                   kLargestPlace, ": give smaller batches"));
  }
  Builder(spec, program, batch, layout, call).Build(looked_up, &sent);
  return sent;
}

}  // namespace tfmem
