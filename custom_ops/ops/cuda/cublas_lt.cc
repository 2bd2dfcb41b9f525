#include "custom_ops/ops/cuda/cublas_lt.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/gpu_library.h"

namespace tfmem::cublas {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr const char* kFolders[] = {"nvidia/cublas/lib", "nvidia/cu13/lib"};

absl::StatusOr<const Library*> Find() {
  std::string words;
  void* opened = OpenGpuLibrary(kNames, kFolders, &words);
  if (opened == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot open cuBLASLt (", words,
                     "); install it with `pip install tensorflow[and-cuda]`, or run on CPU"));
  }
  auto* library = new Library;  // lives as long as the process
  std::string missing;
#define TFMEM_FIND(name, arguments)                                                  \
  library->name = reinterpret_cast<decltype(library->name)>(::dlsym(opened, #name)); \
  if (library->name == nullptr) absl::StrAppend(&missing, " ", #name);
  TFMEM_CUBLAS_LT_FUNCTIONS(TFMEM_FIND)
#undef TFMEM_FIND
  if (missing.empty()) return library;
  return absl::UnavailableError(
      absl::StrCat("cuBLASLt lacks", missing, "; install that of CUDA 12 or later"));
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
