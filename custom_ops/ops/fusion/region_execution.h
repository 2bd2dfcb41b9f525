// What one run of a region does on any device: it goes through the steps, and finds memory for
// their results. And the shapes that were seen last.
#pragma once

#include <algorithm>
#include <list>
#include <utility>

#include "absl/status/status.h"
#include "custom_ops/ops/fusion/region_shapes.h"
#include "custom_ops/ops/fusion/variables.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

class RegionExecution {
 public:
  virtual ~RegionExecution() = default;

 protected:
  RegionExecution(const CompiledRegion& compiled, const RegionShapes& shapes,
                  tensorflow::OpKernelContext* ctx, RegionVariables* variables)
      : compiled_(compiled),
        region_(compiled.region),
        flow_(compiled.flow),
        shapes_(shapes),
        ctx_(ctx),
        variables_(*variables) {}

  absl::Status RunSteps();
  virtual absl::Status RunKernel(int at, const RegionStep& step) = 0;
  virtual absl::Status RunCall(int at, const RegionStep& step) = 0;
  virtual absl::Status RunView(const RegionStep& step) = 0;
  virtual absl::Status RunRead(const RegionStep& step) = 0;
  virtual absl::Status RunAssign(int at, const RegionStep& step) = 0;
  // What is not needed behind a step, or of that `value` and its views, is held no longer.
  virtual void Forget(int at) = 0;
  virtual void ForgetGroup(int at, int value) = 0;
  // Where a value is computed from.
  virtual const void* DataOf(int value) const = 0;

  bool LiesInArena(int value) const { return flow_.homes[value].kind == ValueHome::Kind::kArena; }
  // Memory for an output of a step that does not lie in the arena: that of an input or a variable
  // that is not needed behind the step, if nothing else holds it, or new memory.
  absl::Status Allocate(int at, const RegionStep& step, int output, tensorflow::Tensor* memory);
  // An error unless a value that is read has the shape that the region began with.
  absl::Status CheckRead(int value, const tensorflow::Tensor& read) const;
  absl::Status ViewOf(const tensorflow::Tensor& tensor, int value, tensorflow::Tensor* view) const;

  const CompiledRegion& compiled_;
  const Region& region_;
  const RegionFlow& flow_;
  const RegionShapes& shapes_;
  tensorflow::OpKernelContext* const ctx_;
  RegionVariables& variables_;
};

// What is known of each of the shapes that were seen last. Its user locks.
template <typename Known>
class RecentShapes {
 public:
  // Null if they are new.
  Known* Find(const ShapesKey& key) {
    const auto found =
        std::find_if(all_.begin(), all_.end(), [&](const auto& each) { return each.first == key; });
    if (found == all_.end()) return nullptr;
    all_.splice(all_.begin(), all_, found);
    return &found->second;
  }
  void Add(ShapesKey key, Known known) {
    all_.emplace_front(std::move(key), std::move(known));
    if (all_.size() > kMost) all_.pop_back();
  }
  std::list<std::pair<ShapesKey, Known>>& all() { return all_; }

 private:
  static constexpr size_t kMost = 16;
  std::list<std::pair<ShapesKey, Known>> all_;  // the latest first
};

}  // namespace tfmem
