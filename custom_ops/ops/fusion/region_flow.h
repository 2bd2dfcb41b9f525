// What can be said about a region before its shapes are known: whose memory each value is, and how
// long it lives. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <vector>

#include "custom_ops/ops/fusion/region.h"

namespace tfmem {

// The memory of a value, and of all that are views of it.
struct ValueHome {
  enum class Kind {
    kInput,     // the op's
    kVariable,  // what a variable had when it was read
    kArena,     // the run's
    kOutput,    // the op's: allocated when the value is computed
    kAssigned,  // a variable's next
    kHeld,      // its own: a call's kernel may keep it
  };

  Kind kind = Kind::kArena;
  int number = 0;       // of the input, the output or the variable
  int born = -1;        // the step that gives it; -1: none
  int last_use = 0;     // the step; the number of steps: it outlives the run
  bool shared = false;  // beyond kernels: it is an output, is assigned, or is a call's
};

struct RegionFlow {
  std::vector<int> root;                // for each value the one whose memory it is
  std::vector<ValueHome> homes;         // of roots
  std::vector<std::vector<int>> dying;  // for each step the values whose memory nothing needs after
  bool calls_variables = false;         // some call takes variables
};

// `keeps` says of each step whether it is a call whose kernel may keep what it reads and gives: an
// assignment, or another that has a state.
RegionFlow FlowOf(const Region& region, const std::vector<bool>& keeps);

// Memory of values that live from one step to another.
struct Interval {
  int64_t bytes = 0;
  int first = 0;
  int last = 0;        // inclusive
  int64_t offset = 0;  // found
};

// Gives each a place, none where another lies that lives at the same time; returns how many bytes
// there are.
int64_t PlaceInArena(std::vector<Interval>* intervals);

}  // namespace tfmem
