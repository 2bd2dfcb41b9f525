// A kernel of a region for GPUs, as an op is given it: its image, and how it is launched for
// tensors of given shapes. Reads what custom_ops/fusion/codegen/description.py writes, and says
// what everything means there. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cpu/expression.h"
#include "custom_ops/ops/cpu/sized_expression.h"
#include "custom_ops/ops/cuda/kernel_image.h"

namespace tfmem {

// A number, a product of a tensor's dimensions, or the CTAs of a piece.
struct KernelSize {
  enum class Kind { kNumber, kExtent, kCtas };

  Kind kind = Kind::kNumber;
  int64_t number = 0;       // or that of the tensor or the piece
  int first = 0, last = 0;  // dimensions
};

struct KernelWord {
  enum class Kind { kTensor, kOutput, kBuffer, kBarrier, kTf32, kExtent, kFirst, kCtas };

  Kind kind = Kind::kTensor;
  int number = 0;     // of the tensor, output, buffer or piece
  KernelSize extent;  // of an extent
};

struct KernelPiece {
  int phase = 0;
  int64_t most = 0;  // CTAs, slabs not counted; 0: any number
  int64_t slabs = 1;
  std::vector<std::pair<int64_t, std::vector<KernelSize>>> factors;
};

// Tensors each of which may share its memory with each of the outputs. Both ascend.
struct KernelInPlace {
  std::vector<int> tensors;
  std::vector<int> outputs;
};

// One launch, but for addresses.
struct KernelLaunch {
  int64_t ctas = 1;
  std::vector<int64_t> numbers;  // of the words that are no addresses
  std::vector<int64_t> buffers;  // bytes of each
};

struct FusionKernel {
  KernelImage image;
  std::vector<KernelWord> words;
  std::vector<KernelPiece> pieces;
  std::vector<std::vector<KernelSize>> buffers;
  std::vector<std::vector<KernelSize>> spans;  // positions that its indices go through
  std::vector<KernelInPlace> in_place;
  bool single = false;
  bool wide = false;
  int64_t alignment = 16;

  // `header` and `code` of an element of the attribute `programs`; InvalidArgument says what is
  // wrong with it, also as a kernel of `program`.
  static absl::StatusOr<FusionKernel> Read(const std::string& header, absl::string_view code,
                                           const Expression& program);

  bool MayShare(int tensor, int output) const;

  // For tensors of these shapes; `resident`: CTAs that run at once. FailedPrecondition if it cannot
  // be launched so.
  absl::StatusOr<KernelLaunch> Launch(const std::vector<Shape>& shapes, int64_t resident) const;

 private:
  absl::Status Fit(int64_t resident, std::vector<int64_t>* ctas) const;
};

}  // namespace tfmem
