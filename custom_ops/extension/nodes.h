// Graphs of nodes that Python made, as integers.

#ifndef CUSTOM_OPS_EXTENSION_NODES_H_
#define CUSTOM_OPS_EXTENSION_NODES_H_

#include "custom_ops/extension/python.h"

namespace tfmem {

PyObject* FlattenNodes(PyObject* module, PyObject* args);

extern const char kFlattenNodes[];  // its documentation

}  // namespace tfmem

#endif  // CUSTOM_OPS_EXTENSION_NODES_H_
