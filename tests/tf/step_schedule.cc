// ScheduleSteps on random steps: all that must be ordered is, no edge is there twice over, memory
// grows no further than it may, and any order that is allowed computes the same.
// Prints what went wrong; exit status 0 if nothing.
#include "custom_ops/ops/fusion/step_schedule.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

using tfmem::MemoryUse;
using tfmem::StepMemory;
using tfmem::StepSchedule;

int failures = 0;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
}

struct Case {
  std::vector<std::vector<MemoryUse>> steps;
  std::vector<StepMemory> memories;
};

// Steps that read what was made before, or lies elsewhere, and make something new; some write over
// what they read, or over what lies elsewhere, as updates do. `scale`: of sizes.
Case Random(std::mt19937* random, int64_t scale) {
  const auto below = [&](int end) {
    return std::uniform_int_distribution<int>(0, end - 1)(*random);
  };
  Case made;
  const int elsewhere = 1 + below(4), steps = 1 + below(40);
  for (int i = 0; i < elsewhere; ++i) made.memories.emplace_back();
  std::vector<int> readable(elsewhere);
  for (int i = 0; i < elsewhere; ++i) readable[i] = i;
  const auto add = [&](int64_t bytes, int takes) {
    made.memories.push_back({bytes, takes});
    return static_cast<int>(made.memories.size()) - 1;
  };
  for (int i = 0; i < steps; ++i) {
    std::vector<MemoryUse>& uses = made.steps.emplace_back();
    std::vector<int> read;
    for (int count = below(4); count > 0; --count) {
      // Mostly what is near, as in a chain.
      const int back = below(3) ? below(std::min<int>(4, readable.size())) : below(readable.size());
      read.push_back(readable[readable.size() - 1 - back]);
    }
    std::sort(read.begin(), read.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());
    for (int memory : read) uses.push_back({memory, false});
    if (below(6) == 0) uses.push_back({below(elsewhere), true});
    std::vector<int> taken = read;
    for (int count = below(3); count > 0; --count) {
      int takes = -1;
      // What dies here: no op reads it from now on.
      if (!taken.empty() && below(2)) {
        takes = taken.back();
        taken.pop_back();
        readable.erase(std::remove(readable.begin(), readable.end(), takes), readable.end());
        if (takes < elsewhere) readable.insert(readable.begin(), takes), takes = -1;
      }
      const int memory = add(scale * below(8), takes);
      uses.push_back({memory, true});
      readable.push_back(memory);
    }
    if (below(3) == 0) uses.push_back({add(scale * (1 + below(9)), -1), true});  // a workspace
  }
  return made;
}

// Bytes that two memories share, of those that are used.
bool Overlap(const Case& given, const StepSchedule& schedule, int a, int b) {
  if (a == b) return true;
  const int64_t x = given.memories[a].bytes, y = given.memories[b].bytes;
  if (x <= 0 || y <= 0) return false;
  return schedule.offsets[a] < schedule.offsets[b] + y &&
         schedule.offsets[b] < schedule.offsets[a] + x;
}

bool InConflict(const Case& given, const StepSchedule& schedule, int a, int b) {
  for (const MemoryUse& one : given.steps[a]) {
    for (const MemoryUse& other : given.steps[b]) {
      if ((one.writes || other.writes) && Overlap(given, schedule, one.memory, other.memory)) {
        return true;
      }
    }
  }
  return false;
}

void CheckOrder(const Case& given, const StepSchedule& schedule, const std::string& name) {
  const int steps = given.steps.size();
  std::vector<std::vector<bool>> before(steps, std::vector<bool>(steps));
  for (int step = 0; step < steps; ++step) {
    for (int earlier : schedule.after[step]) {
      Expect(earlier >= 0 && earlier < step, name + ": a step comes after earlier ones alone");
      for (int other : schedule.after[step]) {
        Expect(!before[other][earlier], name + ": an edge that others imply");
      }
    }
    for (int earlier : schedule.after[step]) {
      Expect(!before[step][earlier], name + ": an edge twice");
      for (int i = 0; i < steps; ++i) before[step][i] = before[step][i] || before[earlier][i];
      before[step][earlier] = true;
    }
    for (int earlier = 0; earlier < step; ++earlier) {
      Expect(before[step][earlier] || !InConflict(given, schedule, earlier, step),
             name + ": steps in conflict have an order");
    }
  }
}

// What each memory elsewhere has at last, and what each step has read, when steps run in an order:
// each byte, of 1/scale of them, holds the mark of who wrote it last.
std::vector<unsigned> Execute(const Case& given, const StepSchedule& schedule,
                              const std::vector<int>& order, int64_t scale) {
  std::vector<unsigned> arena(schedule.bytes / scale + 1), read(given.steps.size());
  std::map<int, unsigned> elsewhere;
  const auto cells = [&](int memory) {
    return std::pair<int64_t, int64_t>(schedule.offsets[memory] / scale,
                                       given.memories[memory].bytes / scale);
  };
  for (int step : order) {
    unsigned& mark = read[step];
    mark = step + 1;
    for (const MemoryUse& use : given.steps[step]) {
      if (use.writes) continue;
      if (given.memories[use.memory].bytes < 0) {
        mark = mark * 31 + elsewhere[use.memory];
      } else {
        const auto [first, count] = cells(use.memory);
        for (int64_t i = 0; i < count; ++i) mark = mark * 31 + arena[first + i];
      }
    }
    for (const MemoryUse& use : given.steps[step]) {
      if (!use.writes) continue;
      if (given.memories[use.memory].bytes < 0) {
        elsewhere[use.memory] = elsewhere[use.memory] * 17 + mark;
      } else {
        const auto [first, count] = cells(use.memory);
        for (int64_t i = 0; i < count; ++i) arena[first + i] = mark * 13 + use.memory;
      }
    }
  }
  for (const auto& [memory, mark] : elsewhere) read.push_back(mark);
  return read;
}

std::vector<int> SomeOrder(const StepSchedule& schedule, std::mt19937* random) {
  std::vector<int> order, waiting(schedule.after.size());
  std::vector<bool> ended(schedule.after.size());
  for (size_t i = 0; i < waiting.size(); ++i) waiting[i] = i;
  while (!waiting.empty()) {
    std::shuffle(waiting.begin(), waiting.end(), *random);
    for (int step : waiting) {
      const std::vector<int>& after = schedule.after[step];
      if (!std::all_of(after.begin(), after.end(), [&](int each) { return ended[each]; })) continue;
      order.push_back(step);
      ended[step] = true;
      waiting.erase(std::find(waiting.begin(), waiting.end(), step));
      break;
    }
  }
  return order;
}

// All apart, so that nothing but what steps mean can go wrong.
StepSchedule Apart(const Case& given) {
  StepSchedule made;
  for (const StepMemory& memory : given.memories) {
    made.offsets.push_back(made.bytes);
    made.bytes += std::max<int64_t>(memory.bytes, 0);
  }
  return made;
}

void TestRandom(int64_t scale) {
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    const Case given = Random(&random, scale);
    const StepSchedule schedule = ScheduleSteps(given.steps, given.memories);
    const std::string name = "seed " + std::to_string(seed);
    CheckOrder(given, schedule, name);
    std::vector<int> order(given.steps.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    const auto expected = Execute(given, Apart(given), order, scale);
    for (int i = 0; i < 5; ++i) {
      Expect(Execute(given, schedule, SomeOrder(schedule, &random), scale) == expected,
             name + ": another result in another order");
    }
  }
}

void TestSiblings() {
  // One reads x; three products of what it gives, each with a workspace; one joins them.
  const std::vector<std::vector<MemoryUse>> steps = {
      {{0, false}, {1, true}},
      {{1, false}, {2, true}, {5, true}},
      {{1, false}, {3, true}, {6, true}},
      {{1, false}, {4, true}, {7, true}},
      {{2, false}, {3, false}, {4, false}, {8, true}},
  };
  std::vector<StepMemory> memories(9, {256});
  memories[0] = memories[8] = {};
  const StepSchedule schedule = ScheduleSteps(steps, memories);
  Expect(schedule.after == std::vector<std::vector<int>>({{}, {0}, {0}, {0}, {1, 2, 3}}),
         "siblings run side by side");
  Expect(schedule.bytes == 7 * 256, "each has separate memory");
}

// A chain whose every step has a workspace: one place serves for all.
void TestChain() {
  std::vector<std::vector<MemoryUse>> steps;
  std::vector<StepMemory> memories = {{}};
  for (int i = 0; i < 50; ++i) {
    memories.push_back({1000});
    memories.push_back({5000});
    steps.push_back({{i ? 2 * i - 1 : 0, false}, {2 * i + 1, true}, {2 * i + 2, true}});
  }
  const StepSchedule schedule = ScheduleSteps(steps, memories);
  for (int i = 1; i < 50; ++i) Expect(schedule.after[i] == std::vector<int>{i - 1}, "a chain");
  Expect(schedule.bytes == 1024 + 1024 + 5056, "two values and a workspace");
}

// As in training: what each step of a chain gives is read by a product that nothing waits for. Side
// by side all of it would have to be kept.
void TestBound(int64_t bytes) {
  std::vector<std::vector<MemoryUse>> steps;
  std::vector<StepMemory> memories = {{}};
  const int kSteps = 64;
  for (int i = 0; i < kSteps; ++i) {
    memories.push_back({bytes});
    const int made = memories.size() - 1;
    memories.push_back({});
    steps.push_back({{i ? made - 2 : 0, false}, {made, true}});
    steps.push_back({{made, false}, {made + 1, true}});
  }
  const StepSchedule schedule = ScheduleSteps(steps, memories);
  const int64_t least = 2 * bytes;
  Expect(schedule.bytes <= least + std::max(tfmem::kArenaGrowth, least / tfmem::kArenaGrowthPart),
         "memory grows no further than it may");
  Case given{steps, memories};
  CheckOrder(given, schedule, "bound");
  const bool small = bytes * kSteps <= tfmem::kArenaGrowth;
  Expect((schedule.bytes == bytes * kSteps) == small, "all of it is kept where it is little");
  Expect(schedule.bytes > least || !small, "some of it, where there is room");
}

// Written over where no other reader has to be waited for, and else not.
void TestInPlace() {
  const std::vector<StepMemory> memories = {{}, {640}, {640, 1}, {}};
  const auto chain = ScheduleSteps({{{0, false}, {1, true}}, {{1, false}, {2, true}}}, memories);
  Expect(chain.bytes == 640 && chain.offsets[1] == chain.offsets[2], "written over");
  const auto fork = ScheduleSteps(
      {{{0, false}, {1, true}}, {{1, false}, {3, true}}, {{1, false}, {2, true}}}, memories);
  Expect(fork.after[2] == std::vector<int>{0}, "a writer waits for no sibling");
}

}  // namespace

int main() {
  TestRandom(64);                // all may be kept apart
  TestRandom(int64_t{4} << 20);  // not all
  TestSiblings();
  TestChain();
  TestBound(1 << 10);
  TestBound(1 << 20);
  TestBound(8 << 20);
  TestBound(int64_t{1} << 30);
  TestInPlace();
  return failures == 0 ? 0 : 1;
}
