// What C++ cannot say and PTX can: every instruction that the kernels ask for by name, and nothing
// else. tests/cuda_on_cpu/ptx_on_cpu.h stands in for it where the kernels run without a GPU.
#pragma once

#ifdef TFMEM_ON_CPU
#include "ptx_on_cpu.h"
#else

namespace tfmem {

using Word = unsigned long long;

// An array of shared memory whose size the launch gives.
#define TFMEM_DYNAMIC_SHARED(Type, name) extern __shared__ __align__(1024) Type name[]

// ---- Hints to the compiler

// What a thread computes once, and keeps. The compiler takes such numbers for cheap, and computes
// them again in every step, where the next thing waits for them; and by what it knows of their bits
// it makes several addresses of places that are constants apart.
__device__ __forceinline__ int settled(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// The overload for an address in shared memory.
template <class T>
__device__ __forceinline__ T* settled(T* pointer) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(pointer));
  asm volatile("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// As volatile: the compiler would read the slow special register again in every step.
__device__ __forceinline__ int cta_in_grid() {
  int cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}

__device__ __forceinline__ int thread_in_cta() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// This multiprocessor's clock, and the device's in nanoseconds, which goes in coarser steps.
__device__ __forceinline__ long long clock_cycles() {
  long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

__device__ __forceinline__ long long clock_nanoseconds() {
  long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// ---- Arithmetic and conversions

__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two numbers in 32 bits, `a` in the lower ones.
__device__ __forceinline__ unsigned half_pair(float a, float b) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ unsigned bfloat16_pair(float a, float b) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ float2 floats_of_half_pair(unsigned pair) {
  float2 two;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(two.x), "=f"(two.y)
      : "r"(pair));
  return two;
}

// The 11 significant bits that TF32 keeps. As volatile assembly: the parts of a resident weight are
// the same in every step, and the compiler would keep them in registers that are not there.
__device__ __forceinline__ unsigned tf32_bits(float value) {
  unsigned bits;
  asm volatile("and.b32 %0, %1, 0xffffe000;" : "=r"(bits) : "r"(__float_as_uint(value)));
  return bits;
}

// The nearest number of TF32, ties away from zero; infinity and NaN stay what they are. From
// compute capability 8.0 on.
__device__ __forceinline__ unsigned tf32_nearest(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// ---- Global memory, past the first level of caches

__device__ __forceinline__ float4 load_from_l2(const float4* from) {
  float4 four;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(from));
  return four;
}

// 32 or 64 bits are stored and loaded as a whole; of 128 bits each 64 are.
__device__ __forceinline__ void store_relaxed(unsigned* to, uint4 value) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%1, %2};\nmov.b64 b, {%3, %4};\n"
      "st.relaxed.gpu.global.v2.b64 [%0], {a, b};\n}" ::"l"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

__device__ __forceinline__ void store_relaxed(unsigned* to, uint2 value) {
  asm volatile(
      "{\n.reg .b64 a;\nmov.b64 a, {%1, %2};\nst.relaxed.gpu.global.b64 [%0], a;\n}" ::"l"(to),
      "r"(value.x), "r"(value.y)
      : "memory");
}

__device__ __forceinline__ void store_relaxed(unsigned* to, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void load_relaxed(const unsigned* from, uint4* value) {
  asm volatile(
      "{\n.reg .b64 a, b;\nld.relaxed.gpu.global.v2.b64 {a, b}, [%4];\n"
      "mov.b64 {%0, %1}, a;\nmov.b64 {%2, %3}, b;\n}"
      : "=r"(value->x), "=r"(value->y), "=r"(value->z), "=r"(value->w)
      : "l"(from)
      : "memory");
}

__device__ __forceinline__ void load_relaxed(const unsigned* from, uint2* value) {
  asm volatile("{\n.reg .b64 a;\nld.relaxed.gpu.global.b64 a, [%2];\nmov.b64 {%0, %1}, a;\n}"
               : "=r"(value->x), "=r"(value->y)
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ void load_relaxed(const unsigned* from, unsigned* value) {
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(*value) : "l"(from) : "memory");
}

// Any thread of the device that reads the sum and then fences sees what this CTA's threads wrote
// before their last barrier.
__device__ __forceinline__ void add_release(unsigned* to, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_to_host(unsigned* to, unsigned value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- Shared memory, and that of other CTAs of a cluster

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Where what lies at `address` here lies in another CTA.
__device__ __forceinline__ unsigned address_in(unsigned address, int cta) {
  unsigned result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(cta));
  return result;
}

__device__ __forceinline__ float4 load_shared_volatile(unsigned from) {
  float4 four;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(from));
  return four;
}

// 16 bytes of global memory (as L2 has them now) to shared memory, asynchronously; zeros where not
// `inside`.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void end_group_of_copies() { asm volatile("cp.async.commit_group;"); }

// Until but the last COUNT groups have come.
template <int COUNT>
__device__ __forceinline__ void wait_for_groups_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT));
}

// ---- Tensor cores: products of fragments that lie in the registers of a warp

// Four matrices of 8 rows of 16 bytes; lane i gives the address of row i.
__device__ __forceinline__ uint4 load_matrices(unsigned from) {
  uint4 four;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from));
  return four;
}

template <bool BFLOAT16>
__device__ __forceinline__ void mma_half(float* d, const uint4& a, const unsigned* b) {
  if constexpr (BFLOAT16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
  }
}

__device__ __forceinline__ void mma_tf32(float* d, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Clusters: stores into each other's shared memory that count their bytes on the receiver's
// mbarrier

__device__ __forceinline__ void store_async(unsigned to, uint4 value, unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(unsigned to, uint2 value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               :
               : "r"(to), "r"(value.x), "r"(value.y), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(unsigned to, float value, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
               :
               : "r"(to), "f"(value), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

__device__ __forceinline__ unsigned rank_in_cluster() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ unsigned ctas_of_cluster() {
  unsigned ctas;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ctas));
  return ctas;
}

// A barrier at which one thread arrives in each phase, and bytes.
__device__ __forceinline__ void init_barrier(unsigned barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Makes barriers' init seen by the CTAs of the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and lets the phase end only when so many bytes have come.
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of that parity has ended; may wait for a while.
__device__ __forceinline__ bool try_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Ends the launch with an error.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// ---- Hopper's tensor cores: products of a warpgroup, whose operands lie in shared memory

// What is written by ordinary stores and copies is seen by what follows.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void begin_group_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_group_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// sum = A B of 64 rows, 128 columns and a depth of 16, or with `more` sum += A B.
__device__ __forceinline__ void multiply_group(float (&sum)[16][4], Word a, Word b, bool more) {
  asm volatile(
      "{\n.reg .pred more;\nsetp.ne.b32 more, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "
      "}, %64, %65, more, 1, 1, 0, 0;\n}"
      : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]),
        "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]),
        "+f"(sum[2][2]), "+f"(sum[2][3]), "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]),
        "+f"(sum[3][3]), "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),
        "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]), "+f"(sum[6][0]),
        "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]), "+f"(sum[7][0]), "+f"(sum[7][1]),
        "+f"(sum[7][2]), "+f"(sum[7][3]), "+f"(sum[8][0]), "+f"(sum[8][1]), "+f"(sum[8][2]),
        "+f"(sum[8][3]), "+f"(sum[9][0]), "+f"(sum[9][1]), "+f"(sum[9][2]), "+f"(sum[9][3]),
        "+f"(sum[10][0]), "+f"(sum[10][1]), "+f"(sum[10][2]), "+f"(sum[10][3]), "+f"(sum[11][0]),
        "+f"(sum[11][1]), "+f"(sum[11][2]), "+f"(sum[11][3]), "+f"(sum[12][0]), "+f"(sum[12][1]),
        "+f"(sum[12][2]), "+f"(sum[12][3]), "+f"(sum[13][0]), "+f"(sum[13][1]), "+f"(sum[13][2]),
        "+f"(sum[13][3]), "+f"(sum[14][0]), "+f"(sum[14][1]), "+f"(sum[14][2]), "+f"(sum[14][3]),
        "+f"(sum[15][0]), "+f"(sum[15][1]), "+f"(sum[15][2]), "+f"(sum[15][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(more)));
}

}  // namespace tfmem

#endif  // TFMEM_ON_CPU
