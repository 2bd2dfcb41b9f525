// Ops that are recorded: Python functions, whose results for vectors that are like earlier ones are
// made here.

#pragma once

#include "custom_ops/extension/python.h"

namespace tfmem {

extern PyType_Spec recorded_op_spec;

// What a RecordedOp gives for positional arguments.
PyObject* CallRecordedOp(PyObject* op, PyObject* const* args, Py_ssize_t count);

}  // namespace tfmem
