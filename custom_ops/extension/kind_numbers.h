// Recorded graphs as integers, by the numbers of the kinds that their ops are.

#ifndef CUSTOM_OPS_EXTENSION_KIND_NUMBERS_H_
#define CUSTOM_OPS_EXTENSION_KIND_NUMBERS_H_

#include "custom_ops/extension/python.h"

namespace tfmem {

extern PyType_Spec kind_numbers_spec;

}  // namespace tfmem

#endif  // CUSTOM_OPS_EXTENSION_KIND_NUMBERS_H_
