// The module `custom_ops._extension`: what records graphs op by op, and makes integers of them;
// and the replay of a step's allocations.

#include "custom_ops/extension/expression.h"
#include "custom_ops/extension/kind_numbers.h"
#include "custom_ops/extension/nodes.h"
#include "custom_ops/extension/python.h"
#include "custom_ops/extension/recorded_op.h"
#include "custom_ops/extension/replay.h"
#include "custom_ops/extension/state.h"

namespace tfmem {
namespace {

State* Of(PyObject* module) { return static_cast<State*>(PyModule_GetState(module)); }

PyObject* UseOperators(PyObject* module, PyObject* args) {
  State* state = Of(module);
  PyObject* given[kOperators];
  PyTypeObject* type = state->recorded_op;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!:use_operators", type, &given[kConstant], type,
                        &given[kAdd], type, &given[kSubtract], type, &given[kMultiply], type,
                        &given[kDivide], type, &given[kNegate])) {
    return nullptr;
  }
  for (int i = 0; i < kOperators; ++i) {
    const Reference old(std::exchange(state->operators[i], Reference::To(given[i]).release()));
  }
  return Reference::To(Py_None).release();
}

bool MakeType(PyObject* module, PyType_Spec* spec, PyTypeObject* base, PyTypeObject** place) {
  PyObject* type = PyType_FromModuleAndSpec(module, spec, reinterpret_cast<PyObject*>(base));
  *place = reinterpret_cast<PyTypeObject*>(type);
  return type != nullptr;
}

int Execute(PyObject* module) {
  State* state = Of(module);
  const bool made =
      MakeType(module, &expression_spec, nullptr, &state->expression) &&
      MakeType(module, &kind_expression_spec, state->expression, &state->kind_expression) &&
      MakeType(module, &recorded_op_spec, nullptr, &state->recorded_op) &&
      MakeType(module, &kind_numbers_spec, nullptr, &state->kind_numbers);
  return made && PyModule_AddType(module, state->expression) == 0 &&
                 PyModule_AddType(module, state->recorded_op) == 0 &&
                 PyModule_AddType(module, state->kind_numbers) == 0
             ? 0
             : -1;
}

int Traverse(PyObject* module, visitproc visit, void* arg) {
  const State* state = Of(module);
  if (state == nullptr) return 0;
  Py_VISIT(state->expression);
  Py_VISIT(state->kind_expression);
  Py_VISIT(state->recorded_op);
  Py_VISIT(state->kind_numbers);
  for (PyObject* op : state->operators) Py_VISIT(op);
  return 0;
}

// Types stay as long as the module: their objects do not ask whether they are there.
int Clear(PyObject* module) {
  State* state = Of(module);
  if (state == nullptr) return 0;
  for (PyObject*& op : state->operators) Py_CLEAR(op);
  return 0;
}

void Free(void* object) {
  auto* module = static_cast<PyObject*>(object);
  Clear(module);
  State* state = Of(module);
  if (state == nullptr) return;
  Py_CLEAR(state->kind_expression);
  Py_CLEAR(state->expression);
  Py_CLEAR(state->recorded_op);
  Py_CLEAR(state->kind_numbers);
}

PyMethodDef methods[] = {
    {"use_operators", UseOperators, METH_VARARGS,
     "use_operators(constant, add, subtract, multiply, divide, negate, /)\n--\n\n"
     "Says which RecordedOps are behind the operators of expressions, and what records a number "
     "that is an operand."},
    {"flatten_nodes", FlattenNodes, METH_VARARGS, kFlattenNodes},
    {"node_maker", NodeMaker, METH_VARARGS, kNodeMaker},
    {"replay_step", ReplayStep, METH_VARARGS, kReplayStep},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(Execute)},
    {0, nullptr},
};

}  // namespace

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    "custom_ops._extension",
    "Records graphs op by op, and makes integers of them; knows no op. Replays allocations.",
    sizeof(State),
    methods,
    slots,
    Traverse,
    Clear,
    Free,
};

State* StateOf(PyTypeObject* type) {
  while (type != nullptr && (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE)) {
    PyObject* module = PyType_GetModule(type);
    if (module != nullptr) {
      return PyModule_GetDef(module) == &module_definition ? Of(module) : nullptr;
    }
    PyErr_Clear();  // a class that is written in Python has no module of this sense
    type = static_cast<PyTypeObject*>(PyType_GetSlot(type, Py_tp_base));
  }
  return nullptr;
}

}  // namespace tfmem

PyMODINIT_FUNC PyInit__extension() { return PyModuleDef_Init(&tfmem::module_definition); }
