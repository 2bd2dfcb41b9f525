#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

bool Takes(const ElementwiseInfo& info, DType dtype) {
  const int kind = dtype == DType::kBool                              ? kBools
                   : dtype == DType::kInt32 || dtype == DType::kInt64 ? kIntegers
                                                                      : kFloats;
  return (info.kinds & kind) != 0;
}

bool Takes(Reduction reduction, DType dtype) {
  const bool logical = reduction == Reduction::kAny || reduction == Reduction::kAll;
  const bool integer = dtype == DType::kInt32 || dtype == DType::kInt64;
  if (reduction == Reduction::kMean && integer) return false;
  return logical == (dtype == DType::kBool);
}

const char* NameOf(DType dtype) {
  static constexpr const char* names[] = {
#define TFMEM_NAME(name, text) text,
      TFMEM_TILE_DTYPES(TFMEM_NAME)
#undef TFMEM_NAME
  };
  return names[static_cast<int>(dtype)];
}

const char* NameOf(Reduction reduction) {
  static constexpr const char* names[] = {
#define TFMEM_NAME(name, text) text,
      TFMEM_REDUCTIONS(TFMEM_NAME)
#undef TFMEM_NAME
  };
  return names[static_cast<int>(reduction)];
}

}  // namespace tfmem
