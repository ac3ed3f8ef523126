// The storages of cuda:0, and tensors in them: remote_storage.py in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <utility>

#include "extension.h"

namespace {

int64_t last_id = 0;  // never used twice in a process, as finalizers may come late
auto& dead = *new std::deque<std::pair<int64_t, int64_t>>();  // ids and bytes of storages whose last tensor has died

struct Storage {
  PyObject_HEAD
  int64_t id;  // 0: nothing has been put into it
  int64_t nbytes;
  c10::StorageImpl* impl;  // PyTorch's, which owns a reference to this; a weak reference, or null
};
PyTypeObject* storage_type = nullptr;

PyObject* storage_made(int64_t nbytes, int64_t id) {
  PyObject* made = storage_type->tp_alloc(storage_type, 0);
  if (made) {
    as<Storage>(made)->nbytes = nbytes;
    as<Storage>(made)->id = id;
  }
  return made;
}

PyObject* storage_new(PyTypeObject*, PyObject* arguments, PyObject*) {
  long long nbytes = 0;
  if (!PyArg_ParseTuple(arguments, "L", &nbytes)) return nullptr;
  return storage_made(nbytes, 0);
}

void storage_dealloc(PyObject* object) {
  auto* storage = as<Storage>(object);
  if (storage->id) dead.emplace_back(storage->id, storage->nbytes);
  if (storage->impl) c10::raw::weak_intrusive_ptr::decref(storage->impl);
  freed_object(object);
}

PyObject* storage_get_id(PyObject* object, void*) {
  if (as<Storage>(object)->id) return PyLong_FromLongLong(as<Storage>(object)->id);
  PyErr_SetString(PyExc_AttributeError, "id");
  return nullptr;
}

int storage_set_id(PyObject* object, PyObject* value, void*) {
  const long long id = value ? PyLong_AsLongLong(value) : 0;
  if (id == -1 && PyErr_Occurred()) return -1;
  as<Storage>(object)->id = id;
  return 0;
}

PyObject* storage_born(PyObject* object, void*) {
  return PyBool_FromLong(as<Storage>(object)->id != 0);
}

// The last tensor is gone. A thread of PyTorch's may come here without Python's lock, and the process may be ending.
void release(void* context) {
  if (!Py_IsInitialized()) return;
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_IsFinalizing()) return;
#else
  if (_Py_IsFinalizing()) return;
#endif
  if (PyGILState_Check()) {
    Py_DECREF(as<PyObject>(static_cast<PyObject*>(context)));
    return;
  }
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(static_cast<PyObject*>(context));
  PyGILState_Release(state);
}

c10::Storage storage_for(PyObject* object) {
  auto* storage = as<Storage>(object);
  if (storage->impl) {
    auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(std::exchange(storage->impl, nullptr));
    if (auto alive = weak.lock()) {
      storage->impl = weak.release();
      return c10::Storage(std::move(alive));
    }
  }
  auto made = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes,
      c10::DataPtr(nullptr, Py_NewRef(object), &release, c10::Device(c10::kCUDA, 0)), nullptr, false);
  storage->impl = c10::weak_intrusive_ptr<c10::StorageImpl>(made).release();
  return c10::Storage(std::move(made));
}

Storage* storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return nullptr;
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &release ? static_cast<Storage*>(data.get_context()) : nullptr;
}

// --- tensors

struct Geometry {
  at::ScalarType dtype = at::kFloat;
  c10::SmallVector<int64_t, 5> size, stride;
  int64_t offset = 0;
  int64_t bits = 0;
};

constexpr int64_t CONJUGATED = 1, NEGATED = 2;

at::Tensor tensor_made(c10::Storage storage, const Geometry& geometry) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::scalarTypeToTypeMeta(geometry.dtype));
  impl->set_sizes_and_strides(geometry.size, geometry.stride, geometry.offset);
  if (geometry.bits & CONJUGATED) impl->_set_conj(true);
  if (geometry.bits & NEGATED) impl->_set_neg(true);
  return at::Tensor(std::move(impl));
}

// For a view of `base`, which is an inference tensor exactly if `base` is one.
at::Tensor view_made(const at::Tensor& base, const Geometry& geometry) {
  const bool inference = base.is_inference();
  if (inference == c10::InferenceMode::is_enabled()) return tensor_made(base.storage(), geometry);
  c10::InferenceMode mode(inference);
  return tensor_made(base.storage(), geometry);
}

int64_t bits_of(const at::Tensor& tensor) {
  return (tensor.is_conj() ? CONJUGATED : 0) | (tensor.is_neg() ? NEGATED : 0);
}

}  // namespace
