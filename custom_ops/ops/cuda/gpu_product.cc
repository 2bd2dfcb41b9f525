#include "custom_ops/ops/cuda/gpu_product.h"

#include <map>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr uint64_t kMostWorkspace = 32 << 20;  // as TensorFlow lets it have, on Hopper

struct Handles {
  std::mutex mutex;
  std::map<cuda::Context, cublas::Handle> handles;
};

// A handle may be used by any number of threads.
absl::StatusOr<cublas::Handle> HandleOf(const cublas::Library& library, GpuLink* link) {
  Handles& all = ProcessWide<Handles>();
  std::lock_guard<std::mutex> lock(all.mutex);
  cublas::Handle& handle = all.handles[link->context()];
  if (handle == nullptr) TFMEM_CUBLAS_RETURN_IF_ERROR(library, cublasLtCreate, &handle);
  return handle;
}

int64_t BytesOf(cublas::Type type) {
  return type == cublas::kR64F ? 8 : type == cublas::kR32F ? 4 : 2;
}

// Whether each `size` consecutive matrices lie one stride apart, the same in all such groups.
bool IsStrided(const std::vector<int64_t>& batch, int64_t size) {
  const int64_t stride = size > 1 ? batch[1] - batch[0] : 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i] - batch[i - i % size] != static_cast<int64_t>(i % size) * stride) return false;
  }
  return stride >= 0;
}

// How many matrices a launch may compute. Of [4, 8, m, k] and [1, 8, k, n] it is 8: the right ones
// come again after 8, so there are 4 launches.
int64_t LargestBatch(const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
  for (int64_t size = left.size(); size > 1; --size) {
    if (left.size() % size == 0 && IsStrided(left, size) && IsStrided(right, size)) return size;
  }
  return 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuProduct>> GpuProduct::Make(GpuLink* link,
                                                             const ProductForm& form) {
  TFMEM_ASSIGN_OR_RETURN(const cublas::Library* library, cublas::Load());
  std::unique_ptr<GpuProduct> product(new GpuProduct(*library, link, form));
  TFMEM_RETURN_IF_ERROR(product->Open());
  return product;
}

GpuProduct::~GpuProduct() {
  for (cublas::Layout layout : {left_, right_, result_}) {
    if (layout != nullptr) library_.cublasLtMatrixLayoutDestroy(layout);
  }
  if (product_ != nullptr) library_.cublasLtMatmulDescDestroy(product_);
}

// cuBLASLt's matrices are in column-major order, so it computes the transpose of the result: the
// right operand comes first.
absl::Status GpuProduct::Open() {
  const cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  TFMEM_ASSIGN_OR_RETURN(const cublas::Handle handle, HandleOf(library_, link_));
  const bool wide = form_.type == cublas::kR64F;
  const bool tf32 = form_.type == cublas::kR32F && form_.tf32;
  TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulDescCreate, &product_,
                               wide   ? cublas::k64F
                               : tf32 ? cublas::k32FFastTF32
                                      : cublas::k32F,
                               wide ? cublas::kR64F : cublas::kR32F);
  const auto set = [&](int name, const auto& value) {
    return cublas::Check(
        library_.cublasLtMatmulDescSetAttribute(product_, name, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute");
  };
  TFMEM_RETURN_IF_ERROR(set(cublas::kTransA, int32_t{form_.transpose_right}));
  TFMEM_RETURN_IF_ERROR(set(cublas::kTransB, int32_t{form_.transpose_left}));
  const uint32_t epilogue = form_.relu   ? cublas::kReluBias
                            : form_.bias ? cublas::kBias
                                         : cublas::kNoEpilogue;
  TFMEM_RETURN_IF_ERROR(set(cublas::kEpilogue, epilogue));
  batch_ = LargestBatch(form_.left_batch, form_.right_batch);
  launches_ = form_.left_batch.size() / batch_;
  const auto stride = [&](const std::vector<int64_t>& of) {
    return batch_ > 1 ? of[1] - of[0] : 0;
  };
  const int64_t left[2] = {form_.rows, form_.depth}, right[2] = {form_.depth, form_.columns};
  const bool t_left = form_.transpose_left, t_right = form_.transpose_right;
  TFMEM_RETURN_IF_ERROR(NewLayout(&left_, left[!t_left], left[t_left], stride(form_.left_batch)));
  TFMEM_RETURN_IF_ERROR(
      NewLayout(&right_, right[!t_right], right[t_right], stride(form_.right_batch)));
  TFMEM_RETURN_IF_ERROR(NewLayout(&result_, form_.columns, form_.rows, 1));
  return FindAlgorithm(handle);
}

// `rows` and `columns` as cuBLASLt has them; `stride` in matrices.
absl::Status GpuProduct::NewLayout(cublas::Layout* layout, int64_t rows, int64_t columns,
                                   int64_t stride) {
  TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatrixLayoutCreate, layout, form_.type, rows,
                               columns, rows);
  if (batch_ == 1) return absl::OkStatus();
  const int32_t count = batch_;
  const int64_t offset = stride * rows * columns;
  TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatrixLayoutSetAttribute, *layout,
                               cublas::kBatchCount, &count, sizeof count);
  TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatrixLayoutSetAttribute, *layout,
                               cublas::kBatchOffset, &offset, sizeof offset);
  return absl::OkStatus();
}

// Of all matrices that a call is given.
uint32_t GpuProduct::Alignment() const {
  if (launches_ == 1) return kAlignment;
  const int64_t sizes = form_.rows * form_.depth | form_.depth * form_.columns |
                        form_.rows * form_.columns | kAlignment / BytesOf(form_.type);
  return BytesOf(form_.type) * (sizes & -sizes);
}

absl::Status GpuProduct::FindAlgorithm(cublas::Handle handle) {
  cublas::Preference preference = nullptr;
  TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulPreferenceCreate, &preference);
  const auto find = [&]() -> absl::Status {
    TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulPreferenceSetAttribute, preference,
                                 cublas::kMostWorkspace, &kMostWorkspace, sizeof kMostWorkspace);
    const uint32_t alignment = Alignment();
    for (int name :
         {cublas::kAlignmentA, cublas::kAlignmentB, cublas::kAlignmentC, cublas::kAlignmentD}) {
      TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulPreferenceSetAttribute, preference, name,
                                   &alignment, sizeof alignment);
    }
    int count = 0;
    TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulAlgoGetHeuristic, handle, product_, right_,
                                 left_, result_, result_, preference, 1, &heuristic_, &count);
    if (count > 0 && heuristic_.state == cublas::kSuccess) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat("cuBLASLt has no algorithm for a product of [",
                                                 form_.rows, ", ", form_.depth, "] and [",
                                                 form_.depth, ", ", form_.columns, "]"));
  };
  const absl::Status found = find();
  library_.cublasLtMatmulPreferenceDestroy(preference);
  return found;
}

absl::Status GpuProduct::Enqueue(cuda::Stream stream, absl::Span<const uint64_t> addresses) {
  TFMEM_ASSIGN_OR_RETURN(const cublas::Handle handle, HandleOf(library_, link_));
  const auto* bias = reinterpret_cast<const void*>(addresses[2]);
  if (form_.bias) {
    TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulDescSetAttribute, product_,
                                 cublas::kBiasPointer, &bias, sizeof bias);
  }
  const bool wide = form_.type == cublas::kR64F;
  const double wide_one = 1, wide_zero = 0;
  const float one = 1, zero = 0;
  const void* alpha = wide ? static_cast<const void*>(&wide_one) : &one;
  const void* beta = wide ? static_cast<const void*>(&wide_zero) : &zero;
  const int64_t bytes = BytesOf(form_.type);
  const int64_t left = form_.rows * form_.depth * bytes;
  const int64_t right = form_.depth * form_.columns * bytes;
  const int64_t result = form_.rows * form_.columns * bytes;
  for (int64_t i = 0; i < launches_; ++i) {
    const int64_t first = i * batch_;
    auto* const to = reinterpret_cast<void*>(addresses[3] + first * result);
    TFMEM_CUBLAS_RETURN_IF_ERROR(
        library_, cublasLtMatmul, handle, product_, alpha,
        reinterpret_cast<const void*>(addresses[1] + form_.right_batch[first] * right), right_,
        reinterpret_cast<const void*>(addresses[0] + form_.left_batch[first] * left), left_, beta,
        to, result_, to, result_, &heuristic_.algorithm, reinterpret_cast<void*>(addresses[4]),
        heuristic_.workspace_bytes, stream);
  }
  return absl::OkStatus();
}

}  // namespace tfmem
