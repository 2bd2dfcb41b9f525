#include "custom_ops/ops/fusion/step_schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace tfmem {
namespace {

constexpr int64_t kAlignment = 64;

using Steps = std::vector<std::vector<MemoryUse>>;

// For each step all that come before it, as bits.
class Ancestors {
 public:
  explicit Ancestors(int steps) : words_((steps + 63) / 64), bits_(words_ * steps) {}

  bool Has(int step, int before) const {
    return bits_[step * words_ + before / 64] >> (before % 64) & 1;
  }

  // Adds a step and all that come before it.
  void Add(int step, int before) {
    for (size_t i = 0; i < words_; ++i) bits_[step * words_ + i] |= bits_[before * words_ + i];
    bits_[step * words_ + before / 64] |= uint64_t{1} << (before % 64);
  }

 private:
  const size_t words_;
  std::vector<uint64_t> bits_;
};

// Leaves of each step's predecessors, all of which are earlier ones, those that come before no
// other of them.
Ancestors Reduce(std::vector<std::vector<int>>* after) {
  Ancestors ancestors(after->size());
  for (size_t step = 0; step < after->size(); ++step) {
    std::vector<int>& before = (*after)[step];
    std::sort(before.begin(), before.end(), std::greater<int>());
    size_t kept = 0;
    for (int each : before) {
      if (ancestors.Has(step, each)) continue;
      ancestors.Add(step, each);
      before[kept++] = each;
    }
    before.resize(kept);
    std::reverse(before.begin(), before.end());
  }
  return ancestors;
}

// A reader waits for the last writer. A writer waits for the last one and for all readers since.
std::vector<std::vector<int>> Conflicts(const Steps& steps, int memories,
                                        const std::function<int(int)>& place) {
  struct Last {
    int writer = -1;
    std::vector<int> readers;
  };
  std::vector<Last> last(memories);
  std::vector<std::vector<int>> after(steps.size());
  for (int step = 0; step < static_cast<int>(steps.size()); ++step) {
    for (const MemoryUse& use : steps[step]) {
      const Last& known = last[place(use.memory)];
      if (known.writer >= 0) after[step].push_back(known.writer);
      if (use.writes) {
        after[step].insert(after[step].end(), known.readers.begin(), known.readers.end());
      }
    }
    for (const MemoryUse& use : steps[step]) {
      if (!use.writes) last[place(use.memory)].readers.push_back(step);
    }
    for (const MemoryUse& use : steps[step]) {
      if (use.writes) last[place(use.memory)] = {step, {}};
    }
  }
  return after;
}

// Memories of the arena that are one, each written over the one before.
struct Block {
  int64_t bytes = 0;
  std::vector<int> users;  // steps, in order
  int64_t offset = 0;

  int first() const { return users.front(); }
  int last() const { return users.back(); }
};

class Scheduling {
 public:
  Scheduling(const Steps& steps, const std::vector<StepMemory>& memories)
      : steps_(steps),
        memories_(memories),
        after_(Conflicts(steps, memories.size(), [](int memory) { return memory; })),
        ancestors_(Reduce(&after_)) {}

  StepSchedule Run() {
    MakeBlocks();
    const int steps = steps_.size();
    const int64_t least = Place(0);
    const int64_t most = least + std::max(kArenaGrowth, least / kArenaGrowthPart);
    int distance = steps;
    int64_t bytes = Place(distance);
    while (bytes > most && distance > 0) bytes = Place(distance /= 4);
    return {Order(), Offsets(), bytes};
  }

 private:
  // What may be written over what it reads is, if all that use that come before anyway.
  void MakeBlocks() {
    std::vector<std::vector<int>> users(memories_.size());
    for (size_t step = 0; step < steps_.size(); ++step) {
      for (const MemoryUse& use : steps_[step]) {
        std::vector<int>& known = users[use.memory];
        if (known.empty() || known.back() != static_cast<int>(step)) known.push_back(step);
      }
    }
    block_of_.assign(memories_.size(), -1);
    for (int memory : ByFirstUse(users)) {
      const StepMemory& known = memories_[memory];
      if (known.bytes <= 0 || users[memory].empty()) continue;
      const int step = users[memory].front();
      const int taken = known.takes < 0 ? -1 : block_of_[known.takes];
      if (taken >= 0 && blocks_[taken].bytes >= known.bytes && blocks_[taken].last() == step &&
          AllBefore(blocks_[taken], step)) {
        block_of_[memory] = taken;
        std::vector<int>& joined = blocks_[taken].users;
        joined.insert(joined.end(), users[memory].begin() + 1, users[memory].end());
        continue;
      }
      block_of_[memory] = blocks_.size();
      const int64_t bytes = (known.bytes + kAlignment - 1) / kAlignment * kAlignment;
      blocks_.push_back({bytes, std::move(users[memory])});
    }
  }

  std::vector<int> ByFirstUse(const std::vector<std::vector<int>>& users) const {
    std::vector<int> order(memories_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto first = [&](int memory) {
      return users[memory].empty() ? -1 : users[memory].front();
    };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first(a) < first(b); });
    return order;
  }

  // Whether all other users of a block have ended when a step begins.
  bool AllBefore(const Block& block, int step) const {
    return std::all_of(block.users.begin(), block.users.end(),
                       [&](int user) { return user == step || ancestors_.Has(step, user); });
  }

  // Whether `next` may lie where `block` lies: the steps of one are `distance` before the other's,
  // or have ended when these begin.
  bool MayFollow(const Block& block, const Block& next, int distance) const {
    if (block.last() >= next.first()) return false;
    return next.first() - block.last() > distance || AllBefore(block, next.first());
  }

  // Gives each block the lowest place that it may have, the largest first; how many bytes there
  // are.
  int64_t Place(int distance) {
    std::vector<int> order(blocks_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return blocks_[a].bytes > blocks_[b].bytes; });
    std::vector<const Block*> placed;  // by offset
    int64_t end = 0;
    for (int number : order) {
      Block& block = blocks_[number];
      block.offset = 0;
      for (const Block* other : placed) {
        if (MayFollow(*other, block, distance) || MayFollow(block, *other, distance)) continue;
        if (block.offset + block.bytes <= other->offset) break;
        block.offset = std::max(block.offset, other->offset + other->bytes);
      }
      end = std::max(end, block.offset + block.bytes);
      const auto by_offset = [](const Block* a, const Block* b) { return a->offset < b->offset; };
      placed.insert(std::upper_bound(placed.begin(), placed.end(), &block, by_offset), &block);
    }
    return end;
  }

  // Where blocks overlap, the first step of the later one waits for all of the other; the rest of
  // it comes after its first.
  std::vector<std::vector<int>> Order() const {
    const int others = blocks_.size();
    std::vector<std::vector<int>> after = Conflicts(
        steps_, others + memories_.size(),
        [&](int memory) { return block_of_[memory] >= 0 ? block_of_[memory] : others + memory; });
    std::vector<const Block*> order;  // by offset
    for (const Block& block : blocks_) order.push_back(&block);
    std::stable_sort(order.begin(), order.end(),
                     [](const Block* a, const Block* b) { return a->offset < b->offset; });
    for (size_t i = 0; i < order.size(); ++i) {
      const int64_t end = order[i]->offset + order[i]->bytes;
      for (size_t j = i + 1; j < order.size() && order[j]->offset < end; ++j) {
        const bool swapped = order[j]->last() < order[i]->first();
        const Block& block = swapped ? *order[j] : *order[i];
        std::vector<int>& before = after[(swapped ? *order[i] : *order[j]).first()];
        before.insert(before.end(), block.users.begin(), block.users.end());
      }
    }
    Reduce(&after);
    return after;
  }

  std::vector<int64_t> Offsets() const {
    std::vector<int64_t> offsets;
    for (int block : block_of_) offsets.push_back(block < 0 ? 0 : blocks_[block].offset);
    return offsets;
  }

  const Steps& steps_;
  const std::vector<StepMemory>& memories_;
  std::vector<std::vector<int>> after_;  // as if all memory were apart
  const Ancestors ancestors_;
  std::vector<Block> blocks_;
  std::vector<int> block_of_;  // each memory; -1: none
};

}  // namespace

StepSchedule ScheduleSteps(const std::vector<std::vector<MemoryUse>>& steps,
                           const std::vector<StepMemory>& memories) {
  return Scheduling(steps, memories).Run();
}

}  // namespace tfmem
