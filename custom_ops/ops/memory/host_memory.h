// How much memory the host has for this process, and how much of it is left.
#pragma once

#include <cstdint>
#include <string>

namespace tfmem {

// Within the machine and the control groups that the process is in (version 1 or 2, with all that
// are above them); INT64_MAX where the system does not say.
struct HostMemory {
  int64_t available;  // bytes that can be allocated without swapping
  int64_t limit;      // bytes that there are at all
};

// `root` is where the system's files lie, "" but for tests.
HostMemory ReadHostMemory(const std::string& root = "");

}  // namespace tfmem
