#include "custom_ops/extension/nodes.h"

#include <cstdint>
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

// The places of nodes by their addresses, in a hash table with open addressing.
class Places {
 public:
  // Where the place of a node stands, until the next call; kBegun of one that is new.
  std::pair<int32_t*, bool> Find(PyObject* node) {
    if (2 * count_ >= slots_.size()) Grow();
    Slot& slot = At(node);
    const bool is_new = slot.node == nullptr;
    if (is_new) {
      slot = {node, kBegun};
      ++count_;
    }
    return {&slot.place, is_new};
  }

 private:
  struct Slot {
    PyObject* node = nullptr;
    int32_t place = kBegun;
  };

  Slot& At(PyObject* node) {
    // Objects are aligned, so the low bits say nothing.
    const uint64_t mixed = (reinterpret_cast<uintptr_t>(node) >> 4) * 0x9E3779B97F4A7C15u;
    size_t at = (mixed >> 32) & (slots_.size() - 1);
    while (slots_[at].node != nullptr && slots_[at].node != node) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return slots_[at];
  }

  void Grow() {
    const std::vector<Slot> old =
        std::exchange(slots_, std::vector<Slot>(slots_.empty() ? 64 : 2 * slots_.size()));
    for (const Slot& slot : old) {
      if (slot.node != nullptr) At(slot.node) = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two
  size_t count_ = 0;
};

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
    const auto [place, is_new] = places_.Find(node);
    if (!is_new && *place != kBegun) return true;
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
    *places_.Find(last.node).first = count_++;
    for (Py_ssize_t i = 0; i < PyTuple_Size(last.children.get()); ++i) {
      PyObject* child = PyTuple_GetItem(last.children.get(), i);
      columns_->children.values.push_back(*places_.Find(child).first);
    }
    const Reference arguments = TupleOf(PyTuple_GetItem(last.node, 2));
    return arguments && columns_->kinds.AddOne(PyTuple_GetItem(last.node, 0)) &&
           columns_->arguments.Add(arguments.get());
  }

  Columns* const columns_;
  PyObject* const types_;  // a tuple, or null
  Places places_;
  std::vector<Waiting> waiting_;
  int32_t count_ = 0;
};

// Some values as a tuple. Python's collector does not follow it if each of them is a leaf for the
// collector: an exact integer, or one of its `type` that it does not follow.
Reference TupleOf(PyObject* const* values, Py_ssize_t count, PyTypeObject* type) {
  Reference tuple(PyTuple_New(count));
  if (!tuple || count == 0) return tuple;
  bool followed = false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    followed = followed || (!PyLong_CheckExact(values[i]) &&
                            (Py_TYPE(values[i]) != type || PyObject_GC_IsTracked(values[i])));
    if (PyTuple_SetItem(tuple.get(), i, Reference::To(values[i]).release()) != 0) return {};
  }
  if (!followed) PyObject_GC_UnTrack(tuple.get());
  return tuple;
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

// What a maker of nodes is bound to: their type, the forms of their kinds, and what gives the
// error where there is no such node.
enum MakerItem : Py_ssize_t { kType, kForms, kRefused, kMakerItems };

// Sets the error of a node that there is not.
PyObject* Refused(PyObject* maker, PyObject* kind, Py_ssize_t values) {
  const Reference count(PyLong_FromSsize_t(values));
  if (!count) return nullptr;
  const Reference error(
      PyObject_CallFunctionObjArgs(PyTuple_GetItem(maker, kRefused), kind, count.get(), nullptr));
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  return nullptr;
}

// A node of the kind that comes first in `args`.
PyObject* MakeNode(PyObject* maker, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_Size(keywords);
  const bool kind_is_named =
      count == 0 && named == 1 &&
      PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "kind") == 0;
  if (!kind_is_named && (count == 0 || named != 0)) {
    PyErr_SetString(PyExc_TypeError, "node takes a kind, then children and integer arguments");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(PyTuple_GetItem(maker, kType));
  PyObject* kind = args[0];
  PyObject* const* given = args + 1;
  const Py_ssize_t values = kind_is_named ? 0 : count - 1;
  const Reference form = FormOf(PyTuple_GetItem(maker, kForms), kind, values);
  if (!form) return PyErr_Occurred() ? nullptr : Refused(maker, kind, values);
  if (PyTuple_Size(form.get()) != 3) {
    PyErr_Format(PyExc_ValueError, "the form of a kind is %R; expected three integers", form.get());
    return nullptr;
  }
  const Py_ssize_t children = PyLong_AsSsize_t(PyTuple_GetItem(form.get(), 1));
  const Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GetItem(form.get(), 2));
  if (PyErr_Occurred()) return nullptr;
  if (values != expected || children > values) return Refused(maker, kind, values);
  Reference parts[] = {Reference::To(PyTuple_GetItem(form.get(), 0)),
                       TupleOf(given, children, type),
                       TupleOf(given + children, values - children, type)};
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

PyMethodDef make_node = {"node",
                         reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(MakeNode)),
                         METH_FASTCALL | METH_KEYWORDS,
                         "node(kind, *given)\n--\n\n"
                         "A node of a kind: its children, then its integer arguments."};

}  // namespace

PyObject* NodeMaker(PyObject*, PyObject* args) {
  PyObject *type, *forms, *refused;
  if (!PyArg_ParseTuple(args, "O!OO:node_maker", &PyType_Type, &type, &forms, &refused)) {
    return nullptr;
  }
  if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), &PyTuple_Type)) {
    PyErr_Format(PyExc_TypeError, "nodes have the type %R; expected a type of tuples", type);
    return nullptr;
  }
  const Reference maker(PyTuple_Pack(kMakerItems, type, forms, refused));
  return maker ? PyCFunction_NewEx(&make_node, maker.get(), nullptr) : nullptr;
}

const char kNodeMaker[] =
    "node_maker(own, forms, refused, /)\n--\n\n"
    "What makes nodes: called with a kind, children and arguments, it gives a node of the type "
    "`own`, the tuple of the\nkind's number, its children and its arguments.\n\n"
    "`forms` has for each kind the tuple of its number, of its children, and of children and "
    "arguments; for a family of\nkinds the mapping of the last to that tuple. "
    "`refused(kind, values)` gives the error where there is no such\nkind, or it has another "
    "number of values.";

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
