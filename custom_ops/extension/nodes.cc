#include "custom_ops/extension/nodes.h"

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "custom_ops/extension/columns.h"

namespace tfmem {
namespace {

constexpr int32_t kBegun = -1;  // a node whose children are not done

// A node that waits for its children: a tuple of its kind, its children and its arguments.
struct Waiting {
  PyObject* node;      // which the example holds
  Reference children;  // a tuple
  Py_ssize_t done;     // of the children
};

// An object as a tuple; itself, if it is one. Null with an error set.
Reference TupleOf(PyObject* object) {
  return PyTuple_Check(object) ? Reference::To(object) : Reference(PySequence_Tuple(object));
}

// The graph of one example. Nodes come behind their children, each once.
class Example {
 public:
  // `types` are those that a node may have; null for any.
  Example(Columns* columns, PyObject* types) : columns_(columns), types_(types) {}

  // Adds all nodes under one more root. False with an error set.
  bool Add(PyObject* root) {
    if (!Begin(root)) return false;
    while (!waiting_.empty()) {
      Waiting& last = waiting_.back();
      if (last.done < PyTuple_Size(last.children.get())) {
        if (!Begin(PyTuple_GetItem(last.children.get(), last.done++))) return false;
      } else if (!End()) {
        return false;
      }
    }
    return true;
  }

 private:
  // Nothing, if the node is done. False with an error set.
  bool Begin(PyObject* node) {
    const auto [place, is_new] = places_.try_emplace(node, kBegun);
    if (!is_new && place->second != kBegun) return true;
    if (!PyTuple_Check(node) || PyTuple_Size(node) != 3) {
      PyErr_Format(PyExc_TypeError, "%R stands where a node is expected", node);
      return false;
    }
    if (!HasType(node)) {
      PyErr_Format(
          PyExc_ValueError,
          "a node of kind %S was made by another handle, whose kinds are others; expected one "
          "of this handle's `node`",
          PyTuple_GetItem(node, 0));
      return false;
    }
    if (!is_new) {
      PyErr_Format(PyExc_ValueError,
                   "a node of kind %S depends on itself; expected graphs without cycles",
                   PyTuple_GetItem(node, 0));
      return false;
    }
    Reference children = TupleOf(PyTuple_GetItem(node, 1));
    if (!children) return false;
    waiting_.push_back({node, std::move(children), 0});
    return true;
  }

  bool HasType(PyObject* node) const {
    if (types_ == nullptr) return true;
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(node));
    for (Py_ssize_t i = 0; i < PyTuple_Size(types_); ++i) {
      if (PyTuple_GetItem(types_, i) == type) return true;
    }
    return false;
  }

  // The last one that waits is done.
  bool End() {
    const Waiting last = std::move(waiting_.back());
    waiting_.pop_back();
    places_[last.node] = count_++;
    for (Py_ssize_t i = 0; i < PyTuple_Size(last.children.get()); ++i) {
      columns_->children.values.push_back(places_[PyTuple_GetItem(last.children.get(), i)]);
    }
    const Reference kind(PyTuple_Pack(1, PyTuple_GetItem(last.node, 0)));
    const Reference arguments = TupleOf(PyTuple_GetItem(last.node, 2));
    return kind && arguments && columns_->kinds.Add(kind.get()) &&
           columns_->arguments.Add(arguments.get());
  }

  Columns* const columns_;
  PyObject* const types_;  // a tuple, or null
  std::unordered_map<PyObject*, int32_t> places_;
  std::vector<Waiting> waiting_;
  int32_t count_ = 0;
};

// The tuple's items from `first` to `last`. Python's collector does not follow it if each of its
// items is a leaf for the collector: an exact integer, or one of its `type` that it does not
// follow.
Reference Part(PyObject* tuple, Py_ssize_t first, Py_ssize_t last, PyTypeObject* type) {
  Reference part(PyTuple_GetSlice(tuple, first, last));
  if (!part || first == last) return part;
  for (Py_ssize_t i = first; i < last; ++i) {
    PyObject* item = PyTuple_GetItem(tuple, i);
    if (!PyLong_CheckExact(item) && (Py_TYPE(item) != type || PyObject_GC_IsTracked(item))) {
      return part;
    }
  }
  PyObject_GC_UnTrack(part.get());
  return part;
}

// The form of a kind, `(number, children, children and arguments)`, or of a member of a family,
// with `count` values; null, without an error, if there is none. With an error if something else
// fails.
Reference FormOf(PyObject* forms, PyObject* kind, Py_ssize_t count) {
  Reference form(PyObject_GetItem(forms, kind));
  if (form && !PyTuple_Check(form.get())) {
    const Reference size(PyLong_FromSsize_t(count));
    if (!size) return {};
    form = Reference(PyObject_GetItem(form.get(), size.get()));
  }
  if (!form &&
      (PyErr_ExceptionMatches(PyExc_KeyError) || PyErr_ExceptionMatches(PyExc_TypeError))) {
    PyErr_Clear();
  }
  return form;
}

}  // namespace

PyObject* MakeNode(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 4 || !PyType_Check(args[0]) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(args[0]), &PyTuple_Type) ||
      !PyTuple_CheckExact(args[3])) {
    PyErr_SetString(PyExc_TypeError, "make_node takes a type of tuples, forms, a kind and a tuple");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(args[0]);
  PyObject* given = args[3];
  const Py_ssize_t values = PyTuple_Size(given);
  const Reference form = FormOf(args[1], args[2], values);
  if (!form && PyErr_Occurred()) return nullptr;
  if (!form) return Reference::To(Py_None).release();
  if (PyTuple_Size(form.get()) != 3) {
    PyErr_Format(PyExc_ValueError, "the form of a kind is %R; expected three integers", form.get());
    return nullptr;
  }
  const Py_ssize_t children = PyLong_AsSsize_t(PyTuple_GetItem(form.get(), 1));
  const Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GetItem(form.get(), 2));
  if (PyErr_Occurred()) return nullptr;
  if (values != expected) return Reference::To(Py_None).release();
  Reference parts[] = {Reference::To(PyTuple_GetItem(form.get(), 0)),
                       Part(given, 0, children, type), Part(given, children, values, type)};
  if (!parts[1] || !parts[2]) return nullptr;
  const bool followed =
      PyObject_GC_IsTracked(parts[1].get()) || PyObject_GC_IsTracked(parts[2].get());
  Reference node(PyType_GenericAlloc(type, 3));
  if (!node) return nullptr;
  for (Py_ssize_t i = 0; i < 3; ++i) {
    if (PyTuple_SetItem(node.get(), i, parts[i].release()) != 0) return nullptr;
  }
  if (!followed) PyObject_GC_UnTrack(node.get());
  return node.release();
}

const char kMakeNode[] =
    "make_node(own, forms, kind, given, /)\n--\n\n"
    "A node of a kind: of the type `own`, the tuple of the kind's number, its children and its "
    "arguments. "
    "None, if there is no\nsuch kind, or it has another number of values.\n\n"
    "`forms` has for each kind the tuple of its number, of its children, and of children and "
    "arguments; for a family of\nkinds the mapping of the last to that tuple. "
    "`given` is the tuple of children, then arguments.";

PyObject* FlattenNodes(PyObject*, PyObject* args) {
  PyObject *examples, *types = nullptr;
  if (!PyArg_ParseTuple(args, "O|O!:flatten_nodes", &examples, &PyTuple_Type, &types)) {
    return nullptr;
  }
  return Guarded([&]() -> PyObject* {
    const Reference all = TupleOf(examples);  // whose nodes live as long
    if (!all) return nullptr;
    Columns columns;
    for (Py_ssize_t i = 0; i < PyTuple_Size(all.get()); ++i) {
      const Reference roots = TupleOf(PyTuple_GetItem(all.get(), i));
      if (!roots) return nullptr;
      Example example(&columns, types);
      for (Py_ssize_t j = 0; j < PyTuple_Size(roots.get()); ++j) {
        if (!example.Add(PyTuple_GetItem(roots.get(), j))) return nullptr;
      }
      columns.EndRow();
    }
    return columns.ToBytes();
  });
}

const char kFlattenNodes[] =
    "flatten_nodes(examples, types=None, /)\n--\n\n"
    "Kinds, children and arguments of graphs, each the tuple of its roots: of each the values, "
    "int32, and the row\nsplits, int64.\n\n"
    "A node is a tuple of its kind, its children and its arguments. Nodes come behind their "
    "children; one that is met\nagain is one node. "
    "`types` is a tuple of the types that nodes may have.\n\n"
    "Raises:\n"
    "    ValueError: a node depends on itself, or has none of the types.\n"
    "    TypeError: something else stands where a node is expected.";

}  // namespace tfmem
