// NVIDIA's libraries, found at run time: TensorFlow's GPU packages bring them.
#pragma once

#include <string>

#include "absl/types/span.h"

namespace tfmem {

// Opens the first of `names` that there is: the one that the process has, else one in a folder of
// TensorFlow's packages, `folders`, else the system's. Null with the loader's words if none is
// there.
void* OpenGpuLibrary(absl::Span<const char* const> names, absl::Span<const char* const> folders,
                     std::string* words);

}  // namespace tfmem
