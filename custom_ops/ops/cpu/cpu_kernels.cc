#include "custom_ops/ops/cpu/cpu_kernels.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace tfmem {
namespace baseline {
namespace {
#define TFMEM_VECTOR_BYTES 16
#define TFMEM_ROWS 2
#include "custom_ops/ops/cpu/cpu_kernels_body.h"
}  // namespace
}  // namespace baseline

namespace {

std::atomic<int>& VectorBytesLimit() {
  static std::atomic<int> limit{64};
  return limit;
}

// The widest vectors that the machine has.
int VectorBytes() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return 64;
  }
  if (avx2) return 32;
#endif
  return 16;
}

}  // namespace

InstructionSet BaselineKernels() { return baseline::Kernels("baseline"); }

// What lists a set's functions is compiled for that set, too: it runs where they would.
const InstructionSet& ChosenKernels() {
  static const int available = VectorBytes();
#ifdef __x86_64__
  const int bytes = std::min(available, VectorBytesLimit().load());
  if (bytes >= 64) {
    static const InstructionSet wide = Avx512Kernels();
    return wide;
  }
  if (bytes >= 32) {
    static const InstructionSet middle = Avx2Kernels();
    return middle;
  }
#endif
  static const InstructionSet narrow = BaselineKernels();
  return narrow;
}

void LimitVectorBytes(int bytes) { VectorBytesLimit() = bytes; }

}  // namespace tfmem
