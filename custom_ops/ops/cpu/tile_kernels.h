// The vectorised inner loops of tile programs beside the arithmetic of cpu_kernels.h: casts,
// integers, booleans and reductions. Knows no TensorFlow; follows its numbers on x86.
#pragma once

#include <cstdint>

#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

// A stateless random generator, Philox 4x32-10, as TensorFlow's ops have it.
struct RandomState {
  uint64_t key = 0;
  uint64_t low = 0;  // the counter's halves
  uint64_t high = 0;
};

// The state that TensorFlow makes of a seed of two numbers: four words of a generator whose counter
// the seed is.
inline RandomState SeededState(const uint64_t* seed) {
  uint32_t words[4] = {static_cast<uint32_t>(seed[0]), static_cast<uint32_t>(seed[0] >> 32),
                       static_cast<uint32_t>(seed[1]), static_cast<uint32_t>(seed[1] >> 32)};
  uint32_t key[2] = {0x3ec8f720u, 0x02461e29u};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{words[0]} * 0xD2511F53u;
    const uint64_t second = uint64_t{words[2]} * 0xCD9E8D57u;
    words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ key[0];
    words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ key[1];
    words[1] = static_cast<uint32_t>(second);
    words[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return {uint64_t{words[1]} << 32 | words[0], 0, uint64_t{words[3]} << 32 | words[2]};
}

// Numbers are as tiles hold them (TileBytes). A target may be an argument whose numbers are as
// long.
struct TileKernels {
  // What CpuKernels does not compute: integers (which wrap) and booleans; comparisons of numbers of
  // type `from`, which give booleans; a select by booleans.
  void (*compute)(Elementwise op, DType type, DType from, void* target, const void* a,
                  const void* b, const void* c, int64_t count, int splats) = nullptr;

  // To an integer towards zero; the smallest integer for what it cannot hold and for NaN. To a
  // boolean whether it is not zero: NaN is not. Integers keep their low bits. To a half type by way
  // of float32, as TensorFlow does from float64, too.
  void (*cast)(DType from, DType to, const void* source, void* target, int64_t count) = nullptr;

  // target[row] = reduction of values[row, 0..columns); each row's depends on nothing else. A mean
  // is a sum here: the caller, which knows how many numbers there are, divides.
  void (*reduce_columns)(Reduction reduction, DType type, const void* values, int64_t rows,
                         int64_t columns, void* target) = nullptr;

  // totals[column] = totals[column] combined with values[0..rows, column]; `begin` for the first
  // rows, whose totals are not read.
  void (*reduce_rows)(Reduction reduction, DType type, const void* values, int64_t rows,
                      int64_t columns, void* totals, bool begin) = nullptr;

  // The numbers first, first + 1, ... of a generator: uniform in [0, 1), or all bits of integers.
  void (*draw)(const RandomState& state, DType type, int64_t first, int64_t count,
               void* target) = nullptr;

  // Sums to means of `numbers`.
  void (*divide)(DType type, void* sums, int64_t numbers, int64_t count) = nullptr;
};

}  // namespace tfmem
