#include "custom_ops/ops/fusion/region_memory.h"

#include <numeric>

namespace tfmem {

using Kind = RegionStep::Kind;
using HomeKind = ValueHome::Kind;

RegionMemory::RegionMemory(const CompiledRegion& compiled, const RegionShapes& shapes)
    : compiled_(compiled) {
  const Region& region = compiled.region;
  const RegionFlow& flow = compiled.flow;
  const int values = region.values.size();
  same_.resize(values + region.variables.size());
  std::iota(same_.begin(), same_.end(), 0);
  memories_.resize(same_.size());
  std::vector<int> current(region.variables.size());  // the memory that each variable's value has
  std::iota(current.begin(), current.end(), values);
  for (size_t at = 0; at < region.steps.size(); ++at) {
    const RegionStep& step = region.steps[at];
    if (step.kind == Kind::kRead) Unite(step.first_output, current[step.variables[0]]);
    if (step.kind == Kind::kAssign) current[step.variables[0]] = flow.root[step.inputs[0]];
    for (int i = 0; i < step.outputs; ++i) {
      const int value = step.first_output + i;
      if (flow.root[value] != value) continue;
      const int reused = shapes.reused[at][i];
      const int taken = reused < 0 ? -1 : flow.root[step.inputs[reused]];
      if (flow.homes[value].kind == HomeKind::kArena) {
        memories_[value] = {
            shapes.values[value].num_elements() * BytesOf(region.values[value].dtype), taken};
      } else if (taken >= 0) {
        Unite(value, taken);
      }
    }
  }
}

int RegionMemory::Add(int64_t bytes) {
  const int memory = memories_.size();
  memories_.push_back({bytes});
  same_.push_back(memory);
  return memory;
}

std::vector<MemoryUse> RegionMemory::UsesOf(int number) const {
  const RegionStep& step = compiled_.region.steps[number];
  std::vector<MemoryUse> uses;
  for (int input : step.inputs) uses.push_back({Find(compiled_.flow.root[input]), false});
  for (int i = 0; i < step.outputs; ++i) {
    uses.push_back({Find(compiled_.flow.root[step.first_output + i]), true});
  }
  return uses;
}

int RegionMemory::Find(int memory) const {
  while (same_[memory] != memory) memory = same_[memory];
  return memory;
}

}  // namespace tfmem
