// What memory the steps of a region use on a device that runs them side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "custom_ops/ops/fusion/region_shapes.h"
#include "custom_ops/ops/fusion/step_schedule.h"

namespace tfmem {

// Memories are numbered: first the values, of which those count that alias no other value, then
// the variables, then what is added. Values that may turn out to be one memory are one: an output
// that an input is forwarded to, what is read of a variable, and its next value where that may be
// written in place. Inputs, and variables, are each their own though some may be the same: then
// others hold that memory, too, and nothing is written there.
class RegionMemory {
 public:
  RegionMemory(const CompiledRegion& compiled, const RegionShapes& shapes);

  // So many bytes of the arena; the memory's number.
  int Add(int64_t bytes);

  // The values that a kernel or a call uses.
  std::vector<MemoryUse> UsesOf(int step) const;

  const std::vector<StepMemory>& memories() const { return memories_; }

 private:
  int Find(int memory) const;
  void Unite(int memory, int with) { same_[Find(memory)] = Find(with); }

  const CompiledRegion& compiled_;
  std::vector<int> same_;  // another memory that each is, or itself
  std::vector<StepMemory> memories_;
};

}  // namespace tfmem
