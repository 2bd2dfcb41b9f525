#include "custom_ops/ops/cuda/gpu_product.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr uint64_t kMostWorkspace = 32 << 20;  // as TensorFlow lets it have, on Hopper

// Limits of a trial. It times so many algorithms that cuBLASLt expects to be fast, and so many that
// write the result at once. Its operands take so many bytes at most, which no cache of today's GPUs
// holds; so a product reads its operands from global memory, as in a step.
constexpr int kMostAlgorithms = 8, kMostWhole = 4;
constexpr int64_t kTrialBytes = 64 << 20, kMostTrialBytes = 256 << 20;
constexpr float kTrialMilliseconds = 0.2;
constexpr int64_t kMostRuns = 32;
constexpr std::chrono::milliseconds kMostTime(50);  // then what was timed by now has to do
constexpr float kNoise = 1.03;

struct Chosen {
  std::mutex mutex;
  std::map<std::pair<cuda::Context, std::string>, cublas::Heuristic> algorithms;  // by form
};

std::string KeyOf(const ProductForm& form) {
  return absl::StrJoin(
      {absl::StrJoin(form.left_batch, ","), absl::StrJoin(form.right_batch, ","),
       absl::StrCat(form.type, ",", form.tf32, form.transpose_left, form.transpose_right, form.bias,
                    form.relu, ",", form.rows, ",", form.depth, ",", form.columns)},
      ";");
}

bool Same(const cublas::Algorithm& a, const cublas::Algorithm& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

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

absl::StatusOr<std::unique_ptr<GpuProduct>> GpuProduct::Make(GpuLink* link, const ProductForm& form,
                                                             const GpuTrial* trial) {
  TFMEM_ASSIGN_OR_RETURN(const cublas::Library* library, cublas::Load());
  std::unique_ptr<GpuProduct> product(new GpuProduct(*library, link, form));
  TFMEM_RETURN_IF_ERROR(product->Open(trial));
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
absl::Status GpuProduct::Open(const GpuTrial* trial) {
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
  return ChooseAlgorithm(handle, trial);
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

// The alignment that all matrices of a call have.
uint32_t GpuProduct::Alignment() const {
  if (launches_ == 1) return kAlignment;
  const int64_t sizes = form_.rows * form_.depth | form_.depth * form_.columns |
                        form_.rows * form_.columns | kAlignment / BytesOf(form_.type);
  return BytesOf(form_.type) * (sizes & -sizes);
}

absl::StatusOr<std::vector<cublas::Heuristic>> GpuProduct::Algorithms(cublas::Handle handle,
                                                                      int most,
                                                                      uint32_t reductions) const {
  std::vector<cublas::Heuristic> found(most);
  cublas::Preference preference = nullptr;
  TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulPreferenceCreate, &preference);
  const auto find = [&]() -> absl::Status {
    const auto set = [&](int name, const auto& value) {
      return cublas::Check(
          library_.cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
    };
    TFMEM_RETURN_IF_ERROR(set(cublas::kMostWorkspace, kMostWorkspace));
    TFMEM_RETURN_IF_ERROR(set(cublas::kReductions, reductions));
    for (int name :
         {cublas::kAlignmentA, cublas::kAlignmentB, cublas::kAlignmentC, cublas::kAlignmentD}) {
      TFMEM_RETURN_IF_ERROR(set(name, Alignment()));
    }
    int count = 0;
    TFMEM_CUBLAS_RETURN_IF_ERROR(library_, cublasLtMatmulAlgoGetHeuristic, handle, product_, right_,
                                 left_, result_, result_, preference, most, found.data(), &count);
    found.resize(count);
    return absl::OkStatus();
  };
  const absl::Status status = find();
  library_.cublasLtMatmulPreferenceDestroy(preference);
  if (!status.ok()) return status;
  const auto fails = [](const cublas::Heuristic& each) { return each.state != cublas::kSuccess; };
  found.erase(std::remove_if(found.begin(), found.end(), fails), found.end());
  if (!found.empty()) return found;
  return absl::UnimplementedError(absl::StrCat("cuBLASLt has no algorithm for a product of [",
                                               form_.rows, ", ", form_.depth, "] and [",
                                               form_.depth, ", ", form_.columns, "]"));
}

absl::Status GpuProduct::ChooseAlgorithm(cublas::Handle handle, const GpuTrial* trial) {
  const int most = trial == nullptr ? 1 : kMostAlgorithms;
  TFMEM_ASSIGN_OR_RETURN(const std::vector<cublas::Heuristic> expected,
                         Algorithms(handle, most, cublas::kAnyReduction));
  heuristic_ = expected.front();
  if (trial == nullptr) return absl::OkStatus();
  Chosen& all = ProcessWide<Chosen>();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto [known, is_new] =
      all.algorithms.try_emplace({link_->context(), KeyOf(form_)}, heuristic_);
  if (is_new) {
    // Algorithms that add up parts of the result in a second kernel come after those that do not.
    std::vector<cublas::Heuristic> order;
    if (auto whole = Algorithms(handle, kMostWhole, cublas::kNoReduction); whole.ok()) {
      order = *std::move(whole);
    }
    for (const cublas::Heuristic& each : expected) {
      const auto same = [&](const auto& other) { return Same(each.algorithm, other.algorithm); };
      if (std::none_of(order.begin(), order.end(), same)) order.push_back(each);
    }
    known->second = Fastest(order, *trial);
  }
  heuristic_ = known->second;
  return absl::OkStatus();
}

// The first of those that are as fast as any; `heuristic_` if that cannot be found out.
cublas::Heuristic GpuProduct::Fastest(const std::vector<cublas::Heuristic>& algorithms,
                                      const GpuTrial& trial) {
  const cublas::Heuristic expected = heuristic_;
  const auto [offsets, bytes] = Operands();
  if (bytes > kMostTrialBytes) return expected;
  const int64_t copies = std::clamp<int64_t>(kTrialBytes / bytes, 1, kMostRuns);
  uint64_t workspace = 0;
  for (const auto& each : algorithms) workspace = std::max(workspace, each.workspace_bytes);
  const int64_t total = copies * bytes + workspace + kWorkspaceAlignment;
  uint64_t address = trial.allocate(total);
  if (address == 0) return expected;
  {
    const cuda::ScopedContext current(link_->driver(), link_->context());
    if (!current.status().ok() ||
        link_->driver().cuMemsetD8Async(address, 0, total, trial.stream) != cuda::kSuccess) {
      return expected;
    }
  }
  address = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  const auto time = [&](const cublas::Heuristic& algorithm, int64_t runs) {
    heuristic_ = algorithm;
    return TimeOnGpu(link_, trial.stream, [&](cuda::Stream stream) -> absl::Status {
      for (int64_t i = 0; i < runs; ++i) {
        const uint64_t first = address + i % copies * bytes;
        TFMEM_RETURN_IF_ERROR(Enqueue(
            stream, {first + offsets[0], first + offsets[1], form_.bias ? first + offsets[2] : 0,
                     first + offsets[3], address + copies * bytes}));
      }
      return absl::OkStatus();
    });
  };
  const auto begin = std::chrono::steady_clock::now();
  const absl::StatusOr<float> once = time(expected, 1);
  if (!once.ok()) return expected;
  const int64_t runs =
      std::clamp<int64_t>(kTrialMilliseconds / std::max(*once, 1e-3f), 1, kMostRuns);
  // One that does not split a long depth may take a hundred times as long as what cuBLASLt expects
  // to be the fastest, so that the time is over: those that it expects are timed first.
  std::vector<float> timed(algorithms.size(), std::numeric_limits<float>::infinity());
  const auto first = std::find_if(algorithms.begin(), algorithms.end(), [&](const auto& each) {
    return Same(each.algorithm, expected.algorithm);
  });
  std::vector<size_t> order(algorithms.size());
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin(), order.begin() + (first - algorithms.begin()), order.end());
  for (const size_t index : order) {
    const absl::StatusOr<float> milliseconds = time(algorithms[index], runs);
    if (milliseconds.ok()) timed[index] = *milliseconds;  // else this GPU does not run it
    if (std::chrono::steady_clock::now() - begin > kMostTime) break;
  }
  const float shortest = *std::min_element(timed.begin(), timed.end());
  for (size_t i = 0; i < timed.size(); ++i) {
    if (std::isfinite(timed[i]) && timed[i] <= shortest * kNoise) return algorithms[i];
  }
  return expected;
}

std::pair<std::array<int64_t, 4>, int64_t> GpuProduct::Operands() const {
  const auto matrices = [](const std::vector<int64_t>& batch) {
    return *std::max_element(batch.begin(), batch.end()) + 1;
  };
  const int64_t numbers[4] = {
      matrices(form_.left_batch) * form_.rows * form_.depth,
      matrices(form_.right_batch) * form_.depth * form_.columns, form_.columns,
      static_cast<int64_t>(form_.left_batch.size()) * form_.rows * form_.columns};
  std::array<int64_t, 4> offsets;
  const int64_t alignment = kWorkspaceAlignment;
  int64_t end = 0;
  for (int i = 0; i < 4; ++i) {
    offsets[i] = end;
    end += (numbers[i] * BytesOf(form_.type) + alignment - 1) / alignment * alignment;
  }
  return {offsets, end};
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
