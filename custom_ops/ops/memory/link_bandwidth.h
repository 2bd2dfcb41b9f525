// How fast a GPU's link to the host is.
#ifndef TFMEM_CUSTOM_OPS_OPS_MEMORY_LINK_BANDWIDTH_H_
#define TFMEM_CUSTOM_OPS_OPS_MEMORY_LINK_BANDWIDTH_H_

#include <cstddef>

#include "absl/status/statusor.h"

namespace tfmem {

// Bytes per second; `both_*` is each direction while the other one is busy, too.
struct LinkBandwidth {
  double to_host;
  double to_device;
  double both_to_host;
  double both_to_device;
};

// Copies `bytes` bytes a few times on GPU `ordinal`, outside of TensorFlow. Blocks.
absl::StatusOr<LinkBandwidth> MeasureLinkBandwidth(int ordinal, size_t bytes);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_MEMORY_LINK_BANDWIDTH_H_
