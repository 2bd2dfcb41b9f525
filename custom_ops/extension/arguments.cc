#include "custom_ops/extension/arguments.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "custom_ops/extension/expression.h"
#include "custom_ops/extension/recorded_op.h"

namespace tfmem {
namespace {

constexpr int64_t kOneSize = -1;  // in keys, where else the number of sizes is
constexpr int64_t kNoSize = -2;

Role RoleOf(const Parameters& parameters, Py_ssize_t i) {
  return parameters.AreOperands() ? Role::kValue : parameters.roles[i];
}

Form ReadValue(const State* state, PyObject* value, Arguments* given) {
  if (!IsExpression(state, value)) return Form::kOdd;
  const auto* expression = reinterpret_cast<Expression*>(value);
  if (expression->recorder != nullptr) return Form::kPython;
  given->key.push_back(expression->width);
  given->values.push_back(value);
  return Form::kPlain;
}

// A list or tuple, whose items are borrowed for as long as nothing but this is done.
Py_ssize_t CountOf(PyObject* sequence) {
  if (PyTuple_Check(sequence)) return PyTuple_Size(sequence);
  return PyList_Check(sequence) ? PyList_Size(sequence) : -1;
}

PyObject* ItemOf(PyObject* sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GetItem(sequence, i) : PyList_GetItem(sequence, i);
}

Form ReadValues(const State* state, PyObject* values, Arguments* given) {
  const Py_ssize_t count = CountOf(values);
  if (count < 0) return Form::kPython;
  if (PyList_Check(values)) {  // which another thread may change meanwhile
    given->held = Reference(PyList_AsTuple(values));
    if (!given->held) return Form::kError;
    values = given->held.get();
  }
  given->key.push_back(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Form form = ReadValue(state, ItemOf(values, i), given);
    if (form != Form::kPlain) return form;
  }
  return Form::kPlain;
}

Form ReadNumber(PyObject* number, Arguments* given) {
  double value;
  if (PyFloat_CheckExact(number)) {
    value = PyFloat_AsDouble(number);
  } else if (PyLong_CheckExact(number)) {
    value = PyLong_AsDouble(number);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return Form::kPython;
    }
  } else {
    return Form::kOdd;
  }
  if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
  int64_t bits;  // 0 and -0 are equal, and NaN is not
  std::memcpy(&bits, &value, sizeof(bits));
  given->key.push_back(bits);
  return Form::kPlain;
}

Form ReadSize(PyObject* size, Arguments* given) {
  if (!PyLong_CheckExact(size)) return Form::kPython;
  int overflow = 0;
  given->key.push_back(PyLong_AsLongLongAndOverflow(size, &overflow));
  return overflow ? Form::kPython : Form::kPlain;
}

Form ReadSizes(PyObject* sizes, Arguments* given) {
  const Py_ssize_t count = CountOf(sizes);
  given->key.push_back(count < 0 ? kOneSize : count);
  if (count < 0) return ReadSize(sizes, given);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (ReadSize(ItemOf(sizes, i), given) != Form::kPlain) return Form::kPython;
  }
  return Form::kPlain;
}

Form ReadOne(const State* state, Role role, PyObject* arg, Arguments* given) {
  switch (role) {
    case Role::kValue:
    case Role::kOperands:
      return ReadValue(state, arg, given);
    case Role::kVector:
      return IsExpression(state, arg) ? ReadValue(state, arg, given) : Form::kPython;
    case Role::kValues:
      return ReadValues(state, arg, given);
    case Role::kVariable:
      given->key.push_back(reinterpret_cast<intptr_t>(arg));
      given->variables.push_back(arg);
      return Form::kPlain;
    case Role::kInteger:
      if (!PyLong_CheckExact(arg)) return Form::kOdd;
      given->integers.push_back(arg);
      return Form::kPlain;
    case Role::kNumber:
      return ReadNumber(arg, given);
    case Role::kSizes:
      return ReadSizes(arg, given);
  }
  return Form::kPython;
}

// Whether something that is no expression belongs to a node kind, as its integer arguments do: 1,
// 0, or -1 with an error set.
int HasRecorder(PyObject* object) {
  if (PyFloat_CheckExact(object) || PyLong_CheckExact(object)) return 0;
  const Reference recorder(PyObject_GetAttrString(object, "recorder"));
  if (recorder) return recorder.get() != Py_None;
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
  PyErr_Clear();
  return 0;
}

int BelongsToKind(const State* state, Role role, PyObject* arg) {
  if (role == Role::kValues) {
    const Reference values(PySequence_Tuple(arg));
    int found = values ? 0 : -1;
    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_Size(values.get()); ++i) {
      found = BelongsToKind(state, Role::kValue, PyTuple_GetItem(values.get(), i));
    }
    return found;
  }
  if (role != Role::kValue && role != Role::kVector && role != Role::kInteger) return 0;
  if (!IsExpression(state, arg)) return HasRecorder(arg);
  return reinterpret_cast<Expression*>(arg)->recorder != nullptr;
}

// A number as a recorded vector.
Reference Recorded(const State* state, PyObject* number) {
  if (IsExpression(state, number)) return Reference::To(number);
  const Reference constant = Reference::To(state->operators[kConstant]);
  if (!constant) {
    PyErr_SetString(PyExc_RuntimeError, "numbers cannot be recorded before use_operators");
    return Reference();
  }
  return Reference(CallRecordedOp(constant.get(), &number, 1));
}

// An integer; what is none, such as a float, as it is given, for Python to refuse. TensorFlow's
// tensors of floats have no attribute for it.
Reference IndexOf(PyObject* object) {
  Reference index(PyNumber_Index(object));
  const bool refused = PyErr_Occurred() && (PyErr_ExceptionMatches(PyExc_TypeError) ||
                                            PyErr_ExceptionMatches(PyExc_AttributeError));
  if (!refused) return index;
  PyErr_Clear();
  return Reference::To(object);
}

Reference ConvertOne(const State* state, Role role, PyObject* arg) {
  switch (role) {
    case Role::kValue:
    case Role::kOperands:
      return Recorded(state, arg);
    case Role::kValues: {
      Reference list(PySequence_List(arg));
      for (Py_ssize_t i = 0; list && i < PyList_Size(list.get()); ++i) {
        Reference value = Recorded(state, PyList_GetItem(list.get(), i));
        if (!value) return value;
        PyList_SetItem(list.get(), i, value.release());
      }
      return list;
    }
    case Role::kInteger:
      return IndexOf(arg);
    case Role::kNumber:
      if (!PyFloat_CheckExact(arg) && PyNumber_Check(arg)) return Reference(PyNumber_Float(arg));
      return Reference::To(arg);
    default:
      return Reference::To(arg);
  }
}

}  // namespace

bool ReadParameters(PyObject* names, PyObject* roles, Parameters* parameters) {
  static constexpr const char* words[] = {"value",   "vector", "values", "variable",
                                          "integer", "number", "sizes",  "operands"};
  parameters->count = PyTuple_Size(roles);
  if (parameters->count != PyTuple_Size(names) || parameters->count > kMostParameters) {
    PyErr_Format(PyExc_ValueError,
                 "%zd roles of %zd parameters; expected one for each of up to %zd",
                 parameters->count, PyTuple_Size(names), kMostParameters);
    return false;
  }
  for (Py_ssize_t i = 0; i < parameters->count; ++i) {
    PyObject *role = PyTuple_GetItem(roles, i), *name = PyTuple_GetItem(names, i);
    size_t number = 0;
    while (number < std::size(words) && PyUnicode_Check(role) &&
           PyUnicode_CompareWithASCIIString(role, words[number])) {
      ++number;
    }
    if (number == std::size(words) || !PyUnicode_Check(role) || !PyUnicode_Check(name)) {
      PyErr_Format(PyExc_ValueError, "there is no role %R of a parameter %R", role, name);
      return false;
    }
    parameters->roles[i] = static_cast<Role>(number);
  }
  return true;
}

Form Read(const State* state, const Parameters& parameters, PyObject* const* args, Py_ssize_t count,
          Arguments* given) {
  if (parameters.AreOperands()) {
    given->key.push_back(count);
  } else if (count != parameters.count) {
    // Only the last parameter may be left out, and Python knows its default.
    if (count != parameters.count - 1 || parameters.roles[count] != Role::kSizes) {
      return Form::kPython;
    }
    given->key.push_back(kNoSize);
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Form form = ReadOne(state, RoleOf(parameters, i), args[i], given);
    if (form != Form::kPlain) return form;
  }
  return Form::kPlain;
}

Form Convert(const State* state, const Parameters& parameters, PyObject* const* args,
             Py_ssize_t count, Converted* converted) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int found = BelongsToKind(state, RoleOf(parameters, i), args[i]);
    if (found != 0) return found < 0 ? Form::kError : Form::kPython;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    Reference made = ConvertOne(state, RoleOf(parameters, i), args[i]);
    if (!made) return Form::kError;
    const Role role = RoleOf(parameters, i);
    const bool is_number = role == Role::kInteger || role == Role::kNumber;
    converted->args.push_back(made.get());
    converted->for_python.push_back(is_number ? args[i] : made.get());
    converted->made.push_back(std::move(made));
  }
  return Form::kPlain;
}

}  // namespace tfmem
