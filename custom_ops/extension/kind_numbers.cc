#include "custom_ops/extension/kind_numbers.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

#include "custom_ops/extension/columns.h"
#include "custom_ops/extension/expression.h"
#include "custom_ops/extension/state.h"

namespace tfmem {
namespace {

// The kind of ops that were measured alike and have these variables.
struct Known {
  int32_t number;
  std::vector<const PyObject*> variables;  // parameters of the net, which live as long
};

struct KindNumbers {
  PyObject ob_base;
  State* state;
  std::unordered_map<PyObject*, Known>* known;  // by `measured`, of which it has references
  int64_t loss;                                 // the kind that ends a graph; -1 before it is known
};

KindNumbers* As(PyObject* object) { return reinterpret_cast<KindNumbers*>(object); }

// The ops under a loss, those that were met last first, so that children come mostly before their
// parents. Runs no Python code, so no other traversal comes in between.
void Order(State* state, Expression* loss, std::vector<Expression*>* order, Column* children) {
  const uint64_t traversal = ++state->traversals;
  std::vector<Expression*> waiting = {loss};
  order->clear();
  while (!waiting.empty()) {
    Expression* current = waiting.back();
    waiting.pop_back();
    if (current->traversal == traversal) continue;
    current->traversal = traversal;
    current->position = static_cast<int32_t>(order->size());
    order->push_back(current);
    for (int32_t i = 0; i < current->values; ++i) {
      auto* value = reinterpret_cast<Expression*>(current->items[i]);
      if (value->traversal != traversal) waiting.push_back(value);
    }
  }
  std::reverse(order->begin(), order->end());
  const auto last = static_cast<int32_t>(order->size()) - 1;
  for (const Expression* op : *order) {
    for (int32_t i = 0; i < op->values; ++i) {
      const auto* value = reinterpret_cast<const Expression*>(op->items[i]);
      children->values.push_back(last - value->position);
    }
  }
  children->values.push_back(last);
  children->EndRow();
}

// What Python says; -1 with an error set.
int64_t Ask(PyObject* number_of, PyObject* expression) {
  const Reference found(PyObject_CallFunctionObjArgs(number_of, expression, nullptr));
  if (!found) return -1;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(found.get(), &overflow);
  if (PyErr_Occurred()) return -1;
  if (overflow || number < 0 || number > std::numeric_limits<int32_t>::max()) {
    PyErr_Format(PyExc_ValueError, "%R is no number of a kind", found.get());
    return -1;
  }
  return number;
}

// -1 with an error set.
int64_t NumberOf(KindNumbers* self, Expression* op, PyObject* number_of) {
  const PyObject* const* variables = op->items + op->values;
  if (op->measured != nullptr) {
    const auto found = self->known->find(op->measured);
    if (found != self->known->end() &&
        std::equal(found->second.variables.begin(), found->second.variables.end(), variables,
                   variables + op->variables)) {
      return found->second.number;
    }
  }
  const int64_t number = Ask(number_of, reinterpret_cast<PyObject*>(op));
  if (number < 0 || op->measured == nullptr) return number;
  const auto [place, is_new] = self->known->try_emplace(op->measured);
  if (is_new) Py_INCREF(op->measured);
  place->second.number = static_cast<int32_t>(number);
  place->second.variables.assign(variables, variables + op->variables);
  return number;
}

// Adds the row of one loss. False with an error set.
bool AddRow(KindNumbers* self, Expression* loss, PyObject* number_of,
            std::vector<Expression*>* order, Columns* columns) {
  Order(self->state, loss, order, &columns->children);
  for (Expression* op : *order) {
    const int64_t number = NumberOf(self, op, number_of);
    if (number < 0) return false;
    columns->kinds.values.push_back(static_cast<int32_t>(number));
    if (op->integers != nullptr && !columns->arguments.Add(op->integers)) return false;
  }
  if (self->loss < 0) self->loss = Ask(number_of, Py_None);
  if (self->loss < 0) return false;
  columns->kinds.values.push_back(static_cast<int32_t>(self->loss));
  columns->kinds.EndRow();
  columns->arguments.EndRow();
  return true;
}

PyObject* Flatten(PyObject* object, PyObject* args) {
  KindNumbers* self = As(object);
  PyObject *given, *number_of;
  if (!PyArg_ParseTuple(args, "OO:flatten", &given, &number_of)) return nullptr;
  return Guarded([&]() -> PyObject* {
    const Reference losses(PySequence_Tuple(given));  // whose graphs live as long
    if (!losses) return nullptr;
    Columns columns;
    std::vector<Expression*> order;
    for (Py_ssize_t i = 0; i < PyTuple_Size(losses.get()); ++i) {
      PyObject* loss = PyTuple_GetItem(losses.get(), i);
      if (!IsExpression(self->state, loss)) {
        return PyErr_Format(PyExc_TypeError, "a loss is %R; expected an expression", loss);
      }
      if (!AddRow(self, reinterpret_cast<Expression*>(loss), number_of, &order, &columns)) {
        return nullptr;
      }
    }
    return columns.ToBytes();
  });
}

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* words[] = {nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, keywords, ":KindNumbers", const_cast<char**>(words))) {
    return nullptr;
  }
  return Guarded([&]() -> PyObject* {
    auto known = std::make_unique<std::unordered_map<PyObject*, Known>>();
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* object = allocate(type, 0);
    if (object == nullptr) return nullptr;
    As(object)->state = StateOf(type);
    As(object)->known = known.release();
    As(object)->loss = -1;
    return object;
  });
}

int Traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  if (As(object)->known == nullptr) return 0;
  for (const auto& entry : *As(object)->known) Py_VISIT(entry.first);
  return 0;
}

int Clear(PyObject* object) {
  if (As(object)->known == nullptr) return 0;
  std::unordered_map<PyObject*, Known> forgotten;
  forgotten.swap(*As(object)->known);
  for (const auto& entry : forgotten) Py_DECREF(entry.first);
  return 0;
}

void Dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Clear(object);
  delete As(object)->known;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"flatten", Flatten, METH_VARARGS,
     "flatten($self, losses, number_of)\n--\n\n"
     "Kinds, children and arguments of the graphs under losses: of each the values, int32, and the "
     "row splits, int64.\n\n"
     "An op that several others use is one node; a last node of each graph takes its loss.\n\n"
     "Args:\n"
     "    losses: recorded expressions.\n"
     "    number_of: gives the number of the kind of an expression whose like was not met before; "
     "of "
     "None that of the\n        node that takes a loss."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc,
     const_cast<char*>("KindNumbers()\n--\n\nThe numbers of the kinds that ops of recorded graphs "
                       "are, for one net.")},
    {Py_tp_new, reinterpret_cast<void*>(New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(Traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(Clear)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

}  // namespace

PyType_Spec kind_numbers_spec = {
    "custom_ops._extension.KindNumbers",
    sizeof(KindNumbers),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    slots,
};

}  // namespace tfmem
