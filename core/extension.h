// For the libraries that are modules of Python (native.py): Python's objects, owned, and its errors as exceptions.
#pragma once

#include <ATen/core/jit_type.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <utility>

namespace {

template <typename T>
T* as(PyObject* object) {
  return reinterpret_cast<T*>(object);
}

struct Owned {
  PyObject* object = nullptr;
  explicit Owned(PyObject* taken = nullptr) : object(taken) {}
  Owned(const Owned& other) : object(other.object) { Py_XINCREF(object); }
  Owned(Owned&& other) noexcept : object(other.object) { other.object = nullptr; }
  Owned& operator=(Owned other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Owned() { Py_XDECREF(object); }
};

[[maybe_unused]] Owned borrowed(PyObject* object) {
  Py_XINCREF(object);
  return Owned(object);
}

// The end of an object of a type that was made at run time.
[[maybe_unused]] void freed_object(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// A Python error that is set becomes one of C++, which PyTorch sets again.
[[maybe_unused]] PyObject* checked(PyObject* object) {
  if (object) return object;
  python_error error;
  error.persist();
  throw error;
}

// A function of METH_FASTCALL, as tables of methods have it.
template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// A type, or that of which it is an optional one.
[[maybe_unused]] c10::TypePtr bare(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->castRaw<c10::OptionalType>()->getElementType() : type;
}

}  // namespace
