// What loops and threads cost on a CPU, as custom_ops/devices/cpu.json says.
#ifndef TFMEM_CUSTOM_OPS_OPS_CPU_COSTS_H_
#define TFMEM_CUSTOM_OPS_OPS_CPU_COSTS_H_

#include "custom_ops/generated/elementwise_ops.h"

namespace tfmem::cpu_costs {

#define TFMEM_COST(name, value) inline constexpr double name = value;
TFMEM_CPU_COSTS(TFMEM_COST)
#undef TFMEM_COST

}  // namespace tfmem::cpu_costs

#endif  // TFMEM_CUSTOM_OPS_OPS_CPU_COSTS_H_
