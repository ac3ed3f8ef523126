// The path of a command from PyTorch's dispatcher into the frame, without the interpreter of Python, see recorder.py.
//
// It does only what it has seen Python do: a call whose signature is known has a plan, and what the plan says is done
// here, by the same steps as remote_tensor.py's `record` and stream.py's. All else is left to Python before anything
// was done. So Python decides what a call means, and this repeats it.
//
// Everything here is under Python's lock, the GIL.
#include <torch/csrc/Dtype.h>

#include <structmember.h>

#include "kernels.h"

namespace {

// --- what Python calls

bool read_geometry(PyObject* meta, Geometry& geometry) {
  Owned dtype(PyObject_GetAttrString(meta, "dtype")), size(PyObject_GetAttrString(meta, "size"));
  Owned stride(PyObject_GetAttrString(meta, "stride")), offset(PyObject_GetAttrString(meta, "offset"));
  Owned bits(PyObject_GetAttrString(meta, "bits"));
  if (!dtype.object || !size.object || !stride.object || !offset.object || !bits.object) return false;
  geometry.dtype = as<THPDtype>(dtype.object)->scalar_type;
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(size.object); n++) {
    geometry.size.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(size.object, n)));
    geometry.stride.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(stride.object, n)));
  }
  geometry.offset = PyLong_AsLongLong(offset.object);
  geometry.bits = PyLong_AsLongLong(bits.object);
  return !PyErr_Occurred();
}

template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (python_error& error) {
    error.restore();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// wrap(storage, meta)
PyObject* wrap(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    Geometry geometry;
    if (count != 2 || Py_TYPE(arguments[0]) != storage_type) {
      PyErr_SetString(PyExc_TypeError, "wrap(storage, meta)");
      return nullptr;
    }
    if (!read_geometry(arguments[1], geometry)) return nullptr;
    return THPVariable_Wrap(tensor_made(storage_for(arguments[0]), geometry));
  });
}

PyObject* storage_of_object(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    Storage* storage = THPVariable_Check(object) ? storage_of(THPVariable_Unpack(object)) : nullptr;
    if (storage) return Py_NewRef(reinterpret_cast<PyObject*>(storage));
    PyErr_SetString(PyExc_AttributeError, "_storage");
    return nullptr;
  });
}

PyObject* is_remote(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    return PyBool_FromLong(THPVariable_Check(object) && storage_of(THPVariable_Unpack(object)));
  });
}

bool same_operand(const Operand& operand, PyObject* told) {
  Owned mine(operand_object(operand));
  if (!mine.object) return false;
  return Py_TYPE(mine.object) == Py_TYPE(told) && PyObject_RichCompareBool(mine.object, told, Py_EQ) == 1;
}

// offer(op name, plan, operands, view): Python's plan for the call that this thread has asked of; whether it is kept.
PyObject* offer(PyObject*, PyObject* arguments) {
  const char *name = nullptr, *overload = nullptr;
  PyObject *python, *operands, *results, *fresh, *written;
  long long id;
  int view, listed;
  if (!PyArg_ParseTuple(
          arguments, "ssOLppO!O!O!O!", &name, &overload, &python, &id, &view, &listed, &PyList_Type, &operands,
          &PyList_Type, &results, &PyList_Type, &fresh, &PyTuple_Type, &written)) {
    return nullptr;
  }
  if (!pending) Py_RETURN_FALSE;
  const size_t generation = forgotten;
  const auto* schema = pending->operation->schema;
  const Call& call = *pending->call;
  if (schema->name() != name || schema->overload_name() != overload) Py_RETURN_FALSE;
  if (static_cast<size_t>(PyList_GET_SIZE(operands)) != call.operands.size()) Py_RETURN_FALSE;
  for (size_t n = 0; n < call.operands.size(); n++) {
    PyObject* told = PyList_GET_ITEM(operands, n);
    const bool unborn = call.operands[n].tensor && told == Py_None;
    if (!unborn && !same_operand(call.operands[n], told)) Py_RETURN_FALSE;
  }
  if (plan_of(pending->operation, call.key)) Py_RETURN_FALSE;  // a call within the call has been first
  auto plan = std::make_shared<Plan>();
  plan->plan = Owned(Py_NewRef(python));
  plan->id = id;
  plan->view = view;
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(results); n++) {
    Result result{};
    PyObject* meta = nullptr;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(results, n), "iOi", &result.kind, &meta, &result.number)) return nullptr;
    if (meta != Py_None && !read_geometry(meta, result.geometry)) return nullptr;
    if (meta != Py_None) {
      Owned extent(PyObject_CallMethod(meta, "extent", nullptr));
      if (!extent.object) return nullptr;
      result.extent = PyLong_AsLongLong(extent.object);
    }
    size_t most = call.tensors.size();
    if (result.kind == FRESH) most = PyList_GET_SIZE(fresh);
    if (result.kind == NOTHING) most = 1;
    if (result.number < 0 || static_cast<size_t>(result.number) >= most) Py_RETURN_FALSE;
    plan->results.push_back(std::move(result));
  }
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(fresh); n++) {
    plan->fresh_nbytes.push_back(PyLong_AsLongLong(PyList_GET_ITEM(fresh, n)));
    plan->most_nbytes = std::max(plan->most_nbytes, plan->fresh_nbytes.back());
  }
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(written); n++) {
    const long place = PyLong_AsLong(PyTuple_GET_ITEM(written, n));
    const bool there = place >= 0 && static_cast<size_t>(place) < call.operands.size();
    if (!there || !call.operands[place].tensor) Py_RETURN_FALSE;
    plan->written_at.push_back(static_cast<int>(place));
  }
  for (const Operand& operand : call.operands) plan->operand_kinds.push_back(operand.kind());
  if (PyErr_Occurred()) return nullptr;
  const auto& returns = schema->returns();
  const bool list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  plan->listed = list;
  if (list ? !listed : plan->results.size() != returns.size()) Py_RETURN_FALSE;
  for (const Result& result : plan->results) {
    if (list && result.kind == NOTHING) Py_RETURN_FALSE;
  }
  if (planned >= most_plans) Py_RETURN_FALSE;  // Python forgets its own first
  if (generation != forgotten) Py_RETURN_FALSE;  // meanwhile, by another thread
  planned++;
  plan->serial = ++last_plan;
  plans_by_serial.emplace(plan->serial, plan);
  pending->operation->plans.emplace(
      KeyHash::hash(call.key.data(), call.key.size()),
      Entry{std::vector<uint64_t>(call.key.begin(), call.key.end()), std::move(plan)});
  Py_RETURN_TRUE;
}

PyObject* forget(PyObject*, PyObject*) {
  forgotten++;
  for (auto& [_, operation] : operations) {
    if (!operation->plans.empty()) operation->plans.clear();  // a forked process would copy the memory of the others
  }
  planned = 0;
  plans_by_serial.clear();
  templates.clear();
  if (world.tape) world.tape->segment->kept = false;
  Py_RETURN_NONE;
}

void replace(PyObject*& slot, PyObject* value) {
  PyObject* before = slot;
  slot = value && value != Py_None ? Py_NewRef(value) : nullptr;
  Py_XDECREF(before);
}

// connect(tape, record, recorded, tell, flush, settings, settings of templates). All None: Python is
// asked of each call.
PyObject* connect(PyObject*, PyObject* arguments) {
  PyObject *tape, *record, *recorded, *tell, *flush, *frames, *sequences;
  if (!PyArg_ParseTuple(
          arguments, "OOOOOOO", &tape, &record, &recorded, &tell, &flush, &frames, &sequences)) {
    return nullptr;
  }
  if (sequences != Py_None &&
      !PyArg_ParseTuple(
          sequences, "LLLLLLLLLLLLL", &settings.follow, &settings.validated, &settings.leave, &settings.check,
          &settings.free, &settings.relative, &settings.checked, &settings.seen, &settings.operations, &settings.least_words, &settings.most_words,
          &settings.most_pending_nbytes, &settings.most_pending)) {
    return nullptr;
  }
  if (frames != Py_None &&
      !PyArg_ParseTuple(
          frames, "LLLLLLL", &world.frame_commands, &world.eager_nbytes, &world.poll_mask, &world.free_batch,
          &world.most_frees, &world.free_code, &world.blank_nbytes)) {
    return nullptr;
  }
  PyObject* before = reinterpret_cast<PyObject*>(world.tape);
  world.tape = tape == Py_None ? nullptr : as<Tape>(Py_NewRef(tape));
  Py_XDECREF(before);
  replace(world.record, record);
  replace(world.recorded, recorded);
  replace(world.tell, tell);
  replace(world.flush, flush);
  forget(nullptr, nullptr);
  Py_RETURN_NONE;
}

std::vector<std::string> texts_of(PyObject* tuple) {
  std::vector<std::string> texts;
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(tuple); n++) {
    const char* text = PyUnicode_AsUTF8(PyTuple_GET_ITEM(tuple, n));
    if (text) texts.emplace_back(text);
  }
  return texts;
}

// enable(dispatch, packb, limits, hidden paths, names of what is kept whole, and of what numbers decide, most plans)
PyObject* enable(PyObject*, PyObject* arguments) {
  PyObject *dispatch, *pack, *numbers, *paths, *whole, *decided;
  long long most;
  if (!PyArg_ParseTuple(
          arguments, "OOO!O!O!O!L", &dispatch, &pack, &PyList_Type, &numbers, &PyTuple_Type, &paths, &PyTuple_Type,
          &whole, &PyTuple_Type, &decided, &most)) {
    return nullptr;
  }
  enabled = true;
  replace(dispatch_in_python, dispatch);
  replace(packb, pack);
  most_plans = static_cast<size_t>(most);
  limits.clear();
  for (Py_ssize_t n = 0; n < PyList_GET_SIZE(numbers); n++) {
    PyObject* limit = PyList_GET_ITEM(numbers, n);
    if (PyLong_Check(limit)) limits.push_back(static_cast<long double>(PyLong_AsUnsignedLongLong(limit)));
    else limits.push_back(PyFloat_AsDouble(limit));
  }
  hidden_paths = texts_of(paths);
  for (std::string& name : texts_of(whole)) kernels.whole.insert(std::move(name));
  for (std::string& name : texts_of(decided)) deciding.insert(std::move(name));
  if (PyErr_Occurred()) return nullptr;
  return guarded([&]() -> PyObject* {
    static auto* listening = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
    (void)listening;  // which is told of all that there are
    kernels.cover_all();
    Py_RETURN_NONE;
  });
}

// Operations of libraries that were imported since have kernels of ours, too.
PyObject* cover(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    kernels.cover_all();
    Py_RETURN_NONE;
  });
}

PyObject* set_recording(PyObject*, PyObject* on) {
  recording = on == Py_True;
  Py_RETURN_NONE;
}

// Python records; tensors that there are stay as they are.
PyObject* disable(PyObject*, PyObject*) {
  enabled = false;
  Py_RETURN_NONE;
}

PyObject* next_id(PyObject*, PyObject*) {
  return PyLong_FromLongLong(++last_id);
}

PyObject* born_storage(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return nullptr;
  const long long nbytes = PyLong_AsLongLong(arguments[0]), id = PyLong_AsLongLong(arguments[1]);
  return PyErr_Occurred() ? nullptr : storage_made(nbytes, id);
}

PyObject* counts(PyObject*, PyObject*) {
  return Py_BuildValue(
      "LLLL", static_cast<long long>(counted.hits), static_cast<long long>(counted.misses),
      static_cast<long long>(followed_count.commands), static_cast<long long>(followed_count.left));
}

// --- the dead, as a deque of Python

struct Dead {
  PyObject_HEAD
};

Py_ssize_t dead_length(PyObject*) {
  return static_cast<Py_ssize_t>(dead.size());
}

PyObject* told(std::pair<int64_t, int64_t> storage) {
  return Py_BuildValue("(LL)", static_cast<long long>(storage.first), static_cast<long long>(storage.second));
}

PyObject* dead_item(PyObject*, Py_ssize_t index) {
  if (index >= 0 && index < static_cast<Py_ssize_t>(dead.size())) return told(dead[index]);
  PyErr_SetString(PyExc_IndexError, "no more");
  return nullptr;
}

PyObject* dead_popleft(PyObject*, PyObject*) {
  if (dead.empty()) {
    PyErr_SetString(PyExc_IndexError, "no more");
    return nullptr;
  }
  const auto first = dead.front();
  dead.pop_front();
  return told(first);
}

PyObject* dead_add(PyObject* items, bool left) {
  Owned iterator(PyObject_GetIter(items));
  if (!iterator.object) return nullptr;
  while (PyObject* item = PyIter_Next(iterator.object)) {
    Owned owned(item);
    long long id, nbytes;
    if (!PyArg_ParseTuple(item, "LL", &id, &nbytes)) return nullptr;
    if (left) dead.emplace_front(id, nbytes);
    else dead.emplace_back(id, nbytes);
  }
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* dead_extend(PyObject*, PyObject* items) {
  return dead_add(items, false);
}

PyObject* dead_extendleft(PyObject*, PyObject* items) {
  return dead_add(items, true);
}

// --- types

template <typename Function>
void* slot(Function function) {
  return reinterpret_cast<void*>(function);
}

PyGetSetDef storage_fields[] = {
    {"id", storage_get_id, storage_set_id, nullptr, nullptr},
    {"born", storage_born, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef storage_members[] = {
    {"nbytes", T_LONGLONG, offsetof(Storage, nbytes), 0, nullptr}, {nullptr, 0, 0, 0, nullptr}};
PyType_Slot storage_slots[] = {
    {Py_tp_new, slot(storage_new)}, {Py_tp_dealloc, slot(storage_dealloc)}, {Py_tp_getset, storage_fields},
    {Py_tp_members, storage_members}, {0, nullptr}};
PyType_Spec storage_spec = {"dormouse_recorder.RemoteStorage", sizeof(Storage), 0, Py_TPFLAGS_DEFAULT, storage_slots};

PyMethodDef commands_methods[] = {
    {"extend", commands_extend, METH_O, "Append these, or nothing."},
    {"clear", commands_clear, METH_NOARGS, nullptr},
    {"framed", commands_framed, METH_O, "The frame [*head, commands]."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot commands_slots[] = {
    {Py_tp_new, slot(commands_new)}, {Py_tp_dealloc, slot(commands_dealloc)}, {Py_tp_methods, commands_methods},
    {Py_sq_length, slot(commands_length)}, {Py_sq_inplace_concat, slot(commands_iadd)}, {0, nullptr}};
PyType_Spec commands_spec = {"dormouse_recorder.Commands", sizeof(Commands), 0, Py_TPFLAGS_DEFAULT, commands_slots};

PyMethodDef sites_methods[] = {{"append", sites_append, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot sites_slots[] = {
    {Py_tp_new, slot(sites_new)}, {Py_tp_dealloc, slot(sites_dealloc)}, {Py_tp_methods, sites_methods},
    {Py_sq_length, slot(sites_length)}, {Py_sq_item, slot(sites_item)}, {0, nullptr}};
PyType_Spec sites_spec = {"dormouse_recorder.Sites", sizeof(Sites), 0, Py_TPFLAGS_DEFAULT, sites_slots};

#define NUMBER(name) {#name, T_LONGLONG, offsetof(Tape, name), 0, nullptr}
#define TRUTH(name) {#name, T_BOOL, offsetof(Tape, name), 0, nullptr}
PyMemberDef tape_members[] = {
    {"commands", T_OBJECT_EX, offsetof(Tape, commands), READONLY, nullptr},
    {"sites", T_OBJECT_EX, offsetof(Tape, sites), READONLY, nullptr},
    NUMBER(recorded), NUMBER(epoch), NUMBER(worth), NUMBER(held_nbytes), NUMBER(watched_nbytes), NUMBER(heard_nbytes),
    NUMBER(first_id), NUMBER(lease_first_id), NUMBER(created), NUMBER(holder), TRUTH(open), TRUTH(idle), TRUTH(wrote_persistent),
    {nullptr, 0, 0, 0, nullptr}};
#undef NUMBER
#undef TRUTH
PyMethodDef tape_methods[] = {
    {"take_sites", tape_take_sites, METH_NOARGS, "The sites of the frame that leaves."},
    {"begin_lease", tape_begin_lease, METH_NOARGS, nullptr},
    {"wait", tape_wait, METH_NOARGS, "Before the program waits for an answer."},
    {"stalls", tape_stalls, METH_VARARGS, "The executor never computes the command there ahead."},
    {"lose", tape_lose, METH_NOARGS, "What waits to be sent will not be."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot tape_slots[] = {
    {Py_tp_new, slot(tape_new)}, {Py_tp_dealloc, slot(tape_dealloc)}, {Py_tp_members, tape_members},
    {Py_tp_methods, tape_methods}, {0, nullptr}};
PyType_Spec tape_spec = {"dormouse_recorder.Tape", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT, tape_slots};

PyMethodDef dead_methods[] = {
    {"popleft", dead_popleft, METH_NOARGS, nullptr}, {"extend", dead_extend, METH_O, nullptr},
    {"extendleft", dead_extendleft, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot dead_slots[] = {
    {Py_sq_length, slot(dead_length)}, {Py_sq_item, slot(dead_item)}, {Py_tp_methods, dead_methods}, {0, nullptr}};
PyType_Spec dead_spec = {"dormouse_recorder.Freed", sizeof(Dead), 0, Py_TPFLAGS_DEFAULT, dead_slots};

PyMethodDef methods[] = {
    {"wrap", fast(wrap), METH_FASTCALL, "wrap(storage, meta): a tensor object."},
    {"is_remote", is_remote, METH_O, "Whether it is a tensor of ours."},
    {"storage_of", storage_of_object, METH_O, "The storage of a tensor of ours."},
    {"born_storage", fast(born_storage), METH_FASTCALL, "born_storage(nbytes, id)"},
    {"next_id", next_id, METH_NOARGS, nullptr},
    {"offer", offer, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, "All plans."},
    {"connect", connect, METH_VARARGS, nullptr},
    {"enable", enable, METH_VARARGS, nullptr},
    {"set_recording", set_recording, METH_O, "Whether calls are recorded, or only their results made."},
    {"disable", disable, METH_NOARGS, nullptr},
    {"cover", cover, METH_NOARGS, "Operations that there were not before."},
    {"counts", counts, METH_NOARGS, "Calls that a plan was followed for, and others; commands that templates had, and templates that were left."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dormouse_recorder", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_dormouse_recorder() {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  const std::pair<PyType_Spec*, PyTypeObject**> types[] = {
      {&storage_spec, &storage_type}, {&commands_spec, &commands_type}, {&sites_spec, &sites_type},
      {&tape_spec, &tape_type},       {&dead_spec, nullptr}};
  for (const auto& [spec, kept] : types) {
    PyObject* type = PyType_FromSpec(spec);
    if (!type || PyModule_AddType(module, as<PyTypeObject>(type))) return nullptr;
    if (kept) *kept = as<PyTypeObject>(type);
  }
  return module;
}
