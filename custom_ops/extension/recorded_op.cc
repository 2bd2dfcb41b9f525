#include "custom_ops/extension/recorded_op.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "custom_ops/extension/arguments.h"
#include "custom_ops/extension/expression.h"
#include "custom_ops/extension/memo.h"
#include "custom_ops/extension/state.h"

namespace tfmem {
namespace {

using Vectorcall = PyObject* (*)(PyObject*, PyObject* const*, size_t, PyObject*);

// Public in the limited API from Python 3.12 on, and the same in 3.11.
constexpr unsigned long kHaveVectorcall = 1ul << 11;
constexpr size_t kArgumentsOffset = size_t{1} << (8 * sizeof(size_t) - 1);

struct RecordedOp {
  PyObject ob_base;
  Vectorcall vectorcall;
  State* state;
  PyObject* dict;      // or null
  PyObject* function;  // that does what is not known here
  PyObject* names;     // of the parameters, a tuple
  Parameters* parameters;
  Memo* memo;
  int users;  // of entries of the memo, which has to stay as it is meanwhile
};

RecordedOp* As(PyObject* object) { return reinterpret_cast<RecordedOp*>(object); }

PyObject* CallFunction(RecordedOp* self, PyObject* const* args, Py_ssize_t count,
                       PyObject* keywords) {
  const Reference tuple(PyTuple_New(count)), named(keywords == nullptr ? nullptr : PyDict_New());
  if (!tuple || (keywords != nullptr && !named)) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SetItem(tuple.get(), i, Reference::To(args[i]).release());
  }
  for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_Size(keywords); ++i) {
    if (PyDict_SetItem(named.get(), PyTuple_GetItem(keywords, i), args[count + i])) return nullptr;
  }
  return PyObject_Call(self->function, tuple.get(), named.get());
}

// ---- what is known ----

// Whether a result is a recorded op of what was given, with nothing in between.
bool IsOf(const State* state, PyObject* result, const Arguments& given) {
  if (Py_TYPE(result) != state->expression) return false;
  const auto* made = reinterpret_cast<Expression*>(result);
  const size_t integers = made->integers == nullptr ? 0 : PyTuple_Size(made->integers);
  if (made->recorder != nullptr || made->measured == nullptr || integers != given.integers.size() ||
      static_cast<size_t>(made->values) != given.values.size() ||
      static_cast<size_t>(made->variables) != given.variables.size()) {
    return false;
  }
  return std::equal(made->items, made->items + made->values, given.values.data()) &&
         std::equal(made->items + made->values, made->items + made->values + made->variables,
                    given.variables.data());
}

// Reads the bounds of a measured op's integers. False with an error set.
bool ReadBounds(PyObject* measured, std::vector<int64_t>* bounds) {
  const Reference given(PyObject_GetAttrString(measured, "bounds"));
  const Reference tuple(given ? PySequence_Tuple(given.get()) : nullptr);
  if (!tuple) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple.get()); ++i) {
    PyObject* bound = PyTuple_GetItem(tuple.get(), i);
    bounds->push_back(bound == Py_None ? 1 : PyLong_AsLongLong(bound));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

// Keeps what results for such arguments share. False with an error set; what cannot be kept is
// none.
bool Remember(RecordedOp* self, const Arguments& given, PyObject* result) {
  auto entry = std::make_unique<Entry>();
  entry->is_list = PyList_Check(result);
  const Py_ssize_t count = entry->is_list ? PyList_Size(result) : 1;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* part = entry->is_list ? PyList_GetItem(result, i) : result;
    if (!IsOf(self->state, part, given)) return true;
    const auto* made = reinterpret_cast<Expression*>(part);
    entry->parts.push_back({Reference::To(made->measured), made->width});
  }
  if (given.integers.size() > 0) {
    if (count != 1 || !ReadBounds(entry->parts[0].measured.get(), &entry->bounds)) {
      return !PyErr_Occurred();
    }
    if (entry->bounds.size() != given.integers.size()) return true;
  }
  for (size_t i = 0; i < given.variables.size(); ++i) {
    Reference variable(PyWeakref_NewRef(given.variables[i], nullptr));
    if (!variable) return false;
    entry->variables.push_back(std::move(variable));
  }
  if (self->users == 0) self->memo->Add(given.key, std::move(entry));
  return true;
}

// Integers as a tuple. Nothing, with no error, where one is out of range: Python says so.
std::optional<Reference> Integers(const Entry& entry, const Arguments& given) {
  for (size_t i = 0; i < given.integers.size(); ++i) {
    int overflow = 0;
    const long long integer = PyLong_AsLongLongAndOverflow(given.integers[i], &overflow);
    if (overflow || integer < 0 || integer >= entry.bounds[i]) return std::nullopt;
  }
  Reference tuple(PyTuple_New(given.integers.size()));
  for (size_t i = 0; tuple && i < given.integers.size(); ++i) {
    PyTuple_SetItem(tuple.get(), i, Reference::To(given.integers[i]).release());
  }
  return tuple;
}

PyObject* Make(const State* state, const Entry::Part& part, const Arguments& given,
               PyObject* integers) {
  return NewRecorded(state, part.width, part.measured.get(), given.values.data(),
                     given.values.size(), given.variables.data(), given.variables.size(), integers);
}

// The result for arguments whose like were met.
PyObject* Repeat(const RecordedOp* self, const Entry& entry, const Arguments& given,
                 PyObject* integers) {
  if (!entry.is_list) return Make(self->state, entry.parts[0], given, integers);
  Reference list(PyList_New(entry.parts.size()));
  for (size_t i = 0; list && i < entry.parts.size(); ++i) {
    PyObject* made = Make(self->state, entry.parts[i], given, integers);
    if (made == nullptr) return nullptr;
    PyList_SetItem(list.get(), i, made);
  }
  return list.release();
}

// ---- calls ----

// A call with arguments that `Read` says are plain; where they are new, it gives Python `args`.
// Nothing, with no error, where Python has to do it.
std::optional<PyObject*> CallPlain(RecordedOp* self, PyObject* const* args, Py_ssize_t count,
                                   const Arguments& given) {
  if (const Entry* entry = self->memo->Find(given.key)) {
    struct User {
      int* users;
      explicit User(int* counted) : users(counted) { ++*users; }
      ~User() { --*users; }
    } user(&self->users);
    if (given.integers.size() == 0) return Repeat(self, *entry, given, nullptr);
    const std::optional<Reference> integers = Integers(*entry, given);
    if (!integers) return std::nullopt;
    return *integers ? Repeat(self, *entry, given, integers->get()) : nullptr;
  }
  Reference result(CallFunction(self, args, count, nullptr));
  if (!result || !Remember(self, given, result.get())) return nullptr;
  return result.release();
}

// A call where some arguments have to be converted first.
std::optional<PyObject*> CallOdd(RecordedOp* self, PyObject* const* args, Py_ssize_t count) {
  Converted converted;
  switch (Convert(self->state, *self->parameters, args, count, &converted)) {
    case Form::kError:
      return nullptr;
    case Form::kPlain:
      break;
    default:
      return std::nullopt;
  }
  Arguments given;
  switch (Read(self->state, *self->parameters, converted.args.data(), count, &given)) {
    case Form::kPlain:
      return CallPlain(self, converted.for_python.data(), count, given);
    case Form::kError:
      return nullptr;
    default:
      return std::nullopt;
  }
}

std::optional<PyObject*> CallPositional(RecordedOp* self, PyObject* const* args, Py_ssize_t count) {
  Arguments given;
  switch (Read(self->state, *self->parameters, args, count, &given)) {
    case Form::kPlain:
      return CallPlain(self, args, count, given);
    case Form::kOdd:
      return CallOdd(self, args, count);
    case Form::kError:
      return nullptr;
    default:
      return std::nullopt;
  }
}

// Arguments in the order of the parameters, those that are named behind the others. Their number,
// or -1 where there is one too many, or one missing before others.
Py_ssize_t Arrange(const RecordedOp* self, PyObject* const* args, Py_ssize_t count,
                   PyObject* keywords, std::array<PyObject*, kMostParameters>* arranged) {
  const Py_ssize_t names = PyTuple_Size(self->names);
  if (count > names) return -1;
  arranged->fill(nullptr);
  std::copy(args, args + count, arranged->begin());
  const Py_ssize_t total = count + PyTuple_Size(keywords);
  for (Py_ssize_t i = count; i < total; ++i) {
    PyObject* name = PyTuple_GetItem(keywords, i - count);
    Py_ssize_t place = 0;
    while (place < names && PyUnicode_Compare(PyTuple_GetItem(self->names, place), name)) ++place;
    if (place == names || (*arranged)[place] != nullptr) return -1;
    (*arranged)[place] = args[i];
  }
  for (Py_ssize_t i = 0; i < total; ++i) {
    if (i >= kMostParameters || (*arranged)[i] == nullptr) return -1;
  }
  return total;
}

PyObject* Call(PyObject* object, PyObject* const* args, size_t flagged, PyObject* keywords) {
  RecordedOp* self = As(object);
  const auto count = static_cast<Py_ssize_t>(flagged & ~kArgumentsOffset);
  return Guarded([&]() -> PyObject* {
    std::optional<PyObject*> result;
    if (keywords == nullptr || PyTuple_Size(keywords) == 0) {
      result = CallPositional(self, args, count);
    } else if (!self->parameters->AreOperands()) {
      std::array<PyObject*, kMostParameters> arranged;
      const Py_ssize_t total = Arrange(self, args, count, keywords, &arranged);
      if (total >= 0) result = CallPositional(self, arranged.data(), total);
    }
    return result ? *result : CallFunction(self, args, count, keywords);
  });
}

PyObject* CallWithTuple(PyObject* object, PyObject* args, PyObject* keywords) {
  return PyObject_Call(As(object)->function, args, keywords);
}

// ---- the type ----

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* words[] = {"function", "names", "roles", nullptr};
  PyObject *function, *names, *roles;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO!O!:RecordedOp", const_cast<char**>(words),
                                   &function, &PyTuple_Type, &names, &PyTuple_Type, &roles)) {
    return nullptr;
  }
  return Guarded([&]() -> PyObject* {
    auto parameters = std::make_unique<Parameters>();
    if (!ReadParameters(names, roles, parameters.get())) return nullptr;
    auto memo = std::make_unique<Memo>();
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* object = allocate(type, 0);
    if (object == nullptr) return nullptr;
    RecordedOp* self = As(object);
    self->vectorcall = Call;
    self->state = StateOf(type);
    self->function = Reference::To(function).release();
    self->names = Reference::To(names).release();
    self->parameters = parameters.release();
    self->memo = memo.release();
    return object;
  });
}

int Traverse(PyObject* object, visitproc visit, void* arg) {
  const RecordedOp* self = As(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->dict);
  Py_VISIT(self->function);
  Py_VISIT(self->names);
  return self->memo == nullptr ? 0 : self->memo->Traverse(visit, arg);
}

int Clear(PyObject* object) {
  RecordedOp* self = As(object);
  Py_CLEAR(self->dict);
  if (self->memo != nullptr) self->memo->Clear();
  return 0;
}

void Dealloc(PyObject* object) {
  RecordedOp* self = As(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Clear(object);
  Py_CLEAR(self->function);
  Py_CLEAR(self->names);
  delete self->memo;
  delete self->parameters;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyObject* Repr(PyObject* object) {
  return PyUnicode_FromFormat("<recorded %R>", As(object)->function);
}

// Pickled and copied by its name, as functions are.
PyObject* Reduce(PyObject* object, PyObject*) {
  return PyObject_GetAttrString(object, "__qualname__");
}

PyMemberDef members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(RecordedOp, dict), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(RecordedOp, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
    {"__reduce__", Reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

const char kDoc[] =
    "RecordedOp(function, names, roles)\n--\n\n"
    "A function that records one op, and is called only where nothing like its arguments was met "
    "before, or where\nthey belong to a node kind.\n\n"
    "Args:\n"
    "    function: does all there is to do.\n"
    "    names: of its parameters.\n"
    "    roles: of each parameter: \"value\" (a vector, or a number that stands for one), "
    "\"vector\", "
    "\"values\" (several),\n        \"variable\", \"integer\" (of the recorded op), or, of what "
    "makes "
    "another op, \"number\" or \"sizes\" (an integer\n        or several); or \"operands\" alone: "
    "all "
    "arguments are values.";

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>(kDoc)},
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(Traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(Clear)},
    {Py_tp_call, reinterpret_cast<void*>(CallWithTuple)},
    {Py_tp_repr, reinterpret_cast<void*>(Repr)},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {0, nullptr},
};

}  // namespace

PyType_Spec recorded_op_spec = {
    "custom_ops._extension.RecordedOp",
    sizeof(RecordedOp),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | kHaveVectorcall,
    slots,
};

PyObject* CallRecordedOp(PyObject* op, PyObject* const* args, Py_ssize_t count) {
  return Call(op, args, count, nullptr);
}

}  // namespace tfmem
