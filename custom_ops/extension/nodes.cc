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

}  // namespace

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
