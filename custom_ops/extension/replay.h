// A step's allocations, replayed in the order in which it makes them.

#pragma once

#include "custom_ops/extension/python.h"

namespace tfmem {

PyObject* ReplayStep(PyObject* module, PyObject* args);
extern const char kReplayStep[];  // its documentation

}  // namespace tfmem
