// An instance's storages as C++ sees them, and the tensors that commands name on them.
#pragma once

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>

#include <cstdint>
#include <vector>

#include "plans.h"

namespace {

// --- slots

// The slots of a HeldStorage (storages.py), by their places: a look at one costs nothing then.
struct Slots {
  PyTypeObject* type = nullptr;
  Py_ssize_t nbytes, materialise, may_write, direct, persistent, in_place;
  Py_ssize_t dirty, error, storage, tensor, address, views;
  std::vector<Py_ssize_t> all;
};
Slots slots;

Py_ssize_t slot_of(PyTypeObject* type, const char* name) {
  Owned member(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  if (!member.object || Py_TYPE(member.object) != &PyMemberDescr_Type) throw NotPlain();
  return reinterpret_cast<PyMemberDescrObject*>(member.object)->d_member->offset;
}

PyObject*& at(PyObject* object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot);
}

void put(PyObject* object, Py_ssize_t slot, PyObject* taken) {
  PyObject* before = at(object, slot);
  at(object, slot) = taken;
  Py_XDECREF(before);
}

// --- steps

struct Steps {
  PyObject_HEAD
  PyObject *plans, *by_id, *freed, *ahead, *table, *view;  // dicts, a StorageTable, the name of its method
  PyObject* undo;                                          // list of (position, entry, what was in it)
  Py_ssize_t ran, failed;                                  // operations of the last run, and where one has raised
  Py_ssize_t most;                                         // storages
  int64_t free_code;
  int64_t ahead_nbytes, most_ahead_nbytes;  // of storages in `ahead`
  bool is_ahead;                            // of what was asked for: results go there
  char computing;                           // a program has begun, see program.h
  char stalled, spoiled, roomy;  // the last `ahead` could not go on, has left something half done, not for lack of room
};

struct Step {
  std::vector<Owned> entries;  // of the tensors among the operands: another thread may unbind one
  std::vector<at::Tensor> tensors;
  std::vector<IValue> stack;
  std::vector<at::Tensor> made;
};

// The storage of an entry, if it is there.
const c10::Storage* storage_of(PyObject* entry) {
  PyObject* tensor = at(entry, slots.tensor);
  PyObject* storage = at(entry, slots.storage);
  if (THPVariable_Check(tensor)) return &THPVariable_Unpack(tensor).storage();
  if (THPStorage_Check(storage)) return &THPStorage_Unpack(storage);
  return nullptr;
}

// What a geometry that was checked names on a storage: storages.tensor_on.
at::Tensor tensor_on(const c10::Storage& storage, const Meta& meta) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(meta.dtype, at::kStrided, storage.device()));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(meta.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.size, meta.stride, meta.offset);
  if (meta.bits & CONJUGATE) tensor._set_conj(true);
  if (meta.bits & NEGATED) tensor._set_neg(true);
  return tensor;
}

// A tensor on what has tensors already, so that its memory is known.
PyObject* viewed_again(PyObject* entry, const Meta& meta) {
  const c10::Storage* storage = storage_of(entry);
  const bool fits = meta.nbytes <= number_of(at(entry, slots.nbytes));
  if (!storage || !fits || meta.bits || !PyDict_GET_SIZE(at(entry, slots.views))) return nullptr;
  Owned made(THPVariable_Wrap(tensor_on(*storage, meta)));
  if (!made.object || PyDict_SetItem(at(entry, slots.views), meta.number.object, made.object)) return nullptr;
  return PyDict_GetItemWithError(at(entry, slots.views), meta.number.object);
}

// The tensor that an operand names; null if Python is to see to it.
PyObject* viewed(Steps* self, const Plan* plan, const Meta& meta, PyObject* entry) {
  PyObject* views = at(entry, slots.views);
  PyObject* view = PyDict_GetItemWithError(views, meta.number.object);
  if (view) return view;
  if (PyErr_Occurred() || (plan->embedding && at(entry, slots.direct) != Py_None)) {
    PyErr_Clear();
    return nullptr;
  }
  if ((view = viewed_again(entry, meta))) return view;
  PyErr_Clear();
  Owned made(PyObject_CallMethodObjArgs(self->table, self->view, entry, meta.object.object, nullptr));
  if (!made.object) {
    PyErr_Clear();  // Python meets it again
    return nullptr;
  }
  return PyDict_GetItemWithError(at(entry, slots.views), meta.number.object);
}

bool lies_in_an_operand(const at::Tensor& tensor, const Step& step) {
  const auto* address = static_cast<const char*>(tensor.data_ptr());
  if (!address) return false;
  for (const at::Tensor& operand : step.tensors) {
    const c10::Storage& storage = operand.storage();
    const auto* start = static_cast<const char*>(storage.data());
    if (start <= address && address < start + storage.nbytes()) return true;
  }
  return false;
}

bool as_predicted(const Plan* plan, Step& step) {
  if (step.stack.size() != plan->results->size()) return plan->results->empty() && step.stack.empty();
  for (size_t n = 0; n < plan->results->size(); n++) {
    const Result& result = (*plan->results)[n];
    if (!step.stack[n].isTensor()) return false;
    const at::Tensor& tensor = step.stack[n].toTensor();
    if (result.kind == NOTHING) {
      if (tensor.defined() && tensor.numel()) return false;
    } else if (result.kind == SAME) {
      if (!tensor.defined() || tensor.data_ptr() != step.tensors[result.number].data_ptr()) return false;
    } else {
      if (!result.meta->is(tensor) || lies_in_an_operand(tensor, step)) return false;
      for (const at::Tensor& other : step.made) {
        if (other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) return false;
      }
      step.made.push_back(tensor);
    }
  }
  return true;
}

// A HeldStorage of a tensor, with no views.
PyObject* entry_of(PyObject* tensor, PyObject* nbytes, const void* address) {
  Owned views(PyDict_New());
  Owned where(PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(address)));
  if (!views.object || !where.object) return nullptr;
  PyObject* entry = slots.type->tp_alloc(slots.type, 0);
  if (!entry) return nullptr;
  for (Py_ssize_t slot : slots.all) at(entry, slot) = Py_NewRef(Py_None);
  for (Py_ssize_t slot : {slots.persistent, slots.in_place, slots.dirty}) put(entry, slot, Py_NewRef(Py_False));
  put(entry, slots.nbytes, Py_NewRef(nbytes));
  put(entry, slots.tensor, Py_NewRef(tensor));
  put(entry, slots.address, Py_NewRef(where.object));
  put(entry, slots.views, Py_NewRef(views.object));
  return entry;
}

// A HeldStorage, as HeldStorage.of_result makes it.
PyObject* held(const at::Tensor& tensor, const Meta& meta) {
  Owned wrapped(THPVariable_Wrap(tensor));
  if (!wrapped.object) return nullptr;
  const auto* data = static_cast<const char*>(tensor.data_ptr());
  Owned entry(entry_of(wrapped.object, meta.extent.object, data ? data - meta.offset * meta.itemsize : nullptr));
  if (!entry.object) return nullptr;
  if (PyDict_SetItem(at(entry.object, slots.views), meta.number.object, wrapped.object)) return nullptr;
  return Py_NewRef(entry.object);
}

}  // namespace
