// SHA-256 (FIPS 180-4), which TensorFlow's library does not give out.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace tfmem {

// 64 characters, lower case, as Python's hashlib writes it.
std::string Sha256(absl::string_view bytes);

}  // namespace tfmem
