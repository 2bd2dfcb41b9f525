// The twin of custom_ops/kernels/ptx.cuh, and of those words of CUDA's that the kernels use: with
// it g++ compiles them, and threads.cc runs them.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#define __shared__ static  // CTAs with such arrays run one after the other
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define TFMEM_DYNAMIC_SHARED(Type, name) \
  Type* const name = reinterpret_cast<Type*>(::on_cpu::dynamic_shared())

#define threadIdx (::on_cpu::current->index)
#define blockIdx (::on_cpu::current->cta->index)
#define blockDim (::on_cpu::launch->block)
#define gridDim (::on_cpu::launch->grid)

#define ON_CPU_TEXT(x) #x
#define ON_CPU_LINE(x) ON_CPU_TEXT(x)
#define ON_CPU_HERE __FILE__ ":" ON_CPU_LINE(__LINE__)
#define __syncthreads() \
  ::on_cpu::meet(::on_cpu::current->cta->meeting, "__syncthreads, " ON_CPU_HERE)
#define __syncthreads_or(any) ::on_cpu::vote_of_cta((any), "__syncthreads_or, " ON_CPU_HERE)
#define __ffs(bits) __builtin_ffs(bits)
#define __syncwarp() ::on_cpu::meet(::on_cpu::current->warp->meeting, "__syncwarp, " ON_CPU_HERE)
#define __any_sync(mask, any) ::on_cpu::vote_of_warp((any), "__any_sync, " ON_CPU_HERE)
#define __shfl_sync(mask, ...) ::on_cpu::shuffle("__shfl_sync, " ON_CPU_HERE, __VA_ARGS__)
#define __shfl_xor_sync(mask, value, lanes) \
  ::on_cpu::shuffle("__shfl_xor_sync, " ON_CPU_HERE, value, ::on_cpu::current->lane ^ (lanes))
#define __shfl_down_sync(mask, value, lanes) \
  ::on_cpu::shuffle_down("__shfl_down_sync, " ON_CPU_HERE, value, lanes)

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace on_cpu {

template <class To, class From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

// Every lane tells `words` of `value`; afterwards `told()` has those of all lanes.
using Told = uint32_t (*)[16];
template <class Value>
Told tell(const Value& value, const char* operation) {
  static_assert(sizeof(Value) <= 64);
  Warp& warp = *current->warp;
  Told told = warp.told[warp.meeting.generation % 2];
  memcpy(told[current->lane], &value, sizeof(Value));
  meet(warp.meeting, operation);
  return told;
}

template <class Value>
Value told_by(Told told, int lane) {
  Value value;
  memcpy(&value, told[lane], sizeof(Value));
  return value;
}

template <class Value>
Value shuffle(const char* operation, Value value, int from, int width = 32) {
  const int first = current->lane / width * width;
  return told_by<Value>(tell(value, operation), first + (from & (width - 1)));
}

template <class Value>
Value shuffle_down(const char* operation, Value value, int lanes) {
  const int from = current->lane + lanes;
  return told_by<Value>(tell(value, operation), from < 32 ? from : current->lane);
}

inline bool vote(Meeting& meeting, bool any, const char* operation) {
  bool& result = meeting.vote[meeting.generation % 2];
  result = result || any;
  meet(meeting, operation);
  return result;
}
inline bool vote_of_cta(bool any, const char* operation) {
  return vote(current->cta->meeting, any, operation);
}
inline bool vote_of_warp(bool any, const char* operation) {
  return vote(current->warp->meeting, any, operation);
}

inline float flushed(float value) {
  return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value;
}

inline float from_half(uint16_t bits) { return static_cast<float>(bits_of<_Float16>(bits)); }
inline uint16_t to_half(float value) { return bits_of<uint16_t>(static_cast<_Float16>(value)); }
inline float from_bfloat16(uint16_t bits) {
  return bits_of<float>(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// An mbarrier, in the 64 bits of shared memory that it has on a GPU.
struct Barrier {
  int32_t bytes;  // that are still to come
  uint16_t arrivals, phase;
};
inline Barrier* barrier_at(unsigned address) {
  return reinterpret_cast<Barrier*>(shared_memory(address));
}
inline void complete(Barrier& barrier) {
  changed();
  if (barrier.arrivals == 0 && barrier.bytes == 0) {
    barrier.arrivals = 1;
    ++barrier.phase;
  }
}
inline void store_and_count(unsigned to, const void* value, int bytes, unsigned barrier) {
  if (to / kWindow != barrier / kWindow)
    fail("st.async to CTA %u counts on CTA %u", to / kWindow, barrier / kWindow);
  if (to % bytes != 0)
    fail("st.async of %d bytes to %u, which is no multiple", bytes, to % kWindow);
  memcpy(shared_memory(to), value, bytes);
  barrier_at(barrier)->bytes -= bytes;
  complete(*barrier_at(barrier));
}

inline void deliver(std::vector<Copy>& copies) {
  for (const Copy& copy : copies) memcpy(shared_memory(copy.to), copy.bytes, 16);
  copies.clear();
}

}  // namespace on_cpu

using std::max;
using std::min;
inline unsigned __float_as_uint(float value) { return on_cpu::bits_of<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return on_cpu::bits_of<float>(bits); }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline double rsqrt(double value) { return 1.0 / std::sqrt(value); }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to += value;
  return before;
}

namespace tfmem {

using Word = unsigned long long;

inline int settled(int number) { return number; }
template <class T>
T* settled(T* pointer) {
  return pointer;
}
inline int cta_in_grid() { return blockIdx.x; }
inline int thread_in_cta() { return threadIdx.x; }

inline long long clock_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
inline long long clock_cycles() { return clock_nanoseconds(); }

inline float exp2_approximate(float x) { return on_cpu::flushed(std::exp2(on_cpu::flushed(x))); }
inline float reciprocal_approximate(float x) { return on_cpu::flushed(1.0f / on_cpu::flushed(x)); }
inline float half_to_float(unsigned short bits) { return on_cpu::from_half(bits); }
inline unsigned short float_to_half(float value) { return on_cpu::to_half(value); }
inline unsigned half_pair(float a, float b) {
  return on_cpu::to_half(a) | static_cast<unsigned>(on_cpu::to_half(b)) << 16;
}
inline unsigned bfloat16_pair(float a, float b) {
  return on_cpu::to_bfloat16(a) | static_cast<unsigned>(on_cpu::to_bfloat16(b)) << 16;
}
inline float2 floats_of_half_pair(unsigned pair) {
  return {on_cpu::from_half(pair & 0xffff), on_cpu::from_half(pair >> 16)};
}
inline unsigned tf32_bits(float value) { return __float_as_uint(value) & 0xffffe000u; }
inline unsigned tf32_nearest(float value) {
  const unsigned bits = __float_as_uint(value);
  return (std::isfinite(value) ? bits + 0x1000u : bits) & 0xffffe000u;
}

inline float4 load_from_l2(const float4* from) { return *from; }
template <class Words>
void store_relaxed(unsigned* to, Words value) {
  memcpy(to, &value, sizeof(value));
  on_cpu::changed();
}
template <class Words>
void load_relaxed(const unsigned* from, Words* value) {
  on_cpu::poll("a load of what others send");
  memcpy(value, from, sizeof(*value));
}

inline void add_release(unsigned* to, unsigned value) { atomicAdd(to, value); }
inline void store_to_host(unsigned* to, unsigned value) { *to = value; }
inline void fence_acquire() {}

inline unsigned shared_address(const void* pointer) { return on_cpu::address_of(pointer); }
// `cta` counts within the cluster.
inline unsigned address_in(unsigned address, int cta) {
  const unsigned first =
      on_cpu::current->cta->rank / on_cpu::launch->cluster * on_cpu::launch->cluster;
  if (cta < 0 || static_cast<unsigned>(cta) >= on_cpu::launch->cluster)
    on_cpu::fail("CTA %d is in no cluster of %u", cta, on_cpu::launch->cluster);
  return address % on_cpu::kWindow + (first + cta) * on_cpu::kWindow;
}
inline float4 load_shared_volatile(unsigned from) {
  return *reinterpret_cast<float4*>(on_cpu::shared_memory(from));
}

inline void copy_async(unsigned to, const void* from, bool inside) {
  on_cpu::Copy copy{{}, to};
  if (inside) memcpy(copy.bytes, from, 16);
  on_cpu::current->copies.push_back(copy);
}
inline void end_group_of_copies() {
  on_cpu::current->groups.push_back(std::move(on_cpu::current->copies));
  on_cpu::current->copies.clear();
}
template <int COUNT>
void wait_for_groups_but() {
  auto& groups = on_cpu::current->groups;
  for (; groups.size() > COUNT; groups.pop_front()) on_cpu::deliver(groups.front());
}

inline uint4 load_matrices(unsigned from) {
  const auto told = on_cpu::tell(from, "ldmatrix");
  const int lane = on_cpu::current->lane;
  unsigned word[4];
  for (int matrix = 0; matrix < 4; ++matrix) {
    const unsigned row = on_cpu::told_by<unsigned>(told, matrix * 8 + lane / 4);
    memcpy(&word[matrix], on_cpu::shared_memory(row + lane % 4 * 4), 4);
  }
  return {word[0], word[1], word[2], word[3]};
}

// Fragments as PTX has them (m16n8k16 and m16n8k8): lane = 4 g + t has of A the rows g and g + 8,
// of B the column g, of the result rows g and g + 8 of columns 2 t and 2 t + 1.
template <int K, class At>
void multiply_fragments(float* d, const At& at) {
  const int g = on_cpu::current->lane / 4, t = on_cpu::current->lane % 4;
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < K; ++k) {
      const float2 factors = at(g + i / 2 * 8, 2 * t + i % 2, k);
      sum += static_cast<double>(factors.x) * factors.y;
    }
    d[i] = static_cast<float>(sum);
  }
}

template <bool BFLOAT16>
void mma_half(float* d, const uint4& a, const unsigned* b) {
  struct Words {
    unsigned a[4], b[2];
  };
  const auto told = on_cpu::tell(Words{{a.x, a.y, a.z, a.w}, {b[0], b[1]}}, "mma.m16n8k16");
  const auto number = [&](unsigned word, int k) {
    const uint16_t bits = static_cast<uint16_t>(word >> (k % 2 * 16));
    return BFLOAT16 ? on_cpu::from_bfloat16(bits) : on_cpu::from_half(bits);
  };
  multiply_fragments<16>(d, [&](int row, int column, int k) {
    const int t = k % 8 / 2;
    const Words left = on_cpu::told_by<Words>(told, row % 8 * 4 + t);
    const Words right = on_cpu::told_by<Words>(told, column * 4 + t);
    return make_float2(number(left.a[row / 8 + k / 8 * 2], k), number(right.b[k / 8], k));
  });
}

inline void mma_tf32(float* d, const unsigned* a, const unsigned* b) {
  struct Words {
    unsigned a[4], b[2];
  };
  const auto told = on_cpu::tell(Words{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, "mma.m16n8k8");
  multiply_fragments<8>(d, [&](int row, int column, int k) {
    const Words left = on_cpu::told_by<Words>(told, row % 8 * 4 + k % 4);
    const Words right = on_cpu::told_by<Words>(told, column * 4 + k % 4);
    return make_float2(__uint_as_float(left.a[row / 8 + k / 4 * 2] & 0xffffe000u),
                       __uint_as_float(right.b[k / 4] & 0xffffe000u));
  });
}

inline void store_async(unsigned to, uint4 value, unsigned barrier) {
  on_cpu::store_and_count(to, &value, 16, barrier);
}
inline void store_async(unsigned to, uint2 value, unsigned barrier) {
  on_cpu::store_and_count(to, &value, 8, barrier);
}
inline void store_async(unsigned to, float value, unsigned barrier) {
  on_cpu::store_and_count(to, &value, 4, barrier);
}

inline void cluster_barrier() { on_cpu::meet(*on_cpu::current->cta->cluster, "barrier.cluster"); }
inline unsigned rank_in_cluster() { return on_cpu::current->cta->rank % on_cpu::launch->cluster; }
inline unsigned ctas_of_cluster() { return on_cpu::launch->cluster; }
inline void init_barrier(unsigned barrier) { *on_cpu::barrier_at(barrier) = {0, 1, 0}; }
inline void publish_barriers() {}
inline void expect(unsigned barrier, int bytes) {
  on_cpu::Barrier& found = *on_cpu::barrier_at(barrier);
  if (found.arrivals == 0)
    on_cpu::fail("two threads arrive at the mbarrier at %u in one phase",
                 barrier % on_cpu::kWindow);
  found.bytes += bytes;
  --found.arrivals;
  on_cpu::complete(found);
}
inline bool try_wait(unsigned barrier, unsigned parity) {
  if (on_cpu::barrier_at(barrier)->phase % 2 == parity) on_cpu::poll("mbarrier.try_wait");
  return on_cpu::barrier_at(barrier)->phase % 2 != parity;
}
[[noreturn]] inline void trap() { on_cpu::fail("trap"); }

inline void fence_async_proxy() {}
inline void begin_group_products() {}
inline void end_group_products() {}

// A number of a K-major matrix of float16 that `descriptor` (PTX: "Matrix Descriptor Format")
// places in shared memory, its 16-byte words swizzled within 128 bytes.
inline float number_of_group(Word descriptor, int row, int k) {
  const unsigned start = static_cast<unsigned>(descriptor & 0x3fff) << 4;
  const unsigned eight_rows = static_cast<unsigned>(descriptor >> 32 & 0x3fff) << 4;
  const unsigned at = start + row / 8 * eight_rows + row % 8 * 128 + k * 2;
  const unsigned own = on_cpu::current->cta->rank * on_cpu::kWindow;
  uint16_t bits;
  memcpy(&bits, on_cpu::shared_memory(own + (at ^ (at >> 7 & 7) << 4)), 2);
  return on_cpu::from_half(bits);
}

inline void multiply_group(float (&sum)[16][4], Word a, Word b, bool more) {
  const int warp = threadIdx.x / 32 % 4, g = on_cpu::current->lane / 4,
            t = on_cpu::current->lane % 4;
  for (int row = 0; row < 2; ++row) {
    float left[16];
    for (int k = 0; k < 16; ++k) left[k] = number_of_group(a, warp * 16 + row * 8 + g, k);
    for (int i = 0; i < 32; ++i) {
      float& result = sum[i / 2][row * 2 + i % 2];
      double total = more ? result : 0.0f;
      for (int k = 0; k < 16; ++k)
        total += static_cast<double>(left[k]) * number_of_group(b, i / 2 * 8 + t * 2 + i % 2, k);
      result = static_cast<float>(total);
    }
  }
}

}  // namespace tfmem
