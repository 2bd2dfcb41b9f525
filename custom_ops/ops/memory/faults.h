// Faults on demand, so that tests can see what a failing copy does to a step.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace tfmem {

enum class Fault { kCopyOut = 0, kCopyIn = 1, kAllocate = 2 };
inline constexpr int kFaultKinds = 3;

// The next `after` calls of CheckFault(kind) succeed and the `times` calls after those fail;
// `times` = 0 disarms.
void InjectFault(Fault kind, int64_t after, int64_t times);

// OK unless a fault is due. `label` is the tensor's name, for the message.
absl::Status CheckFault(Fault kind, const std::string& label);

}  // namespace tfmem
