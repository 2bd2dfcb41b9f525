// Products of matrices by cuBLASLt. Knows no TensorFlow.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/cublas_lt.h"
#include "custom_ops/ops/cuda/gpu_trial.h"
#include "custom_ops/ops/memory/gpu_link.h"

namespace tfmem {

// result[b] = left[b] right[b], each a matrix [rows, columns] in row-major order, or its transpose.
struct ProductForm {
  cublas::Type type = cublas::kR32F;
  bool tf32 = false;  // whether float32 may be multiplied as TensorFloat-32
  bool transpose_left = false;
  bool transpose_right = false;
  bool bias = false;  // [columns], is added to all rows
  bool relu = false;  // then; not without a bias
  int64_t rows = 0, depth = 0, columns = 0;
  // For each matrix of the result which one of each operand it is made of.
  std::vector<int64_t> left_batch = {0}, right_batch = {0};
};

class GpuProduct {
 public:
  // `form` has no size of zero. By the algorithm that cuBLASLt expects to be the fastest; with a
  // trial by the fastest of several, which are timed once in a process for each form and device.
  // If they cannot be, there being no memory for it, say, it is the first one then, too.
  // Unimplemented if cuBLASLt has no algorithm for it.
  static absl::StatusOr<std::unique_ptr<GpuProduct>> Make(GpuLink* link, const ProductForm& form,
                                                          const GpuTrial* trial = nullptr);
  ~GpuProduct();

  int64_t workspace_bytes() const { return heuristic_.workspace_bytes; }

  // Addresses: left, right, bias or zero, result, multiples of kAlignment but for the bias; and the
  // workspace, a multiple of kWorkspaceAlignment. Runs on `stream`, or is captured there.
  absl::Status Enqueue(cuda::Stream stream, absl::Span<const uint64_t> addresses);

  static constexpr uint32_t kAlignment = 16;
  static constexpr uint64_t kWorkspaceAlignment = 256;  // cuBLASLt refuses others

 private:
  GpuProduct(const cublas::Library& library, GpuLink* link, const ProductForm& form)
      : library_(library), link_(link), form_(form) {}
  absl::Status Open(const GpuTrial* trial);
  // The best first; `reductions`: those that are allowed.
  absl::StatusOr<std::vector<cublas::Heuristic>> Algorithms(cublas::Handle handle, int most,
                                                            uint32_t reductions) const;
  absl::Status ChooseAlgorithm(cublas::Handle handle, const GpuTrial* trial);
  cublas::Heuristic Fastest(const std::vector<cublas::Heuristic>& algorithms,
                            const GpuTrial& trial);
  // Where the left operand, the right one, the bias and the result lie, one behind the other, and
  // how many bytes they take.
  std::pair<std::array<int64_t, 4>, int64_t> Operands() const;
  uint32_t Alignment() const;
  absl::Status NewLayout(cublas::Layout* layout, int64_t rows, int64_t columns, int64_t stride);

  const cublas::Library& library_;
  GpuLink* const link_;
  const ProductForm form_;
  int64_t batch_ = 1;  // matrices of a launch
  int64_t launches_ = 1;
  cublas::Product product_ = nullptr;
  cublas::Layout left_ = nullptr, right_ = nullptr, result_ = nullptr;
  cublas::Heuristic heuristic_ = {};
};

}  // namespace tfmem
