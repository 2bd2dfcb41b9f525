// What loops and threads cost on a CPU, as custom_ops/devices/cpu.json says.
#pragma once

#include "custom_ops/generated/elementwise_ops.h"

namespace tfmem::cpu_costs {

#define TFMEM_COST(name, value) inline constexpr double name = value;
TFMEM_CPU_COSTS(TFMEM_COST)
#undef TFMEM_COST

}  // namespace tfmem::cpu_costs
