// Python's C interface, of which the extension uses what every Python from 3.11 on has.

#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <new>
#include <utility>

namespace tfmem {

// An owned reference; the end of a block drops it.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : object_(owned) {}
  Reference(Reference&& other) noexcept : object_(other.release()) {}
  Reference& operator=(Reference&& other) noexcept {
    PyObject* old = object_;
    object_ = other.release();
    Py_XDECREF(old);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  static Reference To(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Reference(borrowed);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Calls what may throw where memory is short, as Python's error.
template <typename Function>
auto Guarded(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return {};
  }
}

}  // namespace tfmem
