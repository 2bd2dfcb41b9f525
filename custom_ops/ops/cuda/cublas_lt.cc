#include "custom_ops/ops/cuda/cublas_lt.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/gpu_library.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem::cublas {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr const char* kFolders[] = {"nvidia/cublas/lib", "nvidia/cu13/lib"};

absl::StatusOr<const Library*> Find() {
  TFMEM_ASSIGN_OR_RETURN(GpuLibrary opened, GpuLibrary::Open("cuBLASLt", kNames, kFolders));
  auto library = std::make_unique<Library>();
#define TFMEM_FIND(name, arguments) opened.Find(#name, &library->name);
  TFMEM_CUBLAS_LT_FUNCTIONS(TFMEM_FIND)
#undef TFMEM_FIND
  TFMEM_RETURN_IF_ERROR(opened.HasAll("install that of CUDA 12 or later"));
  return library.release();  // lives as long as the process
}

}  // namespace

absl::StatusOr<const Library*> Load() {
  static const auto* library = new absl::StatusOr<const Library*>(Find());
  return *library;
}

absl::Status Check(Result result, const char* call) {
  if (result == kSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(call, " failed: cuBLAS status ", result);
  // Its handle is made in device memory, and it says no more than that it could not be made.
  if (result == kAllocationFailed || result == kNotInitialized) {
    return absl::ResourceExhaustedError(absl::StrCat(message, ", out of memory"));
  }
  return absl::InternalError(message);
}

}  // namespace tfmem::cublas
