// NVIDIA's libraries, found at run time: TensorFlow's GPU packages bring them.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tfmem {

// A library that stays open as long as the process lives, and what was looked for and is not there.
class GpuLibrary {
 public:
  // Opens the first of `names` that there is: the one that the process has, else one in a folder of
  // TensorFlow's packages, `folders`, else the system's. Unavailable, with the loader's words, if
  // none is there.
  static absl::StatusOr<GpuLibrary> Open(absl::string_view title,
                                         absl::Span<const char* const> names,
                                         absl::Span<const char* const> folders);

  // Sets `function` to the one of this name; to null if there is none.
  template <typename Function>
  void Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(Symbol(name));
  }

  // Unavailable if a function was not there; `cure` says what to do.
  absl::Status HasAll(absl::string_view cure) const;

 private:
  GpuLibrary(absl::string_view title, void* opened) : title_(title), opened_(opened) {}
  void* Symbol(const char* name);

  std::string title_;
  void* opened_;
  std::string missing_;
};

}  // namespace tfmem
