// What is known of a plain operation before it runs: its call, with places for what differs, and its results.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include <structmember.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "extension.h"

namespace {

using c10::IValue;

constexpr int TENSOR = 0, SCALAR = 1;  // kinds of operands, as fast_path.py numbers them
constexpr int CONJUGATE = 1, NEGATED = 2;  // bits of a geometry
constexpr int FRESH = 0, SAME = 1, NOTHING = 2;  // kinds of results, likewise

struct NotPlain {};  // an argument that only Python can make

// A storage's number: what PyLong_AsLongLong gives for it, -1 for all that is none.
int64_t number_of(PyObject* object) {
  if (!object || !PyLong_CheckExact(object)) return -1;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow || value < 0 ? -1 : value;
}

struct Meta {
  Owned object, number;
  at::ScalarType dtype;
  std::vector<int64_t> size, stride;
  int64_t offset = 0, itemsize = 0, bits = 0, nbytes = 0;
  Owned extent;  // the same as nbytes

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
    nbytes = number_of(extent.object);
    if (nbytes < 0 || PyErr_Occurred()) throw NotPlain();  // beyond any storage
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

// --- the type

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

PyMemberDef plan_members[] = {
    {"off", T_BOOL, offsetof(Plan, off), READONLY, "its results were not as predicted"}, {nullptr, 0, 0, 0, nullptr}};
PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
    {Py_tp_members, plan_members},
    {0, nullptr}};
PyType_Spec plan_spec = {"dormouse_fast_path.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT, plan_slots};

}  // namespace
