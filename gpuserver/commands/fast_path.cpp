// The plain operations of a frame: read, called and entered without the interpreter of Python, see fast_path.py.
//
// It does only what goes well. Whatever is not as it should be, or not as simple as here, is left to Python, before
// anything was done: `Steps.run` returns where that begins, and running.py says what is wrong with it. What an
// operation raises that only reads is dropped: Python calls it again, and makes room, or the error.
#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include <structmember.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "extension.h"

namespace {

using c10::IValue;

constexpr int TENSOR = 0, SCALAR = 1;  // kinds of operands, as fast_path.py numbers them
constexpr int64_t MOST_SAVED_NBYTES = 1 << 20;  // a larger storage is not written ahead: it would be copied
constexpr int FRESH = 0, SAME = 1, NOTHING = 2;  // kinds of results, likewise

struct NotPlain {};  // an argument that only Python can make

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

// A storage's number: what PyLong_AsLongLong gives for it, -1 for all that is none.
int64_t number_of(PyObject* object) {
  if (!object || !PyLong_CheckExact(object)) return -1;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow || value < 0 ? -1 : value;
}

// --- plans

struct Meta {
  Owned object, number;
  at::ScalarType dtype;
  std::vector<int64_t> size, stride;
  int64_t offset = 0, itemsize = 0, bits = 0;
  Owned extent;

  explicit Meta(PyObject* meta) : object(borrowed(meta)) {
    number = attribute("number");
    Owned type = attribute("dtype");
    dtype = as<THPDtype>(type.object)->scalar_type;
    size = lengths("size");
    stride = lengths("stride");
    offset = PyLong_AsLongLong(attribute("offset").object);
    itemsize = PyLong_AsLongLong(attribute("itemsize").object);
    bits = PyLong_AsLongLong(attribute("bits").object);
    extent = attribute("extent");
  }

  Owned attribute(const char* name) const {
    Owned found(PyObject_GetAttrString(object.object, name));
    if (!found.object) throw NotPlain();
    return found;
  }

  std::vector<int64_t> lengths(const char* name) const {
    Owned found = attribute(name);
    std::vector<int64_t> values(PyTuple_GET_SIZE(found.object));
    for (size_t n = 0; n < values.size(); n++) values[n] = PyLong_AsLongLong(PyTuple_GET_ITEM(found.object, n));
    return values;
  }

  bool is(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.scalar_type() == dtype && tensor.layout() == at::kStrided &&
        tensor.sizes() == at::IntArrayRef(size) && tensor.strides() == at::IntArrayRef(stride) &&
        tensor.storage_offset() == offset && !tensor.is_conj() && !tensor.is_neg();
  }
};

struct Operand {
  int kind;
  int argument;  // of the schema
  int item;      // of a list of tensors; -1: the argument itself
  std::optional<Meta> meta;
};

struct Result {
  int kind;
  int number;  // slot, or operand counted over tensors
  std::optional<Meta> meta;
};

struct Plan {
  PyObject_HEAD
  c10::OperatorHandle* operation;
  std::vector<IValue>* arguments;
  std::vector<Operand>* operands;
  std::vector<Result>* results;
  std::vector<int>* written;  // operands, counted over tensors
  int fresh;
  at::ScalarType default_dtype;
  bool attention;  // only while PyTorch may choose the kernel
  bool embedding;  // its table may be read where it comes from
  bool off;        // results were not as predicted: strides, for example
};

at::Scalar scalar_of(PyObject* value) {
  if (PyBool_Check(value)) return at::Scalar(value == Py_True);
  if (PyFloat_CheckExact(value)) return at::Scalar(PyFloat_AS_DOUBLE(value));
  int overflow = 0;
  if (!PyLong_CheckExact(value)) throw NotPlain();
  const long long whole = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow) throw NotPlain();
  return at::Scalar(static_cast<int64_t>(whole));
}

// As PyTorch takes it from Python: a number in a tensor's place is one that decides no dtype.
IValue number_as(const c10::TypePtr& type, PyObject* value) {
  const at::Scalar scalar = scalar_of(value);
  switch (type->kind()) {
    case c10::TypeKind::NumberType:
      return scalar;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      if (scalar.isFloatingPoint()) throw NotPlain();
      return scalar.toLong();
    case c10::TypeKind::FloatType:
      if (scalar.isBoolean()) throw NotPlain();
      return scalar.toDouble();
    case c10::TypeKind::BoolType:
      if (!scalar.isBoolean()) throw NotPlain();
      return scalar.toBool();
    case c10::TypeKind::TensorType: {
      at::Tensor tensor = at::scalar_to_tensor(scalar);
      tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
      return tensor;
    }
    default:
      throw NotPlain();
  }
}

IValue list_as(const c10::TypePtr& element, PyObject* value, std::optional<int32_t> length) {
  const bool single = !PyList_CheckExact(value);
  if (single && !length) throw NotPlain();
  const Py_ssize_t count = single ? *length : PyList_GET_SIZE(value);
  c10::List<int64_t> whole;
  c10::List<double> real;
  c10::List<bool> truths;
  for (Py_ssize_t n = 0; n < count; n++) {
    const IValue item = number_as(element, single ? value : PyList_GET_ITEM(value, n));
    if (item.isInt()) whole.push_back(item.toInt());
    else if (item.isDouble()) real.push_back(item.toDouble());
    else if (item.isBool()) truths.push_back(item.toBool());
    else throw NotPlain();
  }
  switch (element->kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return whole;
    case c10::TypeKind::FloatType:
      return real;
    case c10::TypeKind::BoolType:
      return truths;
    default:
      throw NotPlain();
  }
}

// A number stands for a tensor where PyTorch takes it for one: other kernels would read behind its only element.
void expect_number(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  if (bare(argument.type())->kind() != c10::TypeKind::TensorType) return;
  const std::string& name = schema.name();
  const bool written = argument.alias_info() != nullptr;
  if (written || !torch::should_allow_numbers_as_tensors(name.substr(name.find("::") + 2))) throw NotPlain();
}

// An argument that is the same at each call.
IValue fixed(const c10::Argument& argument, PyObject* value) {
  if (value == Py_None) {
    if (argument.type()->kind() == c10::TypeKind::OptionalType) return IValue();
    throw NotPlain();
  }
  const c10::TypePtr type = bare(argument.type());
  const bool enumerated = type->kind() == c10::TypeKind::IntType;  // as the dispatcher has them
  if (enumerated && THPDtype_Check(value)) return static_cast<int64_t>(as<THPDtype>(value)->scalar_type);
  if (enumerated && THPLayout_Check(value)) return static_cast<int64_t>(as<THPLayout>(value)->layout);
  if (enumerated && THPMemoryFormat_Check(value)) {
    return static_cast<int64_t>(as<THPMemoryFormat>(value)->memory_format);
  }
  if (type->kind() == c10::TypeKind::DeviceObjType && THPDevice_Check(value)) return as<THPDevice>(value)->device;
  if (type->kind() == c10::TypeKind::StringType && PyUnicode_CheckExact(value)) {
    const char* text = PyUnicode_AsUTF8(value);
    if (!text) throw NotPlain();
    return std::string(text);
  }
  if (type->kind() == c10::TypeKind::ListType) {
    return list_as(type->castRaw<c10::ListType>()->getElementType(), value, argument.N());
  }
  return number_as(type, value);
}

// --- running

struct Steps {
  PyObject_HEAD
  PyObject *plans, *by_id, *freed, *ahead, *table, *view;  // dicts, a StorageTable, the name of its method
  PyObject* undo;                                          // list of (position, entry, what was in it)
  Py_ssize_t ran, failed;                                  // operations of the last run, and where one has raised
  Py_ssize_t most;                                         // storages
  int64_t free_code;
  int64_t ahead_nbytes, most_ahead_nbytes;  // of storages in `ahead`
  bool is_ahead;                            // of what was asked for: results go there
  char stalled, spoiled, roomy;  // the last `ahead` could not go on, has left something half done, not for lack of room
};

enum class Outcome { DONE, LEFT, RAISED };

struct Step {
  std::vector<Owned> entries;  // of the tensors among the operands: another thread may unbind one
  std::vector<at::Tensor> tensors;
  std::vector<IValue> stack;
  std::vector<at::Tensor> made;
};

bool may_be_written(PyObject* entry) {
  return at(entry, slots.may_write) == Py_None || at(entry, slots.in_place) == Py_True;
}

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
  return tensor;
}

// A tensor on what has tensors already, so that its memory is known.
PyObject* viewed_again(PyObject* entry, const Meta& meta) {
  const c10::Storage* storage = storage_of(entry);
  const bool fits = number_of(meta.extent.object) <= number_of(at(entry, slots.nbytes));
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

bool prepared(Steps* self, const Plan* plan, PyObject* commands, Py_ssize_t position, Step& step) {
  step.stack.assign(plan->arguments->begin(), plan->arguments->end());
  step.entries.clear();  // what is not needed any more is free before the next call takes memory
  step.tensors.clear();
  step.made.clear();
  const auto& schema = plan->operation->schema();
  int32_t listed = -1;
  for (const Operand& operand : *plan->operands) {
    PyObject* value = PyList_GET_ITEM(commands, position++);
    if (operand.kind == SCALAR) {
      try {
        step.stack[operand.argument] = number_as(bare(schema.arguments()[operand.argument].type()), value);
      } catch (const NotPlain&) {
        return false;
      }
      continue;
    }
    if (number_of(value) < 0) return false;
    PyObject* entry = PyDict_GetItemWithError(self->by_id, value);
    if (!entry && self->is_ahead) entry = PyDict_GetItemWithError(self->ahead, value);
    if (!entry || Py_TYPE(entry) != slots.type || at(entry, slots.error) != Py_None) return false;
    for (int index : *plan->written) {
      if (index != static_cast<int>(step.entries.size())) continue;
      const bool shared = at(entry, slots.persistent) != Py_False || at(entry, slots.may_write) != Py_None;
      if (self->is_ahead ? shared : !may_be_written(entry)) return false;
    }
    step.entries.push_back(borrowed(entry));
    PyObject* view = viewed(self, plan, *operand.meta, entry);
    if (!view || !THPVariable_Check(view)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(view);
    step.tensors.push_back(tensor);
    if (operand.item < 0) {
      step.stack[operand.argument] = tensor;
    } else {
      if (listed != operand.argument) step.stack[operand.argument] = c10::List<at::Tensor>();
      listed = operand.argument;
      step.stack[operand.argument].toTensorList().push_back(tensor);
    }
  }
  return true;
}

// Ids of results that Python would take, too.
bool are_new(Steps* self, PyObject* commands, Py_ssize_t position, int count) {
  if (PyDict_GET_SIZE(self->by_id) + count > self->most) return false;
  for (int n = 0; n < count; n++) {
    PyObject* number = PyList_GET_ITEM(commands, position + n);
    if (number_of(number) < 0) return false;
    for (int before = 0; before < n; before++) {
      if (number_of(PyList_GET_ITEM(commands, position + before)) == number_of(number)) return false;
    }
    for (PyObject* known : {self->by_id, self->freed, self->is_ahead ? self->ahead : nullptr}) {
      if (!known) continue;
      const int found = PyDict_Contains(known, number);
      if (found) return false;
    }
  }
  return true;
}

bool lies_in_an_operand(const at::Tensor& tensor, const Step& step) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  if (!address) return false;
  for (const Owned& entry : step.entries) {
    // An empty storage may have an address below 0, which is no place.
    const uintptr_t start = PyLong_AsUnsignedLongLongMask(at(entry.object, slots.address));
    const uintptr_t nbytes = PyLong_AsUnsignedLongLongMask(at(entry.object, slots.nbytes));
    if (nbytes && start <= address && address < start + nbytes) return true;
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

bool entered(Steps* self, const Plan* plan, Step& step, PyObject* commands, Py_ssize_t position) {
  for (int index : *plan->written) put(step.entries[index].object, slots.dirty, Py_NewRef(Py_True));
  size_t made = 0;
  for (const Result& result : *plan->results) {
    if (result.kind != FRESH) continue;
    Owned entry(held(step.made[made++], *result.meta));
    PyObject* number = PyList_GET_ITEM(commands, position + result.number);
    PyObject* table = self->is_ahead ? self->ahead : self->by_id;
    if (!entry.object || PyDict_SetItem(table, number, entry.object)) return false;
    if (self->is_ahead) self->ahead_nbytes += number_of(result.meta->extent.object);
  }
  return true;
}

// What an operation is about to write ahead of the program, as it is.
bool saved(Steps* self, const Plan* plan, const Step& step, Py_ssize_t position) {
  for (int index : *plan->written) {
    PyObject* entry = step.entries[index].object;
    const c10::Storage& storage = step.tensors[index].storage();
    const auto nbytes = static_cast<int64_t>(storage.nbytes());
    if (nbytes > MOST_SAVED_NBYTES) return false;
    at::Tensor whole = at::empty({0}, step.tensors[index].options().dtype(at::kByte));
    whole.set_(storage, 0, {nbytes}, {1});
    Owned before(THPVariable_Wrap(whole.clone()));
    Owned item(before.object ? Py_BuildValue("(nOO)", position, entry, before.object) : nullptr);
    if (!item.object || PyList_Append(self->undo, item.object)) return false;
    self->ahead_nbytes += nbytes;
  }
  return true;
}

// What the call raises, without Python's lock.
std::exception_ptr called(const Plan* plan, Step& step) {
  std::exception_ptr raised;
  PyThreadState* thread = PyEval_SaveThread();
  try {
    plan->operation->callBoxed(&step.stack);
  } catch (...) {
    raised = std::current_exception();
  }
  PyEval_RestoreThread(thread);
  return raised;
}

// An operation has raised this, or has given something else than was predicted. If it writes, it must not run again.
Outcome failed(Plan* plan, const std::exception_ptr& raised) {
  plan->off = plan->off || !raised;
  if (plan->written->empty()) return Outcome::LEFT;
  if (raised) {
    torch::translate_exception_to_python(raised);
  } else {
    const std::string name = c10::toString(plan->operation->operator_name());
    const char* text = "%s gave other results than the client expected: its shape rule is wrong here";
    PyErr_Format(PyExc_RuntimeError, text, name.c_str());
  }
  return Outcome::RAISED;
}

// `position` is behind the key.
Outcome operation(Steps* self, Plan* plan, PyObject* commands, Py_ssize_t position, Step& step) {
  const Py_ssize_t middle = position + static_cast<Py_ssize_t>(plan->operands->size());
  if (plan->off || middle + plan->fresh > PyList_GET_SIZE(commands)) return Outcome::LEFT;
  // What was computed ahead may have read what this writes: Python drops it.
  if (!plan->written->empty() && !self->is_ahead && PyDict_GET_SIZE(self->ahead)) return Outcome::LEFT;
  if (plan->default_dtype != c10::get_default_dtype_as_scalartype()) return Outcome::LEFT;
  if (plan->attention && !at::globalContext().userEnabledFlashSDP() && !at::globalContext().userEnabledMathSDP()) {
    return Outcome::LEFT;
  }
  if (!are_new(self, commands, middle, plan->fresh)) return Outcome::LEFT;
  try {
    if (!prepared(self, plan, commands, position, step)) return Outcome::LEFT;
    if (self->is_ahead && !saved(self, plan, step, position - 1)) return Outcome::LEFT;
  } catch (const std::exception&) {  // no memory for a number, for example
    return Outcome::LEFT;
  }
  if (const std::exception_ptr raised = called(plan, step)) return failed(plan, raised);
  try {
    if (!as_predicted(plan, step)) return failed(plan, nullptr);
  } catch (...) {  // such a tensor has no address
    return failed(plan, std::current_exception());
  }
  try {
    return entered(self, plan, step, commands, middle) ? Outcome::DONE : Outcome::RAISED;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return Outcome::RAISED;
  }
}

bool is_free(const Steps* self, PyObject* code) {
  int overflow = 0;
  return PyLong_AsLongLongAndOverflow(code, &overflow) == self->free_code && !overflow;
}

// The position behind a FREE, `position` being behind its code; -1 if Python is to see to it.
Py_ssize_t freed(Steps* self, PyObject* commands, Py_ssize_t position) {
  if (position >= PyList_GET_SIZE(commands)) return -1;
  const int64_t count = number_of(PyList_GET_ITEM(commands, position));
  if (count < 0 || count > PyList_GET_SIZE(commands) - position - 1) return -1;
  const Py_ssize_t end = position + 1 + count;
  for (Py_ssize_t n = position + 1; n < end; n++) {
    PyObject* number = PyList_GET_ITEM(commands, n);
    if (number_of(number) < 0) return -1;
    PyObject* entry = PyDict_GetItemWithError(self->by_id, number);
    if (!entry || Py_TYPE(entry) != slots.type || at(entry, slots.persistent) != Py_False) return -1;
  }
  for (Py_ssize_t n = position + 1; n < end; n++) {
    if (PyDict_DelItem(self->by_id, PyList_GET_ITEM(commands, n))) PyErr_Clear();  // one that is named twice
  }
  return end;
}

PyObject* steps_run(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  auto* self = reinterpret_cast<Steps*>(object);
  if (count != 2 || !PyList_CheckExact(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "run(commands, position)");
    return nullptr;
  }
  PyObject* commands = arguments[0];
  Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
  self->ran = 0;
  self->failed = -1;
  Step step;
  while (position < PyList_GET_SIZE(commands)) {
    PyObject* code = PyList_GET_ITEM(commands, position);
    if (!PyLong_CheckExact(code)) break;
    PyObject* found = PyDict_GetItemWithError(self->plans, code);
    if (!found) {
      if (!is_free(self, code)) break;
      const Py_ssize_t end = freed(self, commands, position + 1);
      if (end < 0) break;
      position = end;
      continue;
    }
    Owned plan = borrowed(found);  // a finalizer may run anything
    auto* known = reinterpret_cast<Plan*>(plan.object);
    const Outcome outcome = operation(self, known, commands, position + 1, step);
    if (outcome == Outcome::LEFT) break;
    if (outcome == Outcome::RAISED) {
      self->failed = position;
      return nullptr;
    }
    self->ran++;
    position += 1 + static_cast<Py_ssize_t>(known->operands->size()) + known->fresh;
  }
  return PyErr_Occurred() ? nullptr : PyLong_FromSsize_t(position);
}

// The position behind the command that is there, if it is one of these kinds; else -1.
Py_ssize_t end_of(Steps* self, PyObject* commands, Py_ssize_t position, PyObject*& plan) {
  PyObject* code = PyList_GET_ITEM(commands, position);
  if (!PyLong_CheckExact(code)) return -1;
  plan = PyDict_GetItemWithError(self->plans, code);
  if (plan) {
    const auto* known = reinterpret_cast<Plan*>(plan);
    position += 1 + static_cast<Py_ssize_t>(known->operands->size()) + known->fresh;
  } else {
    if (!is_free(self, code)) return -1;
    if (++position >= PyList_GET_SIZE(commands)) return -1;
    const int64_t count = number_of(PyList_GET_ITEM(commands, position));
    if (count < 0 || count > PyList_GET_SIZE(commands)) return -1;
    position += 1 + count;
  }
  return position > PyList_GET_SIZE(commands) ? -1 : position;
}

// ahead(commands, position, end, nanoseconds): compute what nobody has asked for yet, for about so long, and free
// nothing; the position of what was not. It never raises what an operation has raised.
PyObject* steps_ahead(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  auto* self = reinterpret_cast<Steps*>(object);
  if (count != 4 || !PyList_CheckExact(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "ahead(commands, position, end, nanoseconds)");
    return nullptr;
  }
  PyObject* commands = arguments[0];
  Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
  const Py_ssize_t end = PyLong_AsSsize_t(arguments[2]);
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(PyLong_AsLongLong(arguments[3]));
  if (PyErr_Occurred()) return nullptr;
  if (!PyDict_GET_SIZE(self->ahead) && !PyList_GET_SIZE(self->undo)) self->ahead_nbytes = 0;
  self->stalled = self->spoiled = false;
  self->is_ahead = true;
  Step step;
  while (position < end && std::chrono::steady_clock::now() < until) {
    PyObject* found = nullptr;
    const Py_ssize_t next = end_of(self, commands, position, found);
    int64_t more = 0;
    if (next >= 0 && found) {
      for (const Result& result : *reinterpret_cast<Plan*>(found)->results) {
        if (result.kind == FRESH) more += number_of(result.meta->extent.object);
      }
    }
    self->roomy = self->ahead_nbytes + more <= self->most_ahead_nbytes;
    if (next < 0 || !self->roomy) {
      self->stalled = true;
      break;
    }
    if (found) {
      Owned plan = borrowed(found);
      const Outcome outcome = operation(self, reinterpret_cast<Plan*>(found), commands, position + 1, step);
      self->spoiled = outcome == Outcome::RAISED;
      self->stalled = outcome != Outcome::DONE;
      if (self->stalled) break;
    }
    position = next;
  }
  self->is_ahead = false;
  PyErr_Clear();  // Python meets it again when it is asked for
  return PyLong_FromSsize_t(position);
}

// confirm(commands, position, end): what was computed ahead has been asked for; the position of a command that Python
// is to see to, or `end`.
PyObject* steps_confirm(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  auto* self = reinterpret_cast<Steps*>(object);
  if (count != 3 || !PyList_CheckExact(arguments[0])) {
    PyErr_SetString(PyExc_TypeError, "confirm(commands, position, end)");
    return nullptr;
  }
  PyObject* commands = arguments[0];
  Py_ssize_t position = PyLong_AsSsize_t(arguments[1]);
  const Py_ssize_t end = PyLong_AsSsize_t(arguments[2]);
  if (PyErr_Occurred()) return nullptr;
  self->ran = 0;
  while (position < end) {
    PyObject* plan = nullptr;
    const Py_ssize_t next = end_of(self, commands, position, plan);
    if (next < 0) break;
    if (!plan) {
      if (freed(self, commands, position + 1) < 0) break;
    } else {
      self->ran++;
      for (Py_ssize_t n = next - reinterpret_cast<Plan*>(plan)->fresh; n < next; n++) {
        PyObject* number = PyList_GET_ITEM(commands, n);
        Owned entry = borrowed(PyDict_GetItemWithError(self->ahead, number));
        const int known = entry.object ? PyDict_Contains(self->by_id, number) : 1;
        if (known || PyDict_SetItem(self->by_id, number, entry.object) || PyDict_DelItem(self->ahead, number)) {
          if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a result that was computed ahead is not new");
          return nullptr;
        }
        self->ahead_nbytes -= number_of(at(entry.object, slots.nbytes));
      }
    }
    position = next;
  }
  return PyLong_FromSsize_t(position);
}

// --- bytes that travel in frames, of tensors on the CPU

// read(number, offset, nbytes, owed): these bytes of a storage; None if Python is to see to it.
PyObject* steps_read(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  auto* self = reinterpret_cast<Steps*>(object);
  if (count != 4 || number_of(arguments[0]) < 0) Py_RETURN_NONE;
  const int64_t offset = number_of(arguments[1]), nbytes = number_of(arguments[2]);
  PyObject* entry = PyDict_GetItemWithError(self->by_id, arguments[0]);
  if (!entry && arguments[3] == Py_True) entry = PyDict_GetItemWithError(self->ahead, arguments[0]);
  if (!entry || Py_TYPE(entry) != slots.type || at(entry, slots.error) != Py_None) Py_RETURN_NONE;
  const c10::Storage* storage = storage_of(entry);
  if (!storage || storage->device_type() != at::kCPU || offset < 0 || nbytes < 0) Py_RETURN_NONE;
  const auto size = static_cast<int64_t>(storage->nbytes());
  if (nbytes > size || offset > size - nbytes) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(static_cast<const char*>(storage->data()) + offset, nbytes);
}

// write(number, nbytes, offset, content): a new storage with these bytes in it; False if Python is to see to it.
PyObject* steps_write(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  auto* self = reinterpret_cast<Steps*>(object);
  if (count != 4 || number_of(arguments[0]) < 0 || !PyBytes_Check(arguments[3])) Py_RETURN_FALSE;
  const int64_t nbytes = number_of(arguments[1]), offset = number_of(arguments[2]);
  const int64_t length = PyBytes_GET_SIZE(arguments[3]);
  if (nbytes < 0 || offset < 0 || length > nbytes || offset > nbytes - length) Py_RETURN_FALSE;
  if (PyDict_GET_SIZE(self->by_id) >= self->most) Py_RETURN_FALSE;
  for (PyObject* known : {self->by_id, self->freed}) {
    if (PyDict_Contains(known, arguments[0])) Py_RETURN_FALSE;
  }
  try {
    const at::Tensor tensor = at::empty({nbytes}, at::TensorOptions(at::kByte));
    std::memcpy(tensor.mutable_data_ptr<uint8_t>() + offset, PyBytes_AS_STRING(arguments[3]), length);
    Owned wrapped(THPVariable_Wrap(tensor));
    Owned entry(wrapped.object ? entry_of(wrapped.object, arguments[1], tensor.data_ptr()) : nullptr);
    if (entry.object) put(entry.object, slots.dirty, Py_NewRef(Py_True));
    if (entry.object && !PyDict_SetItem(self->by_id, arguments[0], entry.object)) Py_RETURN_TRUE;
  } catch (const std::exception&) {  // no memory, for example
  }
  PyErr_Clear();
  Py_RETURN_FALSE;
}

// --- types

void plan_dealloc(PyObject* object) {
  auto* plan = as<Plan>(object);
  delete plan->operation;
  delete plan->arguments;
  delete plan->operands;
  delete plan->results;
  delete plan->written;
  freed_object(object);
}

// Plan(name, overload, arguments, operands, results, written, fresh, default_dtype, attention, embedding), see
// fast_path.py. Raises ValueError if it is not plain.
PyObject* plan_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char *name = nullptr, *overload = nullptr;
  PyObject *values, *operands, *results, *written, *dtype;
  int fresh, attention, embedding;
  if (!PyArg_ParseTuple(
          arguments, "ssO!O!O!O!iOpp", &name, &overload, &PyList_Type, &values, &PyList_Type, &operands, &PyList_Type,
          &results, &PyList_Type, &written, &fresh, &dtype, &attention, &embedding)) {
    return nullptr;
  }
  Owned made(type->tp_alloc(type, 0));
  if (!made.object) return nullptr;
  auto* plan = as<Plan>(made.object);
  plan->arguments = new std::vector<IValue>();
  plan->operands = new std::vector<Operand>();
  plan->results = new std::vector<Result>();
  plan->written = new std::vector<int>();
  plan->fresh = fresh;
  plan->attention = attention;
  plan->embedding = embedding;
  plan->default_dtype = as<THPDtype>(dtype)->scalar_type;
  try {
    const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!found) throw NotPlain();
    plan->operation = new c10::OperatorHandle(*found);
    const auto& schema = found->schema();
    if (static_cast<size_t>(PyList_GET_SIZE(values)) != schema.arguments().size()) throw NotPlain();
    for (size_t n = 0; n < schema.arguments().size(); n++) {
      PyObject* value = PyList_GET_ITEM(values, n);
      if (PyLong_Check(value) || PyFloat_Check(value)) expect_number(schema, schema.arguments()[n]);
      plan->arguments->push_back(value == Py_Ellipsis ? IValue() : fixed(schema.arguments()[n], value));
    }
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(operands); n++) {
      Operand operand{};
      PyObject* meta = nullptr;
      PyObject* told = PyList_GET_ITEM(operands, n);
      if (!PyArg_ParseTuple(told, "iiiO", &operand.kind, &operand.argument, &operand.item, &meta)) {
        return nullptr;
      }
      if (meta != Py_None) operand.meta.emplace(meta);
      if (operand.kind == SCALAR) expect_number(schema, schema.arguments()[operand.argument]);
      const c10::TypePtr type = bare(schema.arguments()[operand.argument].type());
      const bool list = operand.item >= 0 && type->kind() == c10::TypeKind::ListType;
      const c10::TypePtr tensor = list ? type->castRaw<c10::ListType>()->getElementType() : type;
      const bool takes = tensor->kind() == c10::TypeKind::TensorType && list == (operand.item >= 0);
      if (operand.kind == TENSOR && !(takes && operand.meta)) throw NotPlain();
      plan->operands->push_back(std::move(operand));
    }
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(results); n++) {
      Result result{};
      PyObject* meta = nullptr;
      if (!PyArg_ParseTuple(PyList_GET_ITEM(results, n), "iiO", &result.kind, &result.number, &meta)) return nullptr;
      if (meta != Py_None) result.meta.emplace(meta);
      plan->results->push_back(std::move(result));
    }
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(written); n++) {
      plan->written->push_back(static_cast<int>(PyLong_AsLong(PyList_GET_ITEM(written, n))));
    }
  } catch (const NotPlain&) {
    PyErr_Clear();
    PyErr_SetString(PyExc_ValueError, "not plain");
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  return Py_NewRef(made.object);
}

int steps_visit(PyObject* object, visitproc visit, void* arg) {
  auto* self = as<Steps>(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* held : {self->plans, self->by_id, self->freed, self->ahead, self->undo, self->table}) Py_VISIT(held);
  return 0;
}

int steps_clear(PyObject* object) {
  auto* self = as<Steps>(object);
  for (PyObject** held :
       {&self->plans, &self->by_id, &self->freed, &self->ahead, &self->undo, &self->table, &self->view}) {
    PyObject* before = *held;
    *held = nullptr;
    Py_XDECREF(before);
  }
  return 0;
}

void steps_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  steps_clear(object);
  freed_object(object);
}

// Steps(plans, by_id, freed, ahead, table, most, free_code, most_ahead_nbytes)
PyObject* steps_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *plans, *by_id, *freed, *ahead, *table;
  Py_ssize_t most;
  long long code, nbytes;
  if (!PyArg_ParseTuple(
          arguments, "O!O!O!O!OnLL", &PyDict_Type, &plans, &PyDict_Type, &by_id, &PyDict_Type, &freed, &PyDict_Type,
          &ahead, &table, &most, &code, &nbytes)) {
    return nullptr;
  }
  Owned view(PyUnicode_InternFromString("view")), undo(PyList_New(0));
  PyObject* made = view.object && undo.object ? type->tp_alloc(type, 0) : nullptr;
  if (!made) return nullptr;
  auto* self = as<Steps>(made);
  self->undo = Py_NewRef(undo.object);
  self->plans = Py_NewRef(plans);
  self->by_id = Py_NewRef(by_id);
  self->freed = Py_NewRef(freed);
  self->ahead = Py_NewRef(ahead);
  self->table = Py_NewRef(table);
  self->view = Py_NewRef(view.object);
  self->most = most;
  self->free_code = code;
  self->most_ahead_nbytes = nbytes;
  return made;
}

PyMethodDef steps_methods[] = {
    {"run", fast(steps_run), METH_FASTCALL,
     "Run plain commands; the position of the first that is not."},
    {"ahead", fast(steps_ahead), METH_FASTCALL, "Compute some of what was not asked for; where that ends."},
    {"read", fast(steps_read), METH_FASTCALL, "Bytes of a storage, or None."},
    {"write", fast(steps_write), METH_FASTCALL, "Bytes into a new storage, or False."},
    {"confirm", fast(steps_confirm), METH_FASTCALL, "It was asked for."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef steps_members[] = {
    {"ran", T_PYSSIZET, offsetof(Steps, ran), READONLY, "operations of the last run that have run"},
    {"failed", T_PYSSIZET, offsetof(Steps, failed), READONLY, "the position of the one that raised"},
    {"spoiled", T_BOOL, offsetof(Steps, spoiled), READONLY, "what was computed ahead is not what it should be"},
    {"undo", T_OBJECT, offsetof(Steps, undo), READONLY, "what was written ahead: (position, entry, what was in it)"},
    {"ahead_nbytes", T_LONGLONG, offsetof(Steps, ahead_nbytes), 0, "of results that were not asked for"},
    {"roomy", T_BOOL, offsetof(Steps, roomy), READONLY, "more may be computed ahead"},
    {"stalled", T_BOOL, offsetof(Steps, stalled), READONLY, "what follows cannot be computed ahead, or not yet"},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot steps_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(steps_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(steps_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(steps_visit)},
    {Py_tp_clear, reinterpret_cast<void*>(steps_clear)},
    {Py_tp_methods, steps_methods},
    {Py_tp_members, steps_members},
    {0, nullptr}};
PyType_Spec steps_spec = {
    "dormouse_fast_path.Steps", sizeof(Steps), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, steps_slots};

PyMemberDef plan_members[] = {
    {"off", T_BOOL, offsetof(Plan, off), READONLY, "its results were not as predicted"}, {nullptr, 0, 0, 0, nullptr}};
PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
    {Py_tp_members, plan_members},
    {0, nullptr}};
PyType_Spec plan_spec = {"dormouse_fast_path.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT, plan_slots};

// bind(HeldStorage): before anything else.
PyObject* bind(PyObject*, PyObject* type) {
  try {
    slots.type = as<PyTypeObject>(type);
    slots.all.clear();
    const std::pair<const char*, Py_ssize_t*> named[] = {
        {"nbytes", &slots.nbytes},         {"materialise", &slots.materialise}, {"may_write", &slots.may_write},
        {"direct", &slots.direct},         {"persistent", &slots.persistent},   {"in_place", &slots.in_place},
        {"dirty", &slots.dirty},           {"error", &slots.error},             {"storage", &slots.storage},
        {"tensor", &slots.tensor},         {"address", &slots.address},         {"views", &slots.views}};
    for (const auto& [name, place] : named) slots.all.push_back(*place = slot_of(slots.type, name));
    Py_INCREF(type);
  } catch (const NotPlain&) {
    PyErr_Clear();
    PyErr_SetString(PyExc_TypeError, "a HeldStorage has other slots");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"bind", bind, METH_O, "Say which type storages have."}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dormouse_fast_path", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_dormouse_fast_path() {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  for (PyType_Spec* spec : {&steps_spec, &plan_spec}) {
    PyObject* type = PyType_FromSpec(spec);
    if (!type || PyModule_AddType(module, as<PyTypeObject>(type))) return nullptr;
    Py_DECREF(type);
  }
  return module;
}
