// The vectorised inner loops of the recurrent op on the CPU, compiled for several instruction sets.
// Knows no TensorFlow.
#pragma once

#include <cstdint>

#include "custom_ops/ops/cpu/tile_kernels.h"
#include "custom_ops/ops/elementwise.h"

namespace tfmem {

// What one instruction set computes with numbers of type Real. Each result depends only on its own
// inputs, not on how a tensor was cut: so neither do the op's results depend on the threads.
template <typename Real>
struct CpuKernels {
  // Weights are packed in panels of so many columns, four vectors.
  int panel = 0;

  // target[row, 0..panel) (+)= operand[row, 0..depth) @ weights[0..depth, 0..panel).
  void (*multiply)(const Real* operand, int64_t operand_stride, int64_t rows, const Real* weights,
                   int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
                   bool accumulate) = nullptr;

  // target[row, 0..columns) (+)= operand[row, 0..depth) @ transpose(weights[0..columns, 0..depth)):
  // for few rows, where packing the transpose would not pay.
  void (*multiply_transposed)(const Real* operand, int64_t operand_stride, int64_t rows,
                              const Real* weights, int64_t weights_stride, int64_t columns,
                              int64_t depth, Real* target, int64_t target_stride,
                              bool accumulate) = nullptr;

  // target[row, 0..columns) (+)= operand[row, 0..depth) @ weights[0..depth, 0..columns), at most a
  // panel's columns. Strides of the operand are any; whole vectors of the weights are read. `next`,
  // if it is not null: as many rows of weights that are read soon, and come to the caches
  // meanwhile.
  void (*multiply_strided)(const Real* operand, int64_t row_stride, int64_t depth_stride,
                           int64_t rows, const Real* weights, int64_t weights_stride, int64_t depth,
                           const Real* next, Real* target, int64_t target_stride, int64_t columns,
                           bool accumulate) = nullptr;

  // target = op(a, b, c); unused arguments are not read; target may be an argument. Arguments whose
  // bit is in `splats` are the same number everywhere, and begin with a vector of it.
  void (*compute)(Elementwise op, Real* target, const Real* a, const Real* b, const Real* c,
                  int64_t count, int splats) = nullptr;

  // The sum of at most `panel` numbers.
  Real (*sum)(const Real* values, int64_t count) = nullptr;

  // One step of Adam: parameters w with their moments m and v, by gradients g. `rates`: the
  // learning rate, corrected for the step; 1 - beta_1; 1 - beta_2; epsilon.
  void (*adam)(Real* w, Real* m, Real* v, const Real* g, int64_t count,
               const Real* rates) = nullptr;

  // target[column, row] = source[row, column] of [rows, columns].
  void (*transpose)(const Real* source, int64_t source_stride, int64_t rows, int64_t columns,
                    Real* target, int64_t target_stride) = nullptr;
};

struct InstructionSet {
  const char* name = "";
  CpuKernels<float> single_precision;
  CpuKernels<double> double_precision;
  void (*half_to_float)(const uint16_t* source, float* target, int64_t count) = nullptr;
  void (*float_to_half)(const float* source, uint16_t* target, int64_t count) = nullptr;
  void (*bfloat16_to_float)(const uint16_t* source, float* target, int64_t count) = nullptr;
  void (*float_to_bfloat16)(const float* source, uint16_t* target, int64_t count) = nullptr;
  TileKernels tile;
};

// Compiled from one text, cpu_kernels_body.h.
InstructionSet BaselineKernels();  // vectors of 16 bytes
InstructionSet Avx2Kernels();      // 32 bytes; x86-64 only
InstructionSet Avx512Kernels();    // 64 bytes; x86-64 only

// The best that this machine has, below a limit that tests may set.
const InstructionSet& ChosenKernels();

// Bytes of a vector: 16, 32 or 64. For tests; call it while no op runs.
void LimitVectorBytes(int bytes);

}  // namespace tfmem
