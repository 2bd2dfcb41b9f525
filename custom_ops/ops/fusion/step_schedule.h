// What steps on a device wait for, and where their memory lies, so that steps that have nothing to
// do with each other may run side by side. Knows no TensorFlow and no devices.
#pragma once

#include <cstdint>
#include <vector>

namespace tfmem {

struct MemoryUse {
  int memory = 0;
  bool writes = false;  // it may read, too
};

struct StepMemory {
  int64_t bytes = -1;  // that it takes in the arena; -1: it lies elsewhere
  // What it may be written over, by the step that first uses it and reads that; -1: nothing.
  int takes = -1;
};

struct StepSchedule {
  std::vector<std::vector<int>> after;  // for each step the earlier ones that have to end before
  std::vector<int64_t> offsets;         // of each memory in the arena; 0 where it lies elsewhere
  int64_t bytes = 0;                    // of the arena
};

// How far memory may grow beyond what steps one after the other need, so that more of them run side
// by side: by so many bytes, or by this part of it, whichever is more.
inline constexpr int64_t kArenaGrowth = int64_t{64} << 20;
inline constexpr int64_t kArenaGrowthPart = 4;

// `steps` are in an order in which they may run one after the other. Any two of which one writes
// what the other uses keep that order; `after` says no more than it has to (it is its own
// transitive reduction). Memory that begins with a step that writes it may lie where other memory
// lies that is no longer used; as this may make steps wait that need not, it is done only among
// steps that are ordered anyway, or, where that takes too much memory, that are far apart.
StepSchedule ScheduleSteps(const std::vector<std::vector<MemoryUse>>& steps,
                           const std::vector<StepMemory>& memories);

}  // namespace tfmem
