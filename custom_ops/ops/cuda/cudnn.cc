#include "custom_ops/ops/cuda/cudnn.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/gpu_library.h"

namespace tfmem::cudnn {
namespace {

constexpr const char* kNames[] = {"libcudnn.so.9"};
constexpr const char* kFolders[] = {"nvidia/cudnn/lib"};

absl::StatusOr<const Library*> Find() {
  std::string words;
  void* opened = OpenGpuLibrary(kNames, kFolders, &words);
  if (opened == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot open cuDNN (", words,
                     "); install it with `pip install tensorflow[and-cuda]`, or run on CPU"));
  }
  auto* library = new Library;  // lives as long as the process
  std::string missing;
#define TFMEM_FIND(name, arguments)                                                  \
  library->name = reinterpret_cast<decltype(library->name)>(::dlsym(opened, #name)); \
  if (library->name == nullptr) absl::StrAppend(&missing, " ", #name);
  TFMEM_CUDNN_FUNCTIONS(TFMEM_FIND)
#undef TFMEM_FIND
  if (missing.empty()) return library;
  return absl::UnavailableError(absl::StrCat("cuDNN lacks", missing, "; install cuDNN 9"));
}

}  // namespace

absl::StatusOr<const Library*> Load() {
  static const auto* library = new absl::StatusOr<const Library*>(Find());
  return *library;
}

absl::Status Check(Result result, const char* call) {
  if (result == kSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(call, " failed: cuDNN status ", result);
  // Its handle is made in device memory, and it says no more than that it could not be made.
  if (result == kNotInitialized || result == kHostAllocationFailed ||
      result == kDeviceAllocationFailed) {
    return absl::ResourceExhaustedError(absl::StrCat(message, ", out of memory"));
  }
  return absl::InternalError(message);
}

}  // namespace tfmem::cudnn
