#include "custom_ops/ops/cuda/cuda_driver.h"

#include <dlfcn.h>

#include <iostream>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"

namespace tfmem::cuda {
namespace {

absl::StatusOr<const Driver*> Open() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot open the CUDA driver (", ::dlerror(),
                                               "); install an NVIDIA driver, or run on CPU"));
  }
  auto* driver = new Driver;  // lives as long as the process
  std::string missing;
#define TFMEM_FIND(name, arguments)                                                 \
  driver->name = reinterpret_cast<decltype(driver->name)>(::dlsym(library, #name)); \
  if (driver->name == nullptr) absl::StrAppend(&missing, " ", #name);
  TFMEM_CUDA_FUNCTIONS(TFMEM_FIND)
#undef TFMEM_FIND
  if (!missing.empty()) {
    return absl::UnavailableError(
        absl::StrCat("the CUDA driver lacks", missing, "; install a driver for CUDA 12 or later"));
  }
  const Result result = driver->cuInit(0);
  if (result != kSuccess) {
    return absl::UnavailableError(absl::StrCat("cuInit failed with CUDA error ", result));
  }
  return driver;
}

}  // namespace

absl::StatusOr<const Driver*> LoadDriver() {
  static const auto* driver = new absl::StatusOr<const Driver*>(Open());
  return *driver;
}

absl::Status Check(Result result, const char* call) {
  if (result == kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (absl::StatusOr<const Driver*> driver = LoadDriver(); driver.ok()) {
    (*driver)->cuGetErrorName(result, &name);
    (*driver)->cuGetErrorString(result, &text);
  }
  std::string message = absl::StrCat(call, " failed: ", name ? name : absl::StrCat(result).c_str(),
                                     ", ", text ? text : "unknown error");
  if (result == kErrorOutOfMemory) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

void ReportLostError(const absl::Status& status) {
  if (status.ok()) return;
  ++counters().driver_errors;
  std::cerr << "tfmem: while cleaning up: " << status << std::endl;
}

}  // namespace tfmem::cuda
