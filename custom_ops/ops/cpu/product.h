// Products of matrices on the CPU that are read where they lie: what a library copies into blocks
// first costs more than it saves where a matrix has few rows. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/tile_run.h"
#include "custom_ops/ops/elementwise.h"

namespace tfmem {

// c[rows, columns] = a[rows, depth] @ b[depth, columns], once for each matrix of a batch.
struct ProductSizes {
  // A matrix of a batch, by the numbers of those of a and b that are its factors.
  struct Factors {
    int64_t a = 0;
    int64_t b = 0;
  };

  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  bool a_transposed = false;  // it lies as [depth, rows]
  bool b_transposed = false;  // it lies as [columns, depth]
  std::vector<Factors> batch = {{}};
};

// Whether these loops are at least as fast as oneDNN's, of numbers of so many bytes, by
// measurements on processors with AVX-512 and, there, of what needs no more than AVX2.
template <typename Real>
bool IsFast(const ProductSizes& sizes, const CpuKernels<Real>& kernels);

// A product of numbers of type Real (float, double). Results do not depend on the threads.
template <typename Real>
class Product {
 public:
  // `activation`: of one argument, of each result and the bias.
  Product(ProductSizes sizes, std::optional<Elementwise> activation,
          const CpuKernels<Real>& kernels);

  // What one thread takes for a run, roughly.
  double work_ns() const;
  int64_t WorkspaceBytes(int threads) const;

  // `bias`: a number for each column, or null. `workspace`: as many bytes as that says, on a
  // boundary of 64.
  void Run(const Real* a, const Real* b, const Real* bias, Real* c, const TileThreads& threads,
           void* workspace) const;

 private:
  // A factor, or the result, as it is read: numbers from one row, or column, to the next.
  struct Layout {
    int64_t row = 0;
    int64_t column = 0;
  };

  // What one thread computes at a time.
  struct Part {
    int64_t row = 0;
    int64_t rows = 0;
    int64_t column = 0;
    int64_t columns = 0;
  };

  int UsefulThreads(int threads) const;
  void RunPart(const Real* operand, const Real* weights, const Real* bias, Real* target,
               const Part& part, Real* buffer) const;
  void Dot(const Real* operand, const Real* weights, const Part& part, Real* target,
           int64_t target_stride, Real* packed) const;
  void Multiply(const Real* operand, const Real* weights, const Part& part, Real* target,
                int64_t target_stride, Real* packed) const;
  void RunEpilogue(const Real* bias, const Part& part, Real* target, int64_t target_stride) const;

  const ProductSizes sizes_;
  const std::optional<Elementwise> activation_;
  const CpuKernels<Real>& kernels_;
  // Few columns and many rows: the transposed product is computed. Then these are its rows and
  // columns, its operand is b, and its weights are a.
  const bool swapped_;
  const int64_t rows_;
  const int64_t columns_;
  Layout operand_;
  Layout weights_;       // its rows are the product's depth
  int64_t panel_ = 0;    // columns that are computed at a time
  int64_t panels_ = 0;   // of one matrix
  int64_t parts_ = 0;    // of its rows
  bool cached_ = false;  // its weights: they need not be asked for early
  bool dots_ = false;    // each result is a sum over numbers that lie side by side
  bool packs_ = false;   // weights are copied first
  int64_t buffer_ = 0;   // numbers that a thread needs
};

}  // namespace tfmem
