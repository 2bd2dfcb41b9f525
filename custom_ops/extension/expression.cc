#include "custom_ops/extension/expression.h"

#include <cstddef>
#include <limits>

#include "custom_ops/extension/recorded_op.h"

namespace tfmem {
namespace {

Expression* As(PyObject* object) { return reinterpret_cast<Expression*>(object); }

void Dealloc(PyObject* object);

// Gives back what an expression holds. Values that have no other reference and whose type is
// `exact` go to `dying` instead.
void Release(Expression* self, PyTypeObject* exact, Expression** dying) {
  const int32_t values = self->values, variables = self->variables;
  self->values = self->variables = 0;
  Py_CLEAR(self->recorder);
  Py_CLEAR(self->measured);
  Py_CLEAR(self->integers);
  for (int32_t i = 0; i < values + variables; ++i) {
    PyObject* item = std::exchange(self->items[i], nullptr);
    if (i < values && Py_TYPE(item) == exact && Py_REFCNT(item) == 1) {
      As(item)->next = *dying;
      *dying = As(item);
    } else {
      Py_DECREF(item);
    }
  }
}

// Graphs may be long chains, so values die in a loop: the stack would not take a call for each.
void Dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  const bool exact = PyType_GetSlot(type, Py_tp_dealloc) == reinterpret_cast<void*>(&Dealloc);
  const auto release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  Expression* dying = nullptr;
  Release(As(object), exact ? type : nullptr, &dying);
  release(object);
  while (dying != nullptr) {
    Expression* current = dying;
    dying = current->next;
    Release(current, type, &dying);
    release(current);
    Py_DECREF(type);
  }
  Py_DECREF(type);
}

void DeallocOfKind(PyObject* object) {
  PyObject_GC_UnTrack(object);
  Dealloc(object);
}

int Traverse(PyObject* object, visitproc visit, void* arg) {
  Expression* self = As(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->recorder);
  Py_VISIT(self->measured);
  Py_VISIT(self->integers);
  for (int32_t i = 0; i < self->values + self->variables; ++i) Py_VISIT(self->items[i]);
  return 0;
}

int Clear(PyObject* object) {
  Release(As(object), nullptr, nullptr);
  return 0;
}

PyObject* OrNull(PyObject* given) { return given == Py_None ? nullptr : given; }

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"width",     "recorder", "place",    "measured",
                                "variables", "values",   "integers", nullptr};
  Py_ssize_t width, place = -1;
  PyObject *recorder = nullptr, *measured = nullptr, *variables = nullptr, *values = nullptr;
  PyObject* integers = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "n|OnOOOO:Expression", const_cast<char**>(names),
                                   &width, &recorder, &place, &measured, &variables, &values,
                                   &integers)) {
    return nullptr;
  }
  const auto tuple = [](PyObject* given) {
    return Reference(given == nullptr ? PyTuple_New(0) : PySequence_Tuple(given));
  };
  const Reference value_tuple = tuple(values), variable_tuple = tuple(variables);
  Reference integer_tuple = tuple(integers);
  if (!value_tuple || !variable_tuple || !integer_tuple) return nullptr;
  const Py_ssize_t value_count = PyTuple_Size(value_tuple.get());
  const Py_ssize_t variable_count = PyTuple_Size(variable_tuple.get());
  if (value_count + variable_count > std::numeric_limits<int32_t>::max()) return PyErr_NoMemory();
  const State* state = StateOf(type);
  if (state == nullptr) return PyErr_Format(PyExc_RuntimeError, "the module of %R is gone", type);
  for (Py_ssize_t i = 0; i < value_count; ++i) {
    PyObject* value = PyTuple_GetItem(value_tuple.get(), i);
    if (!IsExpression(state, value)) {
      return PyErr_Format(PyExc_TypeError, "a value of an expression is %R; expected expressions",
                          value);
    }
  }
  if (type == state->expression && OrNull(recorder) != nullptr) type = state->kind_expression;
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* object = allocate(type, value_count + variable_count);
  if (object == nullptr) return nullptr;
  Expression* self = As(object);
  self->width = width;
  self->place = place;
  self->recorder = Reference::To(OrNull(recorder)).release();
  self->measured = Reference::To(OrNull(measured)).release();
  if (PyTuple_Size(integer_tuple.get()) > 0) self->integers = integer_tuple.release();
  for (Py_ssize_t i = 0; i < value_count; ++i) {
    self->items[i] = Reference::To(PyTuple_GetItem(value_tuple.get(), i)).release();
  }
  for (Py_ssize_t i = 0; i < variable_count; ++i) {
    self->items[value_count + i] =
        Reference::To(PyTuple_GetItem(variable_tuple.get(), i)).release();
  }
  self->values = static_cast<int32_t>(value_count);
  self->variables = static_cast<int32_t>(variable_count);
  return object;
}

PyObject* TupleOf(PyObject* const* items, int32_t count) {
  PyObject* tuple = PyTuple_New(count);
  for (int32_t i = 0; tuple != nullptr && i < count; ++i) {
    PyTuple_SetItem(tuple, i, Reference::To(items[i]).release());
  }
  return tuple;
}

PyObject* Values(PyObject* object, void*) { return TupleOf(As(object)->items, As(object)->values); }

PyObject* Variables(PyObject* object, void*) {
  return TupleOf(As(object)->items + As(object)->values, As(object)->variables);
}

PyObject* Integers(PyObject* object, void*) {
  PyObject* integers = As(object)->integers;
  return integers == nullptr ? PyTuple_New(0) : Reference::To(integers).release();
}

PyObject* Shape(PyObject* object, void*) { return Py_BuildValue("(n)", As(object)->width); }

PyObject* OrNone(PyObject* object) { return object == nullptr ? Py_None : object; }

PyObject* Repr(PyObject* object) {
  if (Py_EnterRecursiveCall(" while getting the repr of an expression")) return nullptr;
  const Expression* self = As(object);
  const Reference variables(Variables(object, nullptr)), values(Values(object, nullptr));
  const Reference integers(Integers(object, nullptr));
  const Reference name(PyType_GetQualName(Py_TYPE(object)));
  PyObject* text = nullptr;
  if (name && variables && values && integers) {
    text = PyUnicode_FromFormat(
        "%U(width=%zd, recorder=%R, place=%zd, measured=%R, variables=%R, values=%R, integers=%R)",
        name.get(), self->width, OrNone(self->recorder), self->place, OrNone(self->measured),
        variables.get(), values.get(), integers.get());
  }
  Py_LeaveRecursiveCall();
  return text;
}

PyObject* Reduce(PyObject* object, PyObject*) {
  const Expression* self = As(object);
  PyTypeObject* type = Py_TYPE(object);
  const State* state = StateOf(type);
  if (state != nullptr && type == state->kind_expression) type = state->expression;
  return Py_BuildValue("O(nOnONNN)", type, self->width, OrNone(self->recorder), self->place,
                       OrNone(self->measured), Variables(object, nullptr), Values(object, nullptr),
                       Integers(object, nullptr));
}

template <Operator kOperator, Py_ssize_t kCount>
PyObject* Operate(PyObject* a, PyObject* b) {
  State* state = StateOf(Py_TYPE(a));
  if (state == nullptr) state = StateOf(Py_TYPE(b));
  if (state == nullptr) return Reference::To(Py_NotImplemented).release();
  const Reference op = Reference::To(state->operators[kOperator]);
  if (!op) {
    PyErr_SetString(PyExc_RuntimeError, "expressions have no operators before use_operators");
    return nullptr;
  }
  PyObject* operands[] = {a, b};
  return CallRecordedOp(op.get(), operands, kCount);
}

PyObject* Negate(PyObject* a) { return Operate<kNegate, 1>(a, a); }

PyMemberDef members[] = {
    {"width", T_PYSSIZET, offsetof(Expression, width), READONLY, nullptr},
    {"recorder", T_OBJECT, offsetof(Expression, recorder), READONLY, nullptr},
    {"place", T_PYSSIZET, offsetof(Expression, place), READONLY, nullptr},
    {"measured", T_OBJECT, offsetof(Expression, measured), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"variables", Variables, nullptr, nullptr, nullptr},
    {"values", Values, nullptr, nullptr, nullptr},
    {"integers", Integers, nullptr, nullptr, nullptr},
    {"shape", Shape, nullptr, "As TensorFlow's; a vector of one number is a scalar, too.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce__", Reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

const char kDoc[] =
    "Expression(width, recorder=None, place=-1, measured=None, variables=(), values=(), "
    "integers=())\n--\n\n"
    "A vector of `width` numbers.\n\n"
    "Attributes:\n"
    "    width: how many numbers.\n"
    "    recorder: of the kind whose code it is part of; None where a graph is recorded.\n"
    "    place: in that code.\n"
    "    measured, variables, values, integers: of a recorded node; `measured` is one object for "
    "all "
    "that have its\n"
    "        operation and variables, and values of its sizes.";

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>(kDoc)},
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(Repr)},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {Py_nb_add, reinterpret_cast<void*>(Operate<kAdd, 2>)},
    {Py_nb_subtract, reinterpret_cast<void*>(Operate<kSubtract, 2>)},
    {Py_nb_multiply, reinterpret_cast<void*>(Operate<kMultiply, 2>)},
    {Py_nb_true_divide, reinterpret_cast<void*>(Operate<kDivide, 2>)},
    {Py_nb_negative, reinterpret_cast<void*>(Negate)},
    {0, nullptr},
};

PyType_Slot slots_of_kind[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(DeallocOfKind)},
    {Py_tp_traverse, reinterpret_cast<void*>(Traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(Clear)},
    {0, nullptr},
};

}  // namespace

PyType_Spec expression_spec = {
    "custom_ops._extension.Expression",
    offsetof(Expression, items),
    sizeof(PyObject*),
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    slots,
};

PyType_Spec kind_expression_spec = {
    "custom_ops._extension.Expression",
    offsetof(Expression, items),
    sizeof(PyObject*),
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    slots_of_kind,
};

PyObject* NewRecorded(const State* state, Py_ssize_t width, PyObject* measured,
                      PyObject* const* values, Py_ssize_t value_count, PyObject* const* variables,
                      Py_ssize_t variable_count, PyObject* integers) {
  Expression* self = PyObject_NewVar(Expression, state->expression, value_count + variable_count);
  if (self == nullptr) return nullptr;
  self->width = width;
  self->place = -1;
  self->recorder = nullptr;
  self->measured = Reference::To(measured).release();
  self->integers = Reference::To(integers).release();
  self->values = static_cast<int32_t>(value_count);
  self->variables = static_cast<int32_t>(variable_count);
  self->position = 0;
  self->traversal = 0;
  for (Py_ssize_t i = 0; i < value_count; ++i) {
    self->items[i] = Reference::To(values[i]).release();
  }
  for (Py_ssize_t i = 0; i < variable_count; ++i) {
    self->items[value_count + i] = Reference::To(variables[i]).release();
  }
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace tfmem
