#include "custom_ops/extension/columns.h"

namespace tfmem {
namespace {

template <typename T>
PyObject* BytesOf(const std::vector<T>& numbers) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()),
                                   numbers.size() * sizeof(T));
}

}  // namespace

bool Column::Add(PyObject* integers) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(integers); ++i) {
    if (!AddOne(PyTuple_GetItem(integers, i))) return false;
  }
  return true;
}

bool Column::AddOne(PyObject* given) {
  int overflow = 0;
  const long long integer = PyLong_AsLongLongAndOverflow(given, &overflow);
  if (integer == -1 && PyErr_Occurred()) return false;
  if (overflow || integer != static_cast<int32_t>(integer)) {
    PyErr_Format(PyExc_OverflowError, "integer %R of an op does not fit into 32 bits", given);
    return false;
  }
  values.push_back(static_cast<int32_t>(integer));
  return true;
}

PyObject* Columns::ToBytes() const {
  return Py_BuildValue("(NN)(NN)(NN)", BytesOf(kinds.values), BytesOf(kinds.splits),
                       BytesOf(children.values), BytesOf(children.splits),
                       BytesOf(arguments.values), BytesOf(arguments.splits));
}

}  // namespace tfmem
