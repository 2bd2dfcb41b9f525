// Nodes that Python makes one by one, and graphs of them as integers.

#pragma once

#include "custom_ops/extension/python.h"

namespace tfmem {

PyObject* FlattenNodes(PyObject* module, PyObject* args);
PyObject* NodeMaker(PyObject* module, PyObject* args);

extern const char kFlattenNodes[];  // their documentation
extern const char kNodeMaker[];

}  // namespace tfmem
