// Python's objects, owned, and its errors as exceptions.
#pragma once

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
  Owned(const Owned&) = delete;
  Owned(Owned&& other) noexcept : object(other.object) { other.object = nullptr; }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Owned() { Py_XDECREF(object); }
};

// A Python error that is set becomes one of C++, which PyTorch sets again.
[[noreturn]] void rethrow() {
  python_error error;
  error.persist();
  throw error;
}

PyObject* checked(PyObject* object) {
  if (!object) rethrow();
  return object;
}

}  // namespace
