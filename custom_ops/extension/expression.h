// Expressions: vectors of some width, in the code of a node kind or in a recorded graph.

#pragma once

#include <cstdint>

#include "custom_ops/extension/python.h"
#include "custom_ops/extension/state.h"

namespace tfmem {

// Nothing is written once an expression is made, but for where a traversal met it.
struct Expression {
  PyVarObject ob_base;  // as many items as there were at first
  Py_ssize_t width;
  Py_ssize_t place;
  PyObject* recorder;  // or null
  PyObject* measured;  // or null
  PyObject* integers;  // a tuple, or null for none
  int32_t values;      // so many items are values; the others are variables
  int32_t variables;
  int32_t position;  // in the traversal that met it last
  union {
    uint64_t traversal;  // its number
    Expression* next;    // of those that are being deallocated
  };
  PyObject* items[1];
};

// Python's garbage collector follows expressions of node kinds, which have a recorder, and not
// those that are recorded. These come by the hundred for each tree, so that it would run all the
// time, for longer than all else takes; and only an attribute of a variable could lead back to one.
extern PyType_Spec expression_spec, kind_expression_spec;

inline bool IsExpression(const State* state, PyObject* object) {
  return Py_TYPE(object) == state->expression ||
         PyType_IsSubtype(Py_TYPE(object), state->expression);
}

// A recorded one, of borrowed references; `integers` may be null.
PyObject* NewRecorded(const State* state, Py_ssize_t width, PyObject* measured,
                      PyObject* const* values, Py_ssize_t value_count, PyObject* const* variables,
                      Py_ssize_t variable_count, PyObject* integers);

}  // namespace tfmem
