// One batch: where its values lie, and what a virtual processor's instructions do with them.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/dynamic/batch.h"
#include "custom_ops/ops/dynamic/script.h"
#include "custom_ops/ops/dynamic/spec.h"
#include "custom_ops/ops/sizes.h"

namespace tfmem {

inline constexpr int64_t kSlack = 256;  // floats that a panel may reach behind the last row

// Where everything lies that is one number or more for each node, in floats from the beginning of
// the memory of a batch.
struct DynamicLayout {
  // InvalidArgument if 64 bits do not count that many floats.
  static absl::StatusOr<DynamicLayout> Of(const DynamicSpec& spec, const DynamicBatch& batch);

  std::vector<std::vector<int64_t>> states;                 // of each type
  std::vector<std::vector<int64_t>> kept;                   // of each kind
  std::vector<std::vector<int64_t>> outputs;                // of each kind
  std::vector<std::vector<std::vector<int64_t>>> children;  // of each kind and slot: what is put
  std::vector<int64_t> losses;                              // of each kind
  int64_t floats = 0;
};

// Floats of `rows` rows of a value, up to where the next value may begin.
inline Size AlignedFloats(int64_t rows, int64_t width) {
  const Size floats = Size(rows) * StrideOf(width) + 15;
  return floats.ok() ? floats.value() / 16 * 16 : floats;
}

// Rows of a table that a batch looks up, each once, in increasing order.
struct LookedUp {
  struct Entry {
    int32_t row = 0;  // of the table
    int32_t kind = 0;
    int32_t step = 0;  // of the kind's last section
    int32_t node = 0;  // row of the kind
  };

  std::vector<Entry> entries;  // by row, then in the order of the batch
  std::vector<int64_t> first;  // entry of each row that is looked up, and behind the last
  int64_t rows() const { return static_cast<int64_t>(first.size()) - 1; }
};

std::vector<LookedUp> FindLookedUp(const DynamicSpec& spec, const DynamicBatch& batch);

// Takes a block of a parameter's gradient: rows of it, `stride` apart, from `row` and `column` on.
// Rows of a sparse parameter come one by one, as the `index`th that was looked up.
template <typename Real>
using TakeGradient =
    std::function<void(int parameter, int64_t index, int64_t row, int64_t column, int64_t rows,
                       int64_t columns, const Real* gradient, int64_t stride, Real* scratch)>;

// A batch whose numbers have type Real: float or double.
template <typename Real>
struct DynamicCall {
  const DynamicSpec& spec;
  const DynamicBatch& batch;
  const DynamicLayout& layout;
  const std::vector<LookedUp>& looked_up;
  std::vector<const Real*> parameters = {};
  Real* memory = nullptr;
  uint64_t seed = 0;
  const Real* loss_gradients = nullptr;           // of each example; null: 1
  int gradient_type = -1;                         // of the states whose gradients are given
  std::vector<const Real*> state_gradients = {};  // of each node
  TakeGradient<Real> take = nullptr;
};

// Numbers of a thread's own memory.
template <typename Real>
int64_t ThreadFloats(const DynamicSpec& spec, const InstructionSet& kernels);

// Numbers in which processors find what others computed of rows whose products are dealt to all.
int64_t SharedFloats(const DynamicSpec& spec);

template <typename Real>
class DynamicWorker {
 public:
  // `own`: ThreadFloats(); `shared`: SharedFloats(), the same for all workers.
  DynamicWorker(const DynamicCall<Real>& call, const InstructionSet& kernels, Real* own,
                Real* shared);

  // One instruction that is no signal and no wait.
  void Do(const uint32_t* words);

 private:
  struct Block {
    int kind = 0;
    int64_t first = 0;
    int64_t rows = 0;
    Real* scratch = nullptr;  // of the block's kind
  };

  void Run(const Block& block, const DynamicKind& kind, const DynamicStep& step);
  Real* At(const Block& block, const StepPlace& place) const;
  void Elementwise(const Block& block, const DynamicStep& step);
  // Columns [first, first + width).
  void Product(const Block& block, const DynamicStep& step, int64_t first, int64_t width);
  // The share `part` of `parts`.
  void Columns(const Block& block, const DynamicStep& step, int64_t part, int64_t parts);
  void MultiplyPlain(const Real* operand, int64_t operand_stride, int64_t rows, const Real* weights,
                     int64_t weights_stride, int64_t depth, int64_t width, Real* target,
                     int64_t target_stride, bool accumulate);
  void MultiplyPacked(const Real* operand, int64_t operand_stride, int64_t rows,
                      const Real* weights, int64_t weights_stride, int64_t depth, int64_t width,
                      bool transposed, Real* target, int64_t target_stride, bool accumulate);
  void Adjoint(const Block& block, int type, const DynamicStep& step);
  void Random(const Block& block, const DynamicStep& step);
  void Gradient(int parameter, int64_t row, int64_t column);
  void AddOuter(int kind, const DynamicStep& step, int64_t row, int64_t rows, int64_t column,
                int64_t columns, Real* tile);
  void AddRows(int kind, const DynamicStep& step, int64_t row, int64_t rows, int64_t column,
               int64_t columns, Real* tile);
  void SumRows(int parameter, int64_t first, int64_t count);

  const DynamicCall<Real>& call_;
  const InstructionSet& set_;
  const CpuKernels<Real>& kernels_;
  const int64_t panel_;
  std::vector<std::vector<int64_t>> scratch_;  // of each kind: where its places lie
  Real* const own_;
  Real* splats_;   // 64 numbers of three constants
  Real* packed_;   // [depth, panel] weights, or [kGradientRows, 256] of an operand
  Real* partial_;  // [kBlockRows, panel]
  Real* tile_;     // [kGradientRows, kGradientColumns], and scratch for an update
  Real* values_;
  Real* const shared_;
  std::vector<int64_t> shared_first_;  // of each kind: where its places begin in `shared_`
};

// Runs a script on up to `threads` threads; `own` is their memory, ThreadFloats() each, and behind
// them SharedFloats(), if the script deals products.
template <typename Real>
void RunScript(const Script& script, const DynamicCall<Real>& call, const InstructionSet& kernels,
               int threads, Real* own, const std::function<void(std::function<void()>)>& schedule);

// The loops for numbers of a type.
template <typename Real>
const CpuKernels<Real>& KernelsOf(const InstructionSet& set) {
  if constexpr (std::is_same_v<Real, float>) {
    return set.single_precision;
  } else {
    return set.double_precision;
  }
}

}  // namespace tfmem
