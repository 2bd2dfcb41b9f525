// How fast the links between GPUs and the host are.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace tfmem {

// Bytes per second; `both_*` is each direction while the other one is busy, too.
struct LinkBandwidth {
  double to_host;
  double to_device;
  double both_to_host;
  double both_to_device;
};

// Bytes per second of one of several links, each direction while all others are busy.
struct BusyBandwidth {
  double to_host;
  double to_device;
};

// Copies `bytes` bytes a few times on GPU `ordinal`, outside of TensorFlow. Blocks.
absl::StatusOr<LinkBandwidth> MeasureLinkBandwidth(int ordinal, size_t bytes);

// Copies `bytes` bytes a few times on each of these GPUs, in both directions and on all of them at
// once: they may share a switch, or the host's memory. Blocks.
absl::StatusOr<std::vector<BusyBandwidth>> MeasureLinksTogether(absl::Span<const int> ordinals,
                                                                size_t bytes);

}  // namespace tfmem
