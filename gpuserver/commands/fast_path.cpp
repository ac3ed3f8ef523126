// The plain operations of a frame: read, called and entered without the interpreter of Python, see fast_path.py.
//
// It does only what goes well. Whatever is not as it should be, or not as simple as here, is left to Python, before
// anything was done: `Steps.run` returns where that begins, and running.py says what is wrong with it. What an
// operation raises that only reads is dropped: Python calls it again, and makes room, or the error.
#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "program.h"

namespace {

constexpr int64_t MAX_SAVED_NBYTES = 1 << 20;  // a larger storage is not written ahead: it would be copied

enum class Outcome { DONE, LEFT, RAISED };

bool may_be_written(PyObject* entry) {
  return at(entry, slots.may_write) == Py_None || at(entry, slots.in_place) == Py_True;
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
    if (nbytes > MAX_SAVED_NBYTES) return false;
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
  const bool ahead = self->computing || PyDict_GET_SIZE(self->ahead);
  if (!plan->written->empty() && !self->is_ahead && ahead) return Outcome::LEFT;
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
    {"begin", fast(steps_begin), METH_FASTCALL, "Begin with a program, if it can be."},
    {"instance", fast(steps_instance), METH_FASTCALL, "The commands of a template."},
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
    {"computing", T_BOOL, offsetof(Steps, computing), 0, "a program has begun"},
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
  for (PyType_Spec* spec : {&steps_spec, &plan_spec, &program_spec, &running_spec}) {
    PyObject* type = PyType_FromSpec(spec);
    if (!type || PyModule_AddType(module, as<PyTypeObject>(type))) return nullptr;
    if (spec == &program_spec) program_type = as<PyTypeObject>(type);  // the module holds it
    if (spec == &running_spec) running_type = as<PyTypeObject>(type);
    Py_DECREF(type);
  }
  return module;
}
