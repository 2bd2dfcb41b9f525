#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tfmem {

// The load of each processor in a phase, and the first processor with the least load. It is a tree
// of pairs, each of which names the one of its two that has less. So neither an addition to a load
// nor the search for the least looks at all processors.
class Loads {
 public:
  explicit Loads(int64_t processors) : loads_(processors) {
    while (leaves_ < processors) leaves_ *= 2;
    least_.resize(2 * leaves_);
    for (int64_t i = 0; i < leaves_; ++i) {
      least_[leaves_ + i] = std::min<int64_t>(i, processors - 1);
    }
    for (int64_t at = leaves_ - 1; at > 0; --at) least_[at] = LessOf(at);
    cleared_ = least_;
  }

  int64_t Least() const { return least_[1]; }

  void Add(int64_t processor, int64_t cost) {
    loads_[processor] += cost;
    for (int64_t at = (leaves_ + processor) / 2; at > 0; at /= 2) least_[at] = LessOf(at);
  }

  void Clear() {
    std::fill(loads_.begin(), loads_.end(), 0);
    least_ = cleared_;
  }

 private:
  int LessOf(int64_t at) const {
    const int first = least_[2 * at], second = least_[2 * at + 1];
    return loads_[second] < loads_[first] ? second : first;
  }

  std::vector<int64_t> loads_;
  int64_t leaves_ = 1;
  // The tree: [1] is its root, and pair `at` is of [2 at] and [2 at + 1].
  std::vector<int> least_;
  std::vector<int> cleared_;  // the tree when no processor has anything to do
};

}  // namespace tfmem
