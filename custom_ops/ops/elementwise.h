// The elementwise ops of cells and of programs over tensors: the table that custom_ops/expr/
// writes.
#pragma once

#include <optional>

#include "absl/strings/string_view.h"
#include "custom_ops/generated/elementwise_ops.h"

namespace tfmem {

// Kinds of dtypes that an op is for.
enum ElementwiseKinds { kFloats = 1, kIntegers = 2, kBools = 4 };

// In the table's order.
enum class Elementwise {
#define TFMEM_ENUMERATE(op, name, arguments, kinds, comparison, work) op,
  TFMEM_ELEMENTWISE_OPS(TFMEM_ENUMERATE)
#undef TFMEM_ENUMERATE
};

struct ElementwiseInfo {
  absl::string_view name;
  int arguments = 0;
  int kinds = 0;            // of dtypes, ElementwiseKinds
  bool comparison = false;  // gives booleans
  int work = 1;             // about so many instructions for a vector
};

inline constexpr ElementwiseInfo kElementwiseOps[] = {
#define TFMEM_INFO(op, name, arguments, kinds, comparison, work) \
  {name, arguments, kinds, comparison, work},
    TFMEM_ELEMENTWISE_OPS(TFMEM_INFO)
#undef TFMEM_INFO
};

inline const ElementwiseInfo& InfoOf(Elementwise op) {
  return kElementwiseOps[static_cast<int>(op)];
}

// Nothing if there is no op of that name.
inline std::optional<Elementwise> ElementwiseNamed(absl::string_view name) {
  for (const ElementwiseInfo& info : kElementwiseOps) {
    if (info.name == name) return static_cast<Elementwise>(&info - kElementwiseOps);
  }
  return std::nullopt;
}

}  // namespace tfmem
