// Nodes that Python makes one by one, and graphs of them as integers.

#pragma once

#include "custom_ops/extension/python.h"

namespace tfmem {

PyObject* FlattenNodes(PyObject* module, PyObject* args);
PyObject* MakeNode(PyObject* module, PyObject* const* args, Py_ssize_t count);

extern const char kFlattenNodes[];  // their documentation
extern const char kMakeNode[];

}  // namespace tfmem
