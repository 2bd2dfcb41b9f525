#ifdef __x86_64__
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "custom_ops/ops/cpu/cpu_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace tfmem {
namespace avx2 {
namespace {
#define TFMEM_VECTOR_BYTES 32
#define TFMEM_ROWS 3
#include "custom_ops/ops/cpu/cpu_kernels_body.h"
}  // namespace
}  // namespace avx2

InstructionSet Avx2Kernels() { return avx2::Kernels("avx2"); }

}  // namespace tfmem
#pragma GCC pop_options
#endif
