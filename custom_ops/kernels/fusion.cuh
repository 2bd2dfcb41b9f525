// What generated fusion kernels (custom_ops/fusion/codegen) are made of: vectors of elements,
// reductions by the threads that own a row, parts of sums that CTAs leave for others, a barrier of
// the grid.
#pragma once

#include "math.cuh"

namespace tfmem {

// ---- Elements

// Elements that one instruction moves, or two.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

// The packs of a row that one thread has.
template <class T, int N, int COUNT>
struct Packs {
  Pack<T, N> at[COUNT];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

// Only `left` of them are there.
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* from, long long left) {
  if (left >= N) return load<N>(from);
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = from[i < left ? i : 0];
  return pack;
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack, long long left) {
  if (left >= N) return store(to, pack);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < left) to[i] = pack.at[i];
  }
}

// What is computed with, of what is stored.
template <class T>
__device__ __forceinline__ T number(T stored) {
  return stored;
}
__device__ __forceinline__ float number(Half stored) { return to_float(stored); }
__device__ __forceinline__ float number(Bfloat16 stored) { return to_float(stored); }

// What is stored, of what was computed.
template <class T>
__device__ __forceinline__ T stored(float value) {
  T result;
  from_float(value, &result);
  return result;
}

template <class T>
__device__ __forceinline__ T* pointer(Word word) {
  return reinterpret_cast<T*>(word);
}

__device__ __forceinline__ bool inside(long long index, long long size) {
  return 0 <= index && index < size;
}

// ---- Reductions. `join` is associative but for rounding; integers wrap.

__device__ __forceinline__ int wrapped(unsigned value) { return static_cast<int>(value); }
__device__ __forceinline__ long long wrapped(Word value) { return static_cast<long long>(value); }

struct Sum {
  template <class T>
  __device__ static T start() {
    return T(0);
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return a + b;
  }
  __device__ static int join(int a, int b) { return wrapped(unsigned(a) + unsigned(b)); }
  __device__ static long long join(long long a, long long b) { return wrapped(Word(a) + Word(b)); }
};

struct Product {
  template <class T>
  __device__ static T start() {
    return T(1);
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return a * b;
  }
  __device__ static int join(int a, int b) { return wrapped(unsigned(a) * unsigned(b)); }
  __device__ static long long join(long long a, long long b) { return wrapped(Word(a) * Word(b)); }
};

template <class T>
__device__ __forceinline__ T lowest() {
  return T(__uint_as_float(0xff800000u));
}
template <>
__device__ __forceinline__ int lowest<int>() {
  return int(0x80000000u);
}
template <>
__device__ __forceinline__ long long lowest<long long>() {
  return wrapped(Word(1) << 63);
}

struct Max {
  template <class T>
  __device__ static T start() {
    return lowest<T>();
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return maximum(a, b);
  }
};

struct Min {
  template <class T>
  __device__ static T start() {
    return -lowest<T>();
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return minimum(a, b);
  }
};
template <>
__device__ inline int Min::start<int>() {
  return 0x7fffffff;
}
template <>
__device__ inline long long Min::start<long long>() {
  return wrapped(~Word(0) >> 1);
}

struct Any {
  template <class T>
  __device__ static T start() {
    return false;
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return a || b;
  }
};

struct All {
  template <class T>
  __device__ static T start() {
    return true;
  }
  template <class T>
  __device__ static T join(T a, T b) {
    return a && b;
  }
};

// By LANES neighbouring lanes of a warp; all of them get the result.
template <class Op, int LANES, class T>
__device__ __forceinline__ T reduce_lanes(T value) {
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
    value = Op::join(value, T(__shfl_xor_sync(kAllLanes, value, lanes)));
  }
  return value;
}

// By all threads of the CTA; all of them get the result. `exchange` is shared memory for a number
// of each warp.
template <class Op, int THREADS, class T>
__device__ __forceinline__ T reduce_cta(T value, char* exchange) {
  constexpr int kWarps = THREADS / kWarp;
  value = reduce_lanes<Op, kWarp>(value);
  if (kWarps == 1) return value;
  T* parts = reinterpret_cast<T*>(exchange);
  __syncthreads();  // all have read what was exchanged before
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = parts[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total = Op::join(total, parts[warp]);
  return total;
}

// By the threads whose numbers are the same modulo ROWS, each so many for themselves; `exchange` is
// shared memory for a number of each thread.
template <class Op, int ROWS, int THREADS, class T>
__device__ __forceinline__ T reduce_strided(T value, char* exchange) {
  T* parts = reinterpret_cast<T*>(exchange);
  __syncthreads();
  parts[threadIdx.x] = value;
  __syncthreads();
  const int row = threadIdx.x % ROWS;
  T total = parts[row];
  for (int part = 1; part < THREADS / ROWS; ++part) {
    total = Op::join(total, parts[part * ROWS + row]);
  }
  return total;
}

// ---- Numbers that count

// Marks the threads of the CTA for which `near` holds; false if there is none. `exchange` is shared
// memory for a number of each warp, which all threads may read until they call this again.
template <int THREADS>
__device__ __forceinline__ bool mark(bool near, char* exchange) {
  if (!__syncthreads_or(near)) return false;
  const unsigned of_warp = reduce_lanes<Sum, kWarp>(near ? 1u << (threadIdx.x % kWarp) : 0u);
  unsigned* marks = reinterpret_cast<unsigned*>(exchange);
  if (threadIdx.x % kWarp == 0) marks[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  return true;
}

// The first marked thread from `thread` on; THREADS if there is none.
template <int THREADS>
__device__ __forceinline__ int next_marked(const char* exchange, int thread) {
  const unsigned* marks = reinterpret_cast<const unsigned*>(exchange);
  for (; thread < THREADS; thread = (thread / kWarp + 1) * kWarp) {
    const unsigned left = marks[thread / kWarp] >> (thread % kWarp);
    if (left) return thread + __ffs(static_cast<int>(left)) - 1;
  }
  return THREADS;
}

// ---- Parts that CTAs leave

// The parts first, first + step, ... of `count`, which lie `stride` numbers apart.
template <class Op, class T, class Index>
__device__ __forceinline__ T join_parts(const T* parts, int first, int step, int count,
                                        Index stride) {
  T total = Op::template start<T>();
  for (int part = first; part < count; part += step) {
    total = Op::join(total, parts[part * stride]);
  }
  return total;
}

// Leaves in `parts` what the rows of a CTA add up to, `size` numbers: each of its GROUPS of LANES
// threads has sums over its rows, `sums[k * WIDTH + j]` of the number (k * LANES + lane) * WIDTH +
// j. Half of the groups add those of the other half, and so on. `exchange` is shared memory for
// WIDTH numbers of each thread.
template <class Op, int GROUPS, int LANES, int WIDTH, int COUNT, class T>
__device__ __forceinline__ void leave_parts(T* parts, int size, const T (&sums)[COUNT],
                                            char* exchange) {
  static_assert((GROUPS & (GROUPS - 1)) == 0, "halves are whole");
  T* shared = reinterpret_cast<T*>(exchange);
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll
  for (int k = 0; k < COUNT / WIDTH; ++k) {
    T total[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) total[j] = sums[k * WIDTH + j];
#pragma unroll
    for (int half = GROUPS / 2; half > 0; half /= 2) {
      __syncthreads();
      if (group >= half && group < 2 * half) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
          shared[(j * half + group - half) * LANES + lane] = total[j];
        }
      }
      __syncthreads();
      if (group < half) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
          total[j] = Op::join(total[j], shared[(j * half + group) * LANES + lane]);
        }
      }
    }
    const int number = (k * LANES + lane) * WIDTH;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      if (group == 0 && number + j < size) parts[number + j] = total[j];
    }
  }
}

// ---- The grid

// What computes a piece: with its words, shared memory, the CTA's number among the piece's, and how
// many these are.
using Piece = void(const Word*, char*, int, int);

// Runs that of COUNT pieces which the CTA belongs to, if any. Their words are STRIDE apart, and
// begin with their first CTA, in rising order, and how many they have.
template <int COUNT, int STRIDE, Piece PIECE>
__device__ __forceinline__ void run_piece(const Word* words, char* shared) {
  const int cta = blockIdx.x;
  int piece = 0;
#pragma unroll
  for (int count = COUNT; count > 1;) {
    const int half = count / 2;
    if (cta >= static_cast<int>(words[(piece + half) * STRIDE])) piece += half;
    count -= half;
  }
  const Word* own = words + piece * STRIDE;
  const int within = cta - static_cast<int>(own[0]), ctas = static_cast<int>(own[1]);
  if (0 <= within && within < ctas) PIECE(own + 2, shared, within, ctas);
}

// Runs all of them, one after the other, in the only CTA.
template <int COUNT, int STRIDE, Piece PIECE>
__device__ __forceinline__ void run_pieces(const Word* words, char* shared) {
#pragma unroll 1
  for (int piece = 0; piece < COUNT; ++piece) {
    PIECE(words + piece * STRIDE + 2, shared, 0, 1);
    __syncthreads();
  }
}

// Until all CTAs of a cooperative launch are here. Each adds to `*state`, together half of all
// numbers that it can hold, so that its highest bit changes once the last one is here: zero before
// the first launch, and never reset. Not for two launches at a time.
__device__ inline void grid_barrier(unsigned* state, unsigned ctas) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned step = blockIdx.x == 0 ? 0x80000000u - (ctas - 1) : 1;
    const unsigned before = atomicAdd(state, step);
    unsigned now;
    do {
      load_relaxed(state, &now);
    } while (((now ^ before) & 0x80000000u) == 0);
    __threadfence();
  }
  __syncthreads();
}

}  // namespace tfmem
