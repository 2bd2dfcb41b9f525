// What an op is given, read by the roles of its parameters.

#pragma once

#include <array>
#include <vector>

#include "custom_ops/extension/inline_vector.h"
#include "custom_ops/extension/memo.h"
#include "custom_ops/extension/python.h"
#include "custom_ops/extension/state.h"

namespace tfmem {

enum class Role { kValue, kVector, kValues, kVariable, kInteger, kNumber, kSizes, kOperands };

constexpr Py_ssize_t kMostParameters = 4;

struct Parameters {
  Py_ssize_t count = 0;
  std::array<Role, kMostParameters> roles;

  bool AreOperands() const { return count == 1 && roles[0] == Role::kOperands; }
};

// False with an error set.
bool ReadParameters(PyObject* names, PyObject* roles, Parameters* parameters);

// References are borrowed from the arguments, or from `held`.
struct Arguments {
  Key key;
  InlineVector<PyObject*, 4> values;
  InlineVector<PyObject*, 2> variables;
  InlineVector<PyObject*, 2> integers;
  Reference held;
};

enum class Form {
  kPlain,   // vectors that are recorded, variables, and Python's own numbers
  kOdd,     // something else, which may become plain
  kPython,  // for Python: of a node kind, or wrong
  kError,   // an error is set
};

Form Read(const State* state, const Parameters& parameters, PyObject* const* args, Py_ssize_t count,
          Arguments* given);

struct Converted {
  InlineVector<PyObject*, 4> args;
  InlineVector<PyObject*, 4> for_python;  // the same, but for numbers, which are as they were given
  std::vector<Reference> made;            // what the others have references of
};

// Makes arguments plain as Python would: a number that stands for a vector is recorded, others
// become Python's own. Never kOdd; where kPython, nothing was done.
Form Convert(const State* state, const Parameters& parameters, PyObject* const* args,
             Py_ssize_t count, Converted* converted);

}  // namespace tfmem
