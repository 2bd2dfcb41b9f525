// The kinds of nodes of a dynamic net, as custom_ops/dynamic/spec.py writes them. Knows no batch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/elementwise.h"

namespace tfmem {

inline constexpr int64_t kMostWidth = 1 << 20;  // numbers of a value, and of what a kind keeps

// X(enumerator, name, has a target, values (-1: one or more), numbers)
#define TFMEM_DYNAMIC_STEPS(X)                \
  X(kChild, "child", true, 0, 2)              \
  X(kLookup, "lookup", true, 0, 3)            \
  X(kRow, "row", true, 0, 2)                  \
  X(kOneHot, "one_hot", true, 0, 1)           \
  X(kRandom, "random", true, 0, 1)            \
  X(kProduct, "product", true, -1, 4)         \
  X(kBroadcast, "broadcast", true, 1, 0)      \
  X(kConcat, "concat", true, -1, 0)           \
  X(kSlice, "slice", true, 1, 1)              \
  X(kReduceSum, "reduce_sum", true, 1, 0)     \
  X(kReduceMax, "reduce_max", true, 1, 1)     \
  X(kAdjoint, "adjoint", true, 0, 1)          \
  X(kLossAdjoint, "loss_adjoint", true, 0, 0) \
  X(kPutState, "put_state", false, 1, 1)      \
  X(kPutLoss, "put_loss", false, 1, 0)        \
  X(kPutOutput, "put_output", false, 1, 1)    \
  X(kPutChild, "put_child", false, 1, 2)      \
  X(kOuter, "outer", false, 2, 3)             \
  X(kColumnSum, "column_sum", false, 1, 2)    \
  X(kPutLookup, "put_lookup", false, 1, 3)

enum class StepOp {
#define TFMEM_ENUMERATE(op, name, target, values, numbers) op,
  TFMEM_DYNAMIC_STEPS(TFMEM_ENUMERATE)
#undef TFMEM_ENUMERATE
      kElementwise
};

// Where a value lies: for all nodes of the kind, for a block of them, or the same for all.
struct StepPlace {
  enum class Where : char { kNone = '-', kKept = 'k', kScratch = 's', kConstant = 'c' };

  Where where = Where::kNone;
  int number = 0;

  bool operator==(const StepPlace& other) const {
    return where == other.where && number == other.number;
  }
};

struct DynamicStep {
  StepOp op = StepOp::kElementwise;
  Elementwise elementwise = Elementwise::kAdd;
  StepPlace target;
  int64_t width = 0;  // of the target; of the first value where there is none
  std::vector<StepPlace> values;
  std::vector<int64_t> widths;  // of the values; 0: a constant, of any
  std::vector<int64_t> numbers;
  double work = 0;  // about nanoseconds for a node
};

enum DynamicSection {
  kBefore,
  kLevel,
  kAfter,
  kBackBefore,
  kBackLevel,
  kBackAfter,
  kGradients,
  kSections
};

struct DynamicKind {
  int type = 0;
  std::vector<int> children;  // their types
  std::vector<int64_t> arguments;
  std::vector<int64_t> outputs;
  std::vector<int64_t> kept;
  std::vector<int64_t> scratch;
  std::vector<double> constants;
  std::vector<DynamicStep> sections[kSections];
  bool has_loss = false;
  std::vector<std::vector<bool>> puts;  // of each child, whether each part of its adjoint is put
  double work[kSections] = {};          // about nanoseconds for a node
};

struct DynamicParameter {
  bool sparse = false;
  int64_t rows = 1;
  int64_t columns = 0;
  bool matrix = false;
  bool trained = false;  // a kind has a gradient of it

  int64_t elements() const { return rows * columns; }
};

struct DynamicSpec {
  std::vector<DynamicParameter> parameters;
  std::vector<std::vector<int64_t>> types;
  std::vector<DynamicKind> kinds;
};

// InvalidArgument names the line that is none of a spec, or whose widths, places or numbers do not
// fit; nothing is read before it is written.
absl::StatusOr<DynamicSpec> ParseDynamicSpec(absl::string_view text);

// Rows of values lie so far apart: vectors of kernels reach to a multiple of 16.
inline int64_t StrideOf(int64_t width) { return width == 1 ? 1 : (width + 15) / 16 * 16; }

}  // namespace tfmem
