// What belongs to the module: its types, and the ops behind the operators of expressions.

#pragma once

#include <cstdint>

#include "custom_ops/extension/python.h"

namespace tfmem {

enum Operator { kConstant, kAdd, kSubtract, kMultiply, kDivide, kNegate, kOperators };

struct State {
  PyTypeObject* expression;
  PyTypeObject* kind_expression;  // derived from it
  PyTypeObject* recorded_op;
  PyTypeObject* kind_numbers;
  PyObject* operators[kOperators];  // each a RecordedOp, or null before `use_operators`
  uint64_t traversals;              // of graphs, so far
};

extern PyModuleDef module_definition;

// The state of the module whose type, or whose type's base, `type` is; null for all others, without
// an error.
State* StateOf(PyTypeObject* type);

}  // namespace tfmem
