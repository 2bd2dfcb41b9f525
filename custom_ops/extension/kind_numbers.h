// Recorded graphs as integers, by the numbers of the kinds that their ops are.

#pragma once

#include "custom_ops/extension/python.h"

namespace tfmem {

extern PyType_Spec kind_numbers_spec;

}  // namespace tfmem
