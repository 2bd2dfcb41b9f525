// A step's allocations, replayed in the order in which it makes them.

#ifndef CUSTOM_OPS_EXTENSION_REPLAY_H_
#define CUSTOM_OPS_EXTENSION_REPLAY_H_

#include "custom_ops/extension/python.h"

namespace tfmem {

PyObject* ReplayStep(PyObject* module, PyObject* args);
extern const char kReplayStep[];  // its documentation

}  // namespace tfmem

#endif  // CUSTOM_OPS_EXTENSION_REPLAY_H_
