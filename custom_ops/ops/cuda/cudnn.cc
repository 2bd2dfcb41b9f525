#include "custom_ops/ops/cuda/cudnn.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/gpu_library.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem::cudnn {
namespace {

constexpr const char* kNames[] = {"libcudnn.so.9"};
constexpr const char* kFolders[] = {"nvidia/cudnn/lib"};

absl::StatusOr<const Library*> Find() {
  TFMEM_ASSIGN_OR_RETURN(GpuLibrary opened, GpuLibrary::Open("cuDNN", kNames, kFolders));
  auto library = std::make_unique<Library>();
#define TFMEM_FIND(name, arguments) opened.Find(#name, &library->name);
  TFMEM_CUDNN_FUNCTIONS(TFMEM_FIND)
#undef TFMEM_FIND
  TFMEM_RETURN_IF_ERROR(opened.HasAll("install cuDNN 9"));
  return library.release();  // lives as long as the process
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
