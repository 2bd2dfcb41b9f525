// The part of cuBLASLt that is used here, declared by hand and found at run time: TensorFlow's GPU
// packages bring the library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/cuda_driver.h"

namespace tfmem::cublas {

// As in cublasLt.h of CUDA 12, whose values stay.
using Result = int;
using Handle = struct HandleRecord*;
using Product = struct ProductRecord*;  // cublasLtMatmulDesc_t
using Layout = struct LayoutRecord*;    // cublasLtMatrixLayout_t
using Preference = struct PreferenceRecord*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotInitialized = 1;
inline constexpr Result kAllocationFailed = 3;

enum Type : int { kR32F = 0, kR64F = 1, kR16F = 2, kR16BF = 14 };
enum Compute : int { k32F = 68, k64F = 70, k32FFastTF32 = 77 };
enum ProductAttribute : int { kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8 };
enum LayoutAttribute : int { kBatchCount = 5, kBatchOffset = 6 };
enum PreferenceAttribute : int {
  kMostWorkspace = 1,
  kReductions = 3,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8
};
// How parts of a product that is split along its depth are added up.
inline constexpr uint32_t kNoReduction = 0, kAnyReduction = 7;
enum Epilogue : uint32_t { kNoEpilogue = 1, kBias = 4, kReluBias = 6 };

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Result state;
  float waves;
  int reserved[4];
};

// X(name, arguments): `name` is both the field and the symbol.
#define TFMEM_CUBLAS_LT_FUNCTIONS(X)                                                              \
  X(cublasLtCreate, (Handle * handle))                                                            \
  X(cublasLtMatmulDescCreate, (Product * product, int compute, int scale))                        \
  X(cublasLtMatmulDescDestroy, (Product product))                                                 \
  X(cublasLtMatmulDescSetAttribute, (Product product, int name, const void* value, size_t bytes)) \
  X(cublasLtMatrixLayoutCreate,                                                                   \
    (Layout * layout, int type, uint64_t rows, uint64_t columns, int64_t leading))                \
  X(cublasLtMatrixLayoutDestroy, (Layout layout))                                                 \
  X(cublasLtMatrixLayoutSetAttribute, (Layout layout, int name, const void* value, size_t bytes)) \
  X(cublasLtMatmulPreferenceCreate, (Preference * preference))                                    \
  X(cublasLtMatmulPreferenceDestroy, (Preference preference))                                     \
  X(cublasLtMatmulPreferenceSetAttribute,                                                         \
    (Preference preference, int name, const void* value, size_t bytes))                           \
  X(cublasLtMatmulAlgoGetHeuristic,                                                               \
    (Handle handle, Product product, Layout a, Layout b, Layout c, Layout d,                      \
     Preference preference, int most, Heuristic* found, int* count))                              \
  X(cublasLtMatmul,                                                                               \
    (Handle handle, Product product, const void* alpha, const void* a, Layout a_layout,           \
     const void* b, Layout b_layout, const void* beta, const void* c, Layout c_layout, void* d,   \
     Layout d_layout, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,        \
     cuda::Stream stream))

struct Library {
#define TFMEM_DECLARE(name, arguments) Result(*name) arguments = nullptr;
  TFMEM_CUBLAS_LT_FUNCTIONS(TFMEM_DECLARE)
#undef TFMEM_DECLARE
};

// Opens cuBLASLt, the one that the process has if it has one, else TensorFlow's, else the system's.
// Unavailable with the loader's words if there is none.
absl::StatusOr<const Library*> Load();

// OK, or what went wrong in `call`; ResourceExhausted when out of memory.
absl::Status Check(Result result, const char* call);

#define TFMEM_CUBLAS_RETURN_IF_ERROR(library, function, ...) \
  TFMEM_RETURN_IF_ERROR(::tfmem::cublas::Check((library).function(__VA_ARGS__), #function))

}  // namespace tfmem::cublas
