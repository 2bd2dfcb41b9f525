#include "custom_ops/ops/cuda/gpu_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace tfmem {
namespace {

// Where pip puts packages: beside TensorFlow, of whose library `absl::Status` is a part.
std::string PackagesFolder() {
  Dl_info info;
  if (::dladdr(reinterpret_cast<void*>(&absl::StatusCodeToString), &info) == 0) return "";
  const std::string library = info.dli_fname;
  const size_t folder = library.rfind('/');
  if (folder == std::string::npos) return "";
  return library.substr(0, folder) + "/..";
}

void* OpenAt(const std::string& place, std::string* words) {
  void* library = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) *words = ::dlerror();
  return library;
}

void* OpenAny(absl::Span<const char* const> names, absl::Span<const char* const> folders,
              std::string* words) {
  for (const char* name : names) {
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return library;
  }
  const std::string packages = PackagesFolder();
  for (const char* name : names) {
    for (const char* folder : folders) {
      const std::string place = absl::StrCat(packages, "/", folder, "/", name);
      if (void* library = OpenAt(place, words)) return library;
    }
    if (void* library = OpenAt(name, words)) return library;
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<GpuLibrary> GpuLibrary::Open(absl::string_view title,
                                            absl::Span<const char* const> names,
                                            absl::Span<const char* const> folders) {
  std::string words;
  void* opened = OpenAny(names, folders, &words);
  if (opened != nullptr) return GpuLibrary(title, opened);
  return absl::UnavailableError(
      absl::StrCat("cannot open ", title, " (", words,
                   "); install it with `pip install tensorflow[and-cuda]`, or run on CPU"));
}

absl::Status GpuLibrary::HasAll(absl::string_view cure) const {
  if (missing_.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(title_, " lacks", missing_, "; ", cure));
}

void* GpuLibrary::Symbol(const char* name) {
  void* found = ::dlsym(opened_, name);
  if (found == nullptr) absl::StrAppend(&missing_, " ", name);
  return found;
}

}  // namespace tfmem
