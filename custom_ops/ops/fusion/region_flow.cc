#include "custom_ops/ops/fusion/region_flow.h"

#include <algorithm>
#include <numeric>

namespace tfmem {
namespace {

using Kind = RegionStep::Kind;
using HomeKind = ValueHome::Kind;

}  // namespace

RegionFlow FlowOf(const Region& region, const std::vector<bool>& keeps) {
  const int steps = region.steps.size();
  RegionFlow flow;
  flow.root.resize(region.values.size());
  std::iota(flow.root.begin(), flow.root.end(), 0);
  flow.homes.resize(region.values.size());
  for (int i = 0; i < region.inputs; ++i) flow.homes[i] = {HomeKind::kInput, i};
  const auto use = [&](int value, int step) -> ValueHome& {
    ValueHome& home = flow.homes[flow.root[value]];
    home.last_use = std::max(home.last_use, step);
    return home;
  };
  for (int at = 0; at < steps; ++at) {
    const RegionStep& step = region.steps[at];
    for (int input : step.inputs) {
      use(input, at).shared |= step.kind == Kind::kCall || step.kind == Kind::kAssign;
    }
    for (int i = 0; i < step.outputs; ++i) {
      ValueHome& home = flow.homes[step.first_output + i];
      home.born = home.last_use = at;
      if (step.kind == Kind::kRead) home = {HomeKind::kVariable, step.variables[0], at, at};
    }
    if (step.kind == Kind::kView) flow.root[step.first_output] = flow.root[step.inputs[0]];
    flow.calls_variables |= step.kind == Kind::kCall && !step.variables.empty();
  }
  // Where a value goes says where it is computed: an output before a variable.
  for (int at = 0; at < steps; ++at) {
    const RegionStep& step = region.steps[at];
    const auto place = [&](int value, HomeKind kind, int number) {
      ValueHome& home = flow.homes[flow.root[value]];
      if (home.kind != HomeKind::kArena && home.kind != HomeKind::kHeld) return;
      home.kind = kind;
      home.number = number;
    };
    if (step.kind == Kind::kAssign) place(step.inputs[0], HomeKind::kAssigned, step.variables[0]);
    if (!keeps[at]) continue;
    for (int input : step.inputs) place(input, HomeKind::kHeld, 0);
    for (int i = 0; i < step.outputs; ++i) place(step.first_output + i, HomeKind::kHeld, 0);
  }
  for (size_t i = 0; i < region.outputs.size(); ++i) {
    ValueHome& home = use(region.outputs[i], steps);
    home.shared = true;
    if (home.kind == HomeKind::kInput || home.kind == HomeKind::kVariable ||
        home.kind == HomeKind::kOutput) {
      continue;
    }
    home.kind = HomeKind::kOutput;
    home.number = i;
  }
  flow.dying.resize(steps);
  for (size_t value = 0; value < region.values.size(); ++value) {
    const int last_use = flow.homes[flow.root[value]].last_use;
    if (last_use < steps) flow.dying[last_use].push_back(value);
  }
  return flow;
}

int64_t PlaceInArena(std::vector<Interval>* intervals) {
  std::vector<Interval*> order;
  for (Interval& interval : *intervals) order.push_back(&interval);
  // The largest first, each into the lowest gap that holds it.
  std::stable_sort(order.begin(), order.end(),
                   [](const Interval* a, const Interval* b) { return a->bytes > b->bytes; });
  std::vector<const Interval*> placed;  // by offset
  int64_t end = 0;
  for (Interval* interval : order) {
    interval->offset = 0;
    for (const Interval* other : placed) {
      if (other->last < interval->first || interval->last < other->first) continue;
      if (interval->offset + interval->bytes <= other->offset) break;
      interval->offset = std::max(interval->offset, other->offset + other->bytes);
    }
    end = std::max(end, interval->offset + interval->bytes);
    placed.insert(std::upper_bound(
                      placed.begin(), placed.end(), interval,
                      [](const Interval* a, const Interval* b) { return a->offset < b->offset; }),
                  interval);
  }
  return end;
}

}  // namespace tfmem
