// The frame that is being filled: tape.py in C++.
#pragma once

#include <structmember.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "storages.h"

namespace {

// Elements of a frame's command array, as msgpack writes them.
struct Tape;
struct Segment;
struct Commands {
  PyObject_HEAD
  std::string* bytes;
  int64_t count;
  Tape* tape;  // whose they are, if anybody's
};
void settle(Commands* commands);  // templates.h
void said_between(Commands* commands);
PyTypeObject* commands_type = nullptr;
PyObject* packb = nullptr;

template <typename T>
void put(std::string& bytes, uint8_t code, T value) {
  char text[1 + sizeof(T)] = {static_cast<char>(code)};
  for (size_t n = 0; n < sizeof(T); n++) text[1 + n] = static_cast<char>(value >> (8 * (sizeof(T) - 1 - n)));
  bytes.append(text, sizeof(text));
}

void put_int(std::string& bytes, int64_t value) {
  if (value >= 0) {
    const auto size = static_cast<uint64_t>(value);
    if (size < 0x80) bytes.push_back(static_cast<char>(size));
    else if (size <= 0xff) put<uint8_t>(bytes, 0xcc, size);
    else if (size <= 0xffff) put<uint16_t>(bytes, 0xcd, size);
    else if (size <= 0xffffffff) put<uint32_t>(bytes, 0xce, size);
    else put<uint64_t>(bytes, 0xcf, size);
  } else if (value >= -0x20) bytes.push_back(static_cast<char>(value));
  else if (value >= INT8_MIN) put<uint8_t>(bytes, 0xd0, static_cast<uint8_t>(value));
  else if (value >= INT16_MIN) put<uint16_t>(bytes, 0xd1, static_cast<uint16_t>(value));
  else if (value >= INT32_MIN) put<uint32_t>(bytes, 0xd2, static_cast<uint32_t>(value));
  else put<uint64_t>(bytes, 0xd3, static_cast<uint64_t>(value));
}

void put_double(std::string& bytes, double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  put<uint64_t>(bytes, 0xcb, bits);
}

bool put_object(std::string& bytes, PyObject* item) {
  int overflow = 0;
  if (PyLong_CheckExact(item)) {
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (!overflow) {
      put_int(bytes, value);
      return true;
    }
  } else if (PyFloat_CheckExact(item)) {
    put_double(bytes, PyFloat_AS_DOUBLE(item));
    return true;
  }
  Owned packed(PyObject_CallOneArg(packb, item));
  if (!packed.object) return false;
  bytes.append(PyBytes_AS_STRING(packed.object), PyBytes_GET_SIZE(packed.object));
  return true;
}

// All of it, or nothing.
PyObject* commands_extend(PyObject* object, PyObject* items) {
  auto* self = as<Commands>(object);
  Owned sequence(PySequence_Fast(items, "commands are a sequence"));
  if (!sequence.object) return nullptr;
  std::string bytes;  // while Python packs an item, a finalizer may record a command of its own
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.object);
  for (Py_ssize_t n = 0; n < count; n++) {
    if (!put_object(bytes, PySequence_Fast_GET_ITEM(sequence.object, n))) return nullptr;
  }
  settle(self);
  said_between(self);
  self->bytes->append(bytes);
  self->count += count;
  Py_RETURN_NONE;
}

PyObject* commands_iadd(PyObject* object, PyObject* items) {
  Owned done(commands_extend(object, items));
  return done.object ? Py_NewRef(object) : nullptr;
}

Py_ssize_t commands_length(PyObject* object) {
  settle(as<Commands>(object));
  return as<Commands>(object)->count;
}

PyObject* commands_clear(PyObject* object, PyObject*) {
  as<Commands>(object)->bytes->clear();
  as<Commands>(object)->count = 0;
  Py_RETURN_NONE;
}

// framed(head): the frame [*head, commands] for a list of less than 15 items.
PyObject* commands_framed(PyObject* object, PyObject* head) {
  auto* self = as<Commands>(object);
  Owned packed(PyObject_CallOneArg(packb, head));
  if (!packed.object) return nullptr;
  settle(self);
  std::string frame(PyBytes_AS_STRING(packed.object), PyBytes_GET_SIZE(packed.object));
  frame[0]++;
  if (self->count < 16) frame.push_back(static_cast<char>(0x90 | self->count));
  else if (self->count <= 0xffff) put<uint16_t>(frame, 0xdc, self->count);
  else put<uint32_t>(frame, 0xdd, self->count);
  Owned whole(PyBytes_FromStringAndSize(nullptr, frame.size() + self->bytes->size()));
  if (!whole.object) return nullptr;
  std::memcpy(PyBytes_AS_STRING(whole.object), frame.data(), frame.size());
  std::memcpy(PyBytes_AS_STRING(whole.object) + frame.size(), self->bytes->data(), self->bytes->size());
  return Py_NewRef(whole.object);
}

PyObject* commands_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made) as<Commands>(made)->bytes = new std::string();
  return made;
}

void commands_dealloc(PyObject* object) {
  delete as<Commands>(object)->bytes;
  freed_object(object);
}

// Which lines issued the operations of a frame: code objects and instruction offsets, as call_sites.py has them.
struct Sites {
  PyObject_HEAD
  std::vector<std::pair<PyObject*, int>>* found;  // null: no such line
};
PyTypeObject* sites_type = nullptr;

PyObject* sites_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made) as<Sites>(made)->found = new std::vector<std::pair<PyObject*, int>>();
  return made;
}

void sites_dealloc(PyObject* object) {
  for (auto& [code, offset] : *as<Sites>(object)->found) Py_XDECREF(code);
  delete as<Sites>(object)->found;
  freed_object(object);
}

Py_ssize_t sites_length(PyObject* object) {
  return static_cast<Py_ssize_t>(as<Sites>(object)->found->size());
}

PyObject* sites_item(PyObject* object, Py_ssize_t index) {
  const auto& found = *as<Sites>(object)->found;
  if (index < 0 || index >= static_cast<Py_ssize_t>(found.size())) {
    PyErr_SetString(PyExc_IndexError, "no such command");
    return nullptr;
  }
  const auto& [code, offset] = found[index];
  return code ? Py_BuildValue("(Oi)", code, offset) : Py_NewRef(Py_None);
}

PyObject* sites_append(PyObject* object, PyObject* site) {
  PyObject* code = nullptr;
  int offset = 0;
  if (site != Py_None && !PyArg_ParseTuple(site, "Oi", &code, &offset)) return nullptr;
  Py_XINCREF(code);
  as<Sites>(object)->found->emplace_back(code, offset);
  Py_RETURN_NONE;
}

// What recording a command touches, see tape.py.
struct Tape {
  PyObject_HEAD
  PyObject *commands, *sites;
  int64_t recorded, epoch, worth, held_nbytes, watched_nbytes, heard_nbytes, first_id, lease_first_id, created, holder;
  char open, idle, wrote_persistent;
  Segment* segment;
};
PyTypeObject* tape_type = nullptr;

// The sites of the frame that leaves; those of the next one are empty.
PyObject* tape_take_sites(PyObject* object, PyObject*) {
  PyObject* fresh = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(sites_type));
  if (!fresh) return nullptr;
  PyObject* taken = as<Tape>(object)->sites;
  as<Tape>(object)->sites = fresh;
  return taken;
}

}  // namespace
