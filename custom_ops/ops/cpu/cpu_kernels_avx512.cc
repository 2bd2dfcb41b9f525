#ifdef __x86_64__
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "custom_ops/ops/cpu/cpu_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")
namespace tfmem {
namespace avx512 {
namespace {
#define TFMEM_VECTOR_BYTES 64
#define TFMEM_ROWS 6
#include "custom_ops/ops/cpu/cpu_kernels_body.h"
}  // namespace
}  // namespace avx512

InstructionSet Avx512Kernels() { return avx512::Kernels("avx512"); }

}  // namespace tfmem
#pragma GCC pop_options
#endif
