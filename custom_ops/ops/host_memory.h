// How much memory the host can still give.
#ifndef TFMEM_CUSTOM_OPS_OPS_HOST_MEMORY_H_
#define TFMEM_CUSTOM_OPS_OPS_HOST_MEMORY_H_

#include <cstdint>

namespace tfmem {

// Bytes that can be allocated without swapping, within the machine and the control group;
// INT64_MAX where the system does not say.
int64_t AvailableHostBytes();

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_HOST_MEMORY_H_
