// A command from its plan and operands into the frame, and what the call returns.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/cpython_includes.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "templates.h"

namespace {

bool recording = true;  // false: results are made and nothing else, for benchmarks.recording

// Of the world that is connected, and what Python does when recording meets something rare.
struct World {
  Tape* tape = nullptr;
  PyObject *record = nullptr, *recorded = nullptr;  // of the stream
  PyObject *tell = nullptr, *flush = nullptr;       // likewise
  // RecorderSettings, in recorder.py
  long long frame_commands, eager_nbytes, poll_mask, free_batch, most_frees, free_code, blank_nbytes;
};
World world;
auto& hidden_paths = *new std::vector<std::string>();  // call_sites.py
auto& hidden = *new std::unordered_map<PyObject*, bool>();
constexpr size_t MAX_HIDDEN = 1 << 16;

struct Looked {
  PyObject* code = nullptr;
  bool hidden = false;
};
Looked looked[1024];  // those of `hidden` that were looked at last

bool is_hidden_slowly(PyObject* code) {
  const auto known = hidden.find(code);
  if (known != hidden.end()) return known->second;
  bool result = true;
  PyObject* name = as<PyCodeObject>(code)->co_filename;
  const char* text = PyUnicode_AsUTF8(name);
  if (!text) PyErr_Clear();
  else {
    result = text[0] == '<';
    for (const std::string& path : hidden_paths) result = result || std::strncmp(text, path.c_str(), path.size()) == 0;
  }
  if (hidden.size() >= MAX_HIDDEN) {
    std::unordered_map<PyObject*, bool> old;  // whoever waits for the death of one may record something
    std::swap(old, hidden);
    for (Looked& each : looked) each = {};
    for (auto& [kept, _] : old) Py_DECREF(kept);
  }
  Py_INCREF(code);  // its address is its name here
  hidden.emplace(code, result);
  return result;
}

bool is_hidden(PyObject* code) {
  Looked& last = looked[(reinterpret_cast<uintptr_t>(code) >> 4) % std::size(looked)];
  if (last.code != code) last = {code, is_hidden_slowly(code)};
  return last.hidden;
}

// The nearest line that is neither PyTorch's nor ours: call_sites.call_site. By what Python itself keeps of frames: to
// ask it for frame objects would make them.
std::pair<PyObject*, int> call_site() {
#if PY_VERSION_HEX >= 0x030D0000
  const _PyInterpreterFrame* frame = PyThreadState_Get()->current_frame;
#else
  const _PyInterpreterFrame* frame = PyThreadState_Get()->cframe->current_frame;
#endif
  for (; frame; frame = frame->previous) {
    auto* code = reinterpret_cast<PyObject*>(F_CODE(frame));
    if (!code || !PyCode_Check(code) || is_hidden(code)) continue;
    const auto offset = PREV_INSTR(frame) - _PyCode_CODE(as<PyCodeObject>(code));
    return {Py_NewRef(code), static_cast<int>(offset * sizeof(_Py_CODEUNIT))};
  }
  return {nullptr, 0};
}

// Storages that have died, if all are of this lease; the others Python tells of.
bool told_of_the_dead(Tape* tape) {
  if (static_cast<int64_t>(dead.size()) <= world.free_batch) return true;
  if (static_cast<int64_t>(dead.size()) >= world.most_frees) return false;
  for (const auto& [id, _] : dead) {
    if (id < tape->lease_first_id || id < tape->first_id) return false;
  }
  auto* commands = as<Commands>(tape->commands);
  keep_dead(tape);
  put_int(*commands->bytes, world.free_code);
  put_int(*commands->bytes, static_cast<int64_t>(dead.size()));
  for (const auto& [id, nbytes] : dead) {
    put_int(*commands->bytes, id);
    tape->held_nbytes -= nbytes;
    tape->heard_nbytes = std::min(tape->heard_nbytes, tape->held_nbytes);
    tape->created--;
  }
  commands->count += 2 + static_cast<int64_t>(dead.size());
  dead.clear();
  return true;
}

void put_number(std::string& bytes, const IValue& value) {
  if (value.isBool()) bytes.push_back(static_cast<char>(value.toBool() ? 0xc3 : 0xc2));
  else if (value.isInt()) put_int(bytes, value.toInt());
  else put_double(bytes, value.toDouble());
}

PyObject* operand_object(const Operand& operand) {
  if (operand.tensor) return PyLong_FromLongLong(storage_of(*operand.tensor)->id);
  if (operand.number.isBool()) return PyBool_FromLong(operand.number.toBool());
  if (operand.number.isInt()) return PyLong_FromLongLong(operand.number.toInt());
  return PyFloat_FromDouble(operand.number.toDouble());
}

// By Python: a lease is to be had, a key to be told, or another thread's turn.
int64_t recorded_by_python(Plan* plan, const Call& call) {
  const int64_t before = world.tape ? world.tape->epoch : 0;
  Owned operands(checked(PyList_New(0)));
  for (const Operand& operand : call.operands) {
    Owned item(checked(operand_object(operand)));
    checked(PyList_Append(operands.object, item.object) ? nullptr : operands.object);
  }
  Owned number(checked(PyObject_CallFunctionObjArgs(world.record, plan->plan.object, operands.object, nullptr)));
  if (world.tape && world.tape->open && world.tape->epoch == before) plan->told = before;
  return PyLong_AsLongLong(number.object);
}

void append(std::string& bytes, int64_t& count, const Plan& plan, const Call& call, int64_t first) {
  put_int(bytes, plan.id);
  for (const Operand& operand : call.operands) {
    if (operand.tensor) put_int(bytes, storage_of(*operand.tensor)->id);
    else put_number(bytes, operand.number);
  }
  for (size_t n = 0; n < plan.fresh_nbytes.size(); n++) put_int(bytes, first + static_cast<int64_t>(n));
  count += 1 + static_cast<int64_t>(call.operands.size() + plan.fresh_nbytes.size());
}

// Whether the executor is to hear how far the program has come in its template: it holds what it has computed ahead.
bool is_due(const Segment& segment, int64_t count, int64_t worth) {
  return segment.pending_nbytes > settings.most_pending_nbytes || count >= settings.most_pending ||
      (segment.stops && count >= worth);
}

// The id of its first new storage; 0 if it has none.
int64_t record(Plan* plan, const Call& call) {
  if (!recording) {
    const int64_t first = last_id + 1;
    last_id += static_cast<int64_t>(plan->fresh_nbytes.size());
    return first;
  }
  Tape* tape = world.tape;
  const bool turn = tape && (!tape->holder || tape->holder == static_cast<int64_t>(PyThread_get_thread_ident()));
  if (!turn || !tape->open) return recorded_by_python(plan, call);
  Segment& segment = *tape->segment;
  const bool before = segment.followed && as_before(tape, *plan, call);
  if (segment.followed && !before) leave(tape);
  if (!before && (plan->told != tape->epoch || !told_of_the_dead(tape))) return recorded_by_python(plan, call);
  const int64_t first = plan->fresh_nbytes.empty() ? 0 : last_id + 1;
  if (!before) {
    auto* commands = as<Commands>(tape->commands);
    append(*commands->bytes, commands->count, *plan, call, first);
    keep(tape, *plan, call, first);
  } else if (settings.checked) {
    append(segment.said, segment.said_count, *plan, call, first);
  }
  if (!tape->wrote_persistent) {
    for (const int position : plan->written_at) {
      if (storage_of(*call.operands[position].tensor)->id < tape->lease_first_id) tape->wrote_persistent = true;
    }
  }
  for (const int64_t nbytes : plan->fresh_nbytes) {
    last_id++;
    tape->created++;
    tape->held_nbytes += nbytes;
  }
  auto& sites = *as<Sites>(tape->sites)->found;
  sites.push_back(call_site());
  tape->recorded++;
  const auto count = static_cast<int64_t>(sites.size());
  const bool grown = tape->held_nbytes > tape->watched_nbytes;
  const bool told = before ? is_due(segment, count, tape->worth) : follows(tape, world.tell);
  if (told && !grown) {
    Py_DECREF(checked(PyObject_CallNoArgs(world.flush)));
    return first;
  }
  const bool due = count >= tape->worth && (tape->idle || !(count & world.poll_mask));
  const bool early = tape->idle && plan->most_nbytes >= world.eager_nbytes;
  if (grown || (!before && (count >= world.frame_commands || due || early))) {
    Owned number(checked(PyLong_FromLongLong(first)));
    Py_DECREF(checked(PyObject_CallFunctionObjArgs(world.recorded, plan->plan.object, number.object, nullptr)));
  }
  return first;
}

// What the call returns, on the stack.
void returned(const Plan& plan, const Call& call, int64_t first, std::vector<at::Tensor>& results) {
  c10::SmallVector<c10::Storage, 4> fresh;
  for (size_t slot = 0; slot < plan.fresh_nbytes.size(); slot++) {
    Owned storage(checked(storage_made(plan.fresh_nbytes[slot], first + static_cast<int64_t>(slot))));
    fresh.push_back(storage_for(storage.object));
  }
  for (const Result& result : plan.results) {
    if (result.kind == SAME) results.push_back(*call.tensors[result.number]);
    else if (result.kind == NOTHING) results.emplace_back();
    else if (result.kind == FRESH) results.push_back(tensor_made(fresh[result.number], result.geometry));
    else results.push_back(view_made(*call.tensors[result.number], result.geometry));
  }
}

void run(Plan* plan, const Call& call, size_t arguments, torch::jit::Stack* stack) {
  const int64_t first = plan->view ? 0 : record(plan, call);
  std::vector<at::Tensor> results;
  returned(*plan, call, first, results);
  torch::jit::drop(*stack, arguments);
  if (plan->listed) {
    stack->emplace_back(c10::List<at::Tensor>(results));
  } else {
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }
}

}  // namespace
