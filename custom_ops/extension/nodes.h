// Nodes that Python makes one by one, and graphs of them as integers.

#ifndef CUSTOM_OPS_EXTENSION_NODES_H_
#define CUSTOM_OPS_EXTENSION_NODES_H_

#include "custom_ops/extension/python.h"

namespace tfmem {

PyObject* FlattenNodes(PyObject* module, PyObject* args);
PyObject* MakeNode(PyObject* module, PyObject* const* args, Py_ssize_t count);

extern const char kFlattenNodes[];  // their documentation
extern const char kMakeNode[];

}  // namespace tfmem

#endif  // CUSTOM_OPS_EXTENSION_NODES_H_
