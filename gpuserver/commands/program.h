// A section of a template (sections.py), whose operands are told apart once: computed without Python, and in slices.
#pragma once

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "steps.h"

namespace {

// A geometry on a storage.
struct ProgramView {
  int storage;
  const Meta* meta;
  const Plan* plan;  // the first that names it
};

struct ProgramOperand {
  int argument, item, view;
};

struct ProgramCall {
  Owned plan;
  std::vector<IValue> arguments;  // with its numbers, without its tensors
  std::vector<ProgramOperand> operands;
  std::vector<int> fresh;  // views
  std::vector<int> freed;  // storages that nobody names after it
};

struct ProgramStorage {
  int64_t place = -1;      // in the template, of one that is there before; -1: the program makes it
  std::vector<int> views;  // of one that it makes, first that of its result
};

struct Program {
  PyObject_HEAD
  std::vector<ProgramCall>* calls;
  std::vector<ProgramView>* views;
  std::vector<ProgramStorage>* storages;
  std::vector<int>* results;  // storages
  int64_t nbytes;             // of results
};

struct Running {
  PyObject_HEAD
  Program* program;
  std::vector<at::Tensor>* views;
  size_t position;
};

int program_storage(const Program* program, int64_t number) {
  if (number < 0 || number >= static_cast<int64_t>(program->storages->size())) throw NotPlain();
  return static_cast<int>(number);
}

// The views that there are, by their storages and geometries.
using ProgramViews = std::map<std::pair<int, int64_t>, int>;

int program_view(Program* program, ProgramViews& known, int64_t number, const Meta& meta, const Plan* plan) {
  const int storage = program_storage(program, number);
  if ((meta.bits & CONJUGATE) && !c10::isComplexType(meta.dtype)) throw NotPlain();
  const int next = static_cast<int>(program->views->size());
  const auto [found, fresh] = known.try_emplace({storage, number_of(meta.number.object)}, next);
  if (!fresh) return found->second;
  program->views->push_back({storage, &meta, plan});
  (*program->storages)[storage].views.push_back(next);
  return next;
}

// One command of it; the place of the next.
Py_ssize_t program_command(
    Program* program, ProgramViews& known, PyObject* plans, PyObject* words, Py_ssize_t at, int64_t free_code) {
  PyObject* found = PyDict_GetItemWithError(plans, PyList_GET_ITEM(words, at));
  if (!found) {
    const int64_t count = at + 1 < PyList_GET_SIZE(words) ? number_of(PyList_GET_ITEM(words, at + 1)) : -1;
    const bool free = number_of(PyList_GET_ITEM(words, at)) == free_code && !program->calls->empty();
    if (!free || count < 0 || count > PyList_GET_SIZE(words) - at - 2) throw NotPlain();
    for (Py_ssize_t n = at + 2; n < at + 2 + count; n++) {
      program->calls->back().freed.push_back(program_storage(program, number_of(PyList_GET_ITEM(words, n))));
    }
    return at + 2 + count;
  }
  const auto* plan = as<Plan>(found);
  const Py_ssize_t middle = at + 1 + static_cast<Py_ssize_t>(plan->operands->size());
  if (middle + plan->fresh > PyList_GET_SIZE(words)) throw NotPlain();
  ProgramCall call{borrowed(found), *plan->arguments, {}, {}, {}};
  const auto& arguments = plan->operation->schema().arguments();
  for (const Operand& operand : *plan->operands) {
    PyObject* word = PyList_GET_ITEM(words, ++at);
    if (operand.kind == SCALAR) {
      call.arguments[operand.argument] = number_as(bare(arguments[operand.argument].type()), word);
    } else {
      const int view = program_view(program, known, number_of(word), *operand.meta, plan);
      call.operands.push_back({operand.argument, operand.item, view});
    }
  }
  for (const Result& result : *plan->results) {
    if (result.kind != FRESH) continue;
    const int64_t storage = number_of(PyList_GET_ITEM(words, middle + result.number));
    call.fresh.push_back(program_view(program, known, storage, *result.meta, plan));
  }
  program->calls->push_back(std::move(call));
  return middle + plan->fresh;
}

const Meta& result_meta(const Program* program, int storage) {
  return *(*program->views)[(*program->storages)[storage].views.front()].meta;
}

// Program(words, plans, free_code, places, results): ``places`` of storages by their number, -1 for its own. Raises
// ValueError if it is not plain.
PyObject* program_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *words, *plans, *places, *results;
  long long free_code;
  if (!PyArg_ParseTuple(
          arguments, "O!O!LO!O!", &PyList_Type, &words, &PyDict_Type, &plans, &free_code, &PyList_Type, &places,
          &PyList_Type, &results)) {
    return nullptr;
  }
  Owned made(type->tp_alloc(type, 0));
  if (!made.object) return nullptr;
  auto* program = as<Program>(made.object);
  program->calls = new std::vector<ProgramCall>();
  program->views = new std::vector<ProgramView>();
  program->storages = new std::vector<ProgramStorage>(PyList_GET_SIZE(places));
  program->results = new std::vector<int>();
  ProgramViews known;
  try {
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(places); n++) {
      (*program->storages)[n].place = PyLong_AsLongLong(PyList_GET_ITEM(places, n));
    }
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(words);) {
      at = program_command(program, known, plans, words, at, free_code);
    }
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(results); n++) {
      const int storage = program_storage(program, number_of(PyList_GET_ITEM(results, n)));
      if ((*program->storages)[storage].views.empty()) throw NotPlain();
      program->results->push_back(storage);
      program->nbytes += result_meta(program, storage).nbytes;
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

void program_dealloc(PyObject* object) {
  auto* program = as<Program>(object);
  delete program->calls;
  delete program->views;
  delete program->storages;
  delete program->results;
  freed_object(object);
}

// --- running

// instance(words, relative, old, first, olds): as Template.instance of template.py.
PyObject* steps_instance(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const bool right = count == 5 && PyList_CheckExact(arguments[0]) && PyList_CheckExact(arguments[1]) &&
      PyList_CheckExact(arguments[2]) && PyList_CheckExact(arguments[4]);
  const long long first = right ? PyLong_AsLongLong(arguments[3]) : -1;
  Owned words(right && !PyErr_Occurred() ? PyList_GetSlice(arguments[0], 0, PY_SSIZE_T_MAX) : nullptr);
  if (!words.object) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "instance(words, relative, old, first, olds)");
    return nullptr;
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(arguments[1]); n++) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyList_GET_ITEM(arguments[1], n));
    PyObject* word = PyList_GetItem(words.object, place);
    const long long relative = word ? PyLong_AsLongLong(word) : -1;
    long long number = 0;
    if (PyErr_Occurred()) return nullptr;
    if (__builtin_add_overflow(relative, first, &number)) {
      PyErr_SetString(PyExc_ValueError, "no number of a storage");
      return nullptr;
    }
    PyObject* made = PyLong_FromLongLong(number);
    if (!made || PyList_SetItem(words.object, place, made)) return nullptr;
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(arguments[2]); n++) {
    Py_ssize_t place = 0, which = 0;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(arguments[2], n), "nn", &place, &which)) {
      if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_SetString(PyExc_IndexError, "no such storage");
      return nullptr;
    }
    PyObject* old = PyList_GetItem(arguments[4], which);
    if (!old || PyList_SetItem(words.object, place, Py_NewRef(old))) return nullptr;
  }
  return Py_NewRef(words.object);
}

PyTypeObject *program_type = nullptr, *running_type = nullptr;

// begin(program, commands): it, on the storages that these commands name; the place of one that is not there; None if
// it cannot be computed as a whole now.
PyObject* steps_begin(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  auto* self = as<Steps>(object);
  if (count != 2 || Py_TYPE(arguments[0]) != program_type || !PyList_CheckExact(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "begin(program, commands)");
    return nullptr;
  }
  auto* program = as<Program>(arguments[0]);
  PyObject* commands = arguments[1];
  Owned made(running_type->tp_alloc(running_type, 0));
  if (!made.object) return nullptr;
  auto* running = as<Running>(made.object);
  running->program = as<Program>(Py_NewRef(arguments[0]));
  running->views = new std::vector<at::Tensor>(program->views->size());
  for (size_t n = 0; n < program->views->size(); n++) {
    const ProgramView& view = (*program->views)[n];
    const int64_t place = (*program->storages)[view.storage].place;
    if (place < 0) continue;
    PyObject* number = place < PyList_GET_SIZE(commands) ? PyList_GET_ITEM(commands, place) : Py_None;
    PyObject* entry = PyDict_GetItemWithError(self->by_id, number);
    if (!entry) entry = PyDict_GetItemWithError(self->ahead, number);
    if (!entry) return PyErr_Occurred() ? nullptr : PyLong_FromLongLong(place);
    const bool right = Py_TYPE(entry) == slots.type && at(entry, slots.error) == Py_None;
    if (!right || (at(entry, slots.storage) == Py_None && at(entry, slots.tensor) == Py_None)) Py_RETURN_NONE;
    const Owned kept = borrowed(entry);
    PyObject* found = viewed(self, view.plan, *view.meta, entry);
    if (!found || !THPVariable_Check(found)) Py_RETURN_NONE;
    (*running->views)[n] = THPVariable_Unpack(found);
  }
  return Py_NewRef(made.object);
}

const at::Tensor& running_view(Running* self, int number) {
  at::Tensor& tensor = (*self->views)[number];
  if (tensor.defined()) return tensor;
  const ProgramView& view = (*self->program->views)[number];
  const at::Tensor& made = (*self->views)[(*self->program->storages)[view.storage].views.front()];
  if (!made.defined() || view.meta->nbytes > static_cast<int64_t>(made.storage().nbytes())) {
    throw std::runtime_error("a tensor beyond its storage");
  }
  return tensor = tensor_on(made.storage(), *view.meta);
}

// Without Python's lock.
void running_call(Running* self, const ProgramCall& call, Step& step) {
  auto* plan = as<Plan>(call.plan.object);
  step.stack.assign(call.arguments.begin(), call.arguments.end());
  int listed = -1;
  for (const ProgramOperand& operand : call.operands) {
    const at::Tensor& tensor = running_view(self, operand.view);
    step.tensors.push_back(tensor);
    if (operand.item < 0) {
      step.stack[operand.argument] = tensor;
    } else {
      if (listed != operand.argument) step.stack[operand.argument] = c10::List<at::Tensor>();
      listed = operand.argument;
      step.stack[operand.argument].toTensorList().push_back(tensor);
    }
  }
  if (plan->off || plan->default_dtype != c10::get_default_dtype_as_scalartype()) throw std::runtime_error("not now");
  if (plan->attention && !at::globalContext().userEnabledFlashSDP() && !at::globalContext().userEnabledMathSDP()) {
    throw std::runtime_error("not now");
  }
  plan->operation->callBoxed(&step.stack);
  if (!as_predicted(plan, step)) {
    plan->off = true;
    throw std::runtime_error("other results than were predicted");
  }
  for (size_t n = 0; n < call.fresh.size(); n++) (*self->views)[call.fresh[n]] = std::move(step.made[n]);
  step.tensors.clear();
  step.made.clear();
  for (int storage : call.freed) {
    for (int view : (*self->program->storages)[storage].views) (*self->views)[view] = at::Tensor();
  }
}

// go(nanoseconds): compute for about so long, a negative number: to the end; whether that has come. Raises what an
// operation raises: nothing of it is of use then.
PyObject* running_go(PyObject* object, PyObject* nanoseconds) {
  auto* self = as<Running>(object);
  const int64_t most = PyLong_AsLongLong(nanoseconds);
  if (PyErr_Occurred()) return nullptr;
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(most);
  const auto& calls = *self->program->calls;
  std::exception_ptr raised;
  PyThreadState* thread = PyEval_SaveThread();
  try {
    Step step;
    while (self->position < calls.size()) {
      running_call(self, calls[self->position++], step);
      if (most >= 0 && std::chrono::steady_clock::now() >= until) break;
    }
  } catch (...) {
    raised = std::current_exception();
  }
  PyEval_RestoreThread(thread);
  if (!raised) return PyBool_FromLong(self->position == calls.size());
  torch::translate_exception_to_python(raised);
  return nullptr;
}

// results(): a HeldStorage of each, in order.
PyObject* running_results(PyObject* object, PyObject*) {
  auto* self = as<Running>(object);
  Owned found(PyList_New(0));
  if (!found.object) return nullptr;
  for (int storage : *self->program->results) {
    const at::Tensor& tensor = (*self->views)[(*self->program->storages)[storage].views.front()];
    Owned entry(tensor.defined() ? held(tensor, result_meta(self->program, storage)) : nullptr);
    if (!entry.object || PyList_Append(found.object, entry.object)) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "it has not come to its end");
      return nullptr;
    }
  }
  return Py_NewRef(found.object);
}

void running_dealloc(PyObject* object) {
  auto* self = as<Running>(object);
  delete self->views;
  Py_XDECREF(as<PyObject>(reinterpret_cast<PyObject*>(self->program)));
  freed_object(object);
}

// --- types

PyMemberDef program_members[] = {
    {"nbytes", T_LONGLONG, offsetof(Program, nbytes), READONLY, "of its results"}, {nullptr, 0, 0, 0, nullptr}};
PyType_Slot program_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(program_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)},
    {Py_tp_members, program_members},
    {0, nullptr}};
PyType_Spec program_spec = {"dormouse_fast_path.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT, program_slots};

PyMethodDef running_methods[] = {
    {"go", running_go, METH_O, "Compute for so many nanoseconds; whether it has come to its end."},
    {"results", running_results, METH_NOARGS, "A HeldStorage of each."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot running_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(running_dealloc)}, {Py_tp_methods, running_methods}, {0, nullptr}};
PyType_Spec running_spec = {
    "dormouse_fast_path.Running", sizeof(Running), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    running_slots};

}  // namespace
