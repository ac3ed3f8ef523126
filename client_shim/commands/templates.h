// Sequences of commands between two waits, as they were last time.
//
// A program mostly does what it did before. A sequence that came twice is told to the executor, and when it begins a
// third time, only how far the program has come in it: the executor computes ahead (gpuserver/commands/templates.py).
// The program decides all the same; whatever it does otherwise is sent as ever.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frames.h"
#include "plans.h"

namespace {

constexpr size_t MAX_TEMPLATES = 256;
constexpr int MAX_NEEDED = 64;
constexpr size_t MAX_OLDS = 256;
constexpr int64_t OLD = -(int64_t{1} << 42);  // the first storage that the lease had before; the next one is below
constexpr size_t MAX_STALLS = 32;  // of several executors

// How the number of a storage that the lease had before is foreseen: it was so the last times.
enum Foreseen { BY_DISTANCE, BY_LEASE, BY_NUMBER };

// Where a segment was.
struct Sight {
  std::vector<int64_t> olds;  // what the lease had before
  int64_t base = 0, lease = 0;
};

struct Template {
  // Its commands: serials of plans for their keys, and storages of the lease as `word_of` has them.
  std::vector<int64_t> words;
  Sight last;
  std::vector<Foreseen> foreseen;  // of `last.olds`
  uint64_t hash = 0;
  int64_t id = 0;    // 0: it has not come often enough
  int64_t told = 0;  // the epoch in which the executor knew it
  long long seen = 0;    // times in a row
  long long needed = 0;  // of these; more for one that keeps changing
  uint64_t used = 0;
  std::vector<size_t> stalls;  // where the executor never goes ahead
};

// What was recorded since the last wait.
struct Segment {
  std::vector<int64_t> words;  // unless a template is followed
  std::shared_ptr<Template> followed;
  size_t position = 0, validated = 0;  // in it: where the program is, and what the executor was told
  int64_t pending_nbytes = 0;          // of results since a frame left
  bool stops = false;                  // the executor does not pass, ahead, what came since
  bool kept = true;                    // false: it is not like any other
  std::string said;                    // what VALIDATED stands for, if both ends compare
  int64_t said_count = 0;
  int operations = 0;                  // sent as ever
  int64_t base = 0;                    // the last id before it
  std::vector<int64_t> olds;           // what the lease had before it, in the order in which it is met, or is to be
  uint64_t before = 0;                 // hash of the segment before, 0 if it is the lease's first
  uint64_t key = 0;                    // of its first operations, and of `before`
};

// Constants of the wire and of the stream, see TemplateSettings in recorder.py.
struct TemplateSettings {
  long long follow, validated, leave, check, free, relative;
  long long checked;                // both ends compare
  long long seen;                   // times that one comes before it is followed
  long long operations;             // which come first, by which it is known
  long long least_words, most_words;
  long long most_pending_nbytes, most_pending;  // results and operations of which the executor is not told
};
TemplateSettings settings;
auto& templates = *new std::unordered_map<uint64_t, std::shared_ptr<Template>>();
int64_t last_template = 0;
uint64_t template_clock = 0;
struct {
  int64_t commands = 0, left = 0;
} followed_count;

uint64_t hash_of(const std::vector<int64_t>& words, uint64_t before) {
  return KeyHash::hash(reinterpret_cast<const uint64_t*>(words.data()), words.size()) * 31 + before;
}

void put_control(Tape* tape, std::initializer_list<int64_t> words) {
  auto* commands = as<Commands>(tape->commands);
  for (const int64_t word : words) put_int(*commands->bytes, word);
  commands->count += static_cast<int64_t>(words.size());
}

// Before anything else is appended, and before a frame leaves: how far the program has come.
void settle(Commands* commands) {
  Tape* tape = commands->tape;
  if (!tape || !tape->segment->followed) return;
  Segment& segment = *tape->segment;
  if (segment.validated == segment.position) return;
  segment.validated = segment.position;
  segment.pending_nbytes = 0;
  segment.stops = false;
  const auto position = static_cast<int64_t>(segment.position);
  if (!settings.checked) return put_control(tape, {settings.validated, position});
  put_control(tape, {settings.check, position});
  put<uint32_t>(*commands->bytes, 0xdd, segment.said_count);
  commands->bytes->append(segment.said);
  commands->count++;
  segment.said.clear();
  segment.said_count = 0;
}

// Other commands between those of a template: what is computed ahead may need them.
void said_between(Commands* commands) {
  Tape* tape = commands->tape;
  if (tape && tape->segment->followed) tape->segment->stops = true;
}

// What VALIDATED stands for.
void say(Segment& segment, std::initializer_list<int64_t> words) {
  if (!settings.checked) return;
  for (const int64_t word : words) put_int(segment.said, word);
  segment.said_count += static_cast<int64_t>(words.size());
}

// Storages of the model by their numbers, those of the segment by distance from its first, and what the lease had
// before by the order in which it is met here.
int64_t word_of(Tape* tape, int64_t id) {
  Segment& segment = *tape->segment;
  if (id < tape->lease_first_id) return id;
  if (id > segment.base) return id - segment.base - settings.relative;
  size_t place = 0;
  while (place < segment.olds.size() && segment.olds[place] != id) place++;
  if (place == segment.olds.size()) segment.olds.push_back(id);
  return OLD - static_cast<int64_t>(place);
}

int64_t word_of(Tape* tape, const Operand& operand) {
  if (operand.tensor) return word_of(tape, storage_of(*operand.tensor)->id);
  if (!operand.number.isDouble()) return operand.number.isBool() ? operand.number.toBool() : operand.number.toInt();
  return static_cast<int64_t>(bits_of(operand.number.toDouble()));
}

// How many storages that the lease had before are among these.
size_t olds_in(const std::vector<int64_t>& words) {
  size_t met = 0, at = 0;
  const auto meet = [&met](int64_t word) { met = std::max(met, word <= OLD ? static_cast<size_t>(OLD - word) + 1 : 0); };
  while (at < words.size()) {
    const int64_t code = words[at++];
    if (code == settings.free) {
      for (int64_t left = words[at++]; left > 0; left--) meet(words[at++]);
      continue;
    }
    const auto found = plans_by_serial.find(code);
    if (found == plans_by_serial.end()) return met;  // plans were forgotten, and templates with them
    for (const int kind : found->second->operand_kinds) {
      if (kind == Operand::STORAGE) meet(words[at]);
      at++;
    }
    at += found->second->fresh_nbytes.size();
  }
  return met;
}

// The program does something else: from here on it says so.
void leave(Tape* tape) {
  Segment& segment = *tape->segment;
  settle(as<Commands>(tape->commands));
  put_control(tape, {settings.leave});
  const auto& words = segment.followed->words;
  segment.words.assign(words.begin(), words.begin() + static_cast<std::ptrdiff_t>(segment.position));
  segment.olds.resize(std::min(olds_in(segment.words), segment.olds.size()));
  segment.followed = nullptr;
  followed_count.left++;
}

// Storages that the template frees before the next operation, if all of them have died.
bool same_dead(Tape* tape) {
  Segment& segment = *tape->segment;
  const auto& words = segment.followed->words;
  while (segment.position < words.size() && words[segment.position] == settings.free) {
    const size_t count = static_cast<size_t>(words[segment.position + 1]), first = segment.position + 2;
    if (count > dead.size()) return false;
    for (size_t n = 0; n < count; n++) {
      if (word_of(tape, dead[n].first) != words[first + n]) return false;
    }
    say(segment, {settings.free, static_cast<int64_t>(count)});
    for (size_t n = 0; n < count; n++) {
      say(segment, {dead.front().first});
      tape->held_nbytes -= dead.front().second;
      tape->heard_nbytes = std::min(tape->heard_nbytes, tape->held_nbytes);
      tape->created--;
      dead.pop_front();
    }
    segment.position = first + count;
  }
  return segment.position < words.size();
}

// Whether the command is the template's next, which need not be sent.
bool as_before(Tape* tape, const Plan& plan, const Call& call) {
  Segment& segment = *tape->segment;
  if (segment.followed->told != tape->epoch || !same_dead(tape)) return false;
  const int64_t* words = segment.followed->words.data() + segment.position;
  if (*words++ != plan.serial) return false;
  for (const Operand& operand : call.operands) {
    if (*words++ != word_of(tape, operand)) return false;
  }
  for (size_t n = 0; n < plan.fresh_nbytes.size(); n++) {
    if (*words++ != word_of(tape, last_id + 1 + static_cast<int64_t>(n))) return false;
  }
  for (const size_t place : segment.followed->stalls) segment.stops = segment.stops || place == segment.position;
  segment.position = static_cast<size_t>(words - segment.followed->words.data());
  for (const int place : plan.written_at) {
    if (storage_of(*call.operands[place].tensor)->id < tape->lease_first_id) segment.stops = true;
  }
  for (const int64_t nbytes : plan.fresh_nbytes) segment.pending_nbytes += nbytes;
  followed_count.commands++;
  return true;
}

// A command that was sent, with the ids that it has made.
void keep(Tape* tape, const Plan& plan, const Call& call, int64_t first) {
  Segment& segment = *tape->segment;
  segment.operations++;
  const bool large = static_cast<long long>(segment.words.size()) > settings.most_words;
  if (large || segment.olds.size() > MAX_OLDS) segment.kept = false;
  if (!segment.kept) return;
  segment.words.push_back(plan.serial);
  for (const Operand& operand : call.operands) segment.words.push_back(word_of(tape, operand));
  for (size_t n = 0; n < plan.fresh_nbytes.size(); n++) {
    segment.words.push_back(word_of(tape, first + static_cast<int64_t>(n)));
  }
}

void keep_dead(Tape* tape) {
  Segment& segment = *tape->segment;
  if (!segment.kept) return;
  segment.words.push_back(settings.free);
  segment.words.push_back(static_cast<int64_t>(dead.size()));
  for (const auto& [id, _] : dead) segment.words.push_back(word_of(tape, id));
}

// Words as the executor is told them, and of each key among them Python's plan. An empty one if plans were forgotten.
Owned told_words(const Template& known, PyObject* plans) {
  Owned words(checked(PyList_New(0)));
  const auto push = [&words](PyObject* made) {
    Owned word(checked(made));
    checked(PyList_Append(words.object, word.object) ? nullptr : words.object);
  };
  size_t at = 0;
  while (at < known.words.size()) {
    const int64_t code = known.words[at++];
    if (code == settings.free) {
      push(PyLong_FromLongLong(code));
      const int64_t count = known.words[at];
      for (int64_t n = 0; n <= count; n++) push(PyLong_FromLongLong(known.words[at++]));
      continue;
    }
    const auto found = plans_by_serial.find(code);
    if (found == plans_by_serial.end()) return Owned(checked(PyList_New(0)));
    const Plan& plan = *found->second;
    push(PyLong_FromLongLong(plan.id));
    checked(PyList_Append(plans, plan.plan.object) ? nullptr : plans);
    for (const int kind : plan.operand_kinds) {
      const int64_t word = known.words[at++];
      double real;
      std::memcpy(&real, &word, sizeof(real));
      if (kind == Operand::REAL) push(PyFloat_FromDouble(real));
      else if (kind == Operand::TRUTH) push(PyBool_FromLong(word));
      else push(PyLong_FromLongLong(word));
    }
    for (size_t n = 0; n < plan.fresh_nbytes.size(); n++) push(PyLong_FromLongLong(known.words[at++]));
  }
  return words;
}

// What the lease had before, and a template uses: as far as it was met, and as it will probably be.
std::vector<int64_t> foreseen(const Template& known, const Sight& now) {
  std::vector<int64_t> olds = now.olds;
  for (size_t n = olds.size(); n < known.last.olds.size(); n++) {
    int64_t id = known.last.olds[n];
    if (known.foreseen[n] == BY_DISTANCE) id += now.base - known.last.base;
    if (known.foreseen[n] == BY_LEASE) id += now.lease - known.last.lease;
    olds.push_back(id > 0 && id <= now.base ? id : 0);  // 0 is none
  }
  return olds;
}

// How what the lease had before would have been foreseen; false if it would not.
bool foresee(Template& known, const Sight& now) {
  if (now.olds.size() != known.last.olds.size()) return false;
  known.foreseen.clear();
  for (size_t n = 0; n < now.olds.size(); n++) {
    const int64_t before = known.last.olds[n], id = now.olds[n];
    if (id - now.base == before - known.last.base) known.foreseen.push_back(BY_DISTANCE);
    else if (id - now.lease == before - known.last.lease) known.foreseen.push_back(BY_LEASE);
    else if (id == before) known.foreseen.push_back(BY_NUMBER);
    else return false;
  }
  return true;
}

// The first operations were sent: whether those of a template are likely to follow. `tell` has the executor know it.
bool follows(Tape* tape, PyObject* tell) {
  Segment& segment = *tape->segment;
  if (segment.operations != settings.operations || !segment.kept) return false;
  segment.key = hash_of(segment.words, segment.before);
  const auto found = templates.find(segment.key);
  if (found == templates.end()) return false;
  const std::shared_ptr<Template> known = found->second;
  known->used = ++template_clock;
  const auto& words = known->words;
  if (!known->id || words.size() <= segment.words.size()) return false;
  if (!std::equal(segment.words.begin(), segment.words.end(), words.begin())) return false;
  std::vector<int64_t> olds = foreseen(*known, {segment.olds, segment.base, tape->lease_first_id});
  if (known->told != tape->epoch) {
    const int64_t before = tape->epoch;
    const auto length = segment.words.size();
    const uint64_t key = segment.key;
    Owned plans(checked(PyList_New(0)));
    Owned told = told_words(*known, plans.object);
    Owned done(checked(PyObject_CallFunction(tell, "LOO", static_cast<long long>(known->id), told.object, plans.object)));
    if (done.object != Py_True || tape->epoch != before) return false;
    known->told = before;
    const bool same = segment.key == key && segment.words.size() == length && segment.kept && !segment.followed;
    if (!same || segment.operations != settings.operations) return false;  // another thread has had its turn
  }
  segment.followed = known;
  segment.position = segment.validated = segment.words.size();
  put_control(tape, {settings.follow, known->id, segment.base, static_cast<int64_t>(segment.position)});
  auto* commands = as<Commands>(tape->commands);
  put<uint16_t>(*commands->bytes, 0xdc, static_cast<uint16_t>(olds.size()));
  for (const int64_t old : olds) put_int(*commands->bytes, old);
  commands->count++;
  segment.olds = std::move(olds);
  return true;
}

void forget_oldest() {
  auto oldest = templates.begin();
  for (auto each = templates.begin(); each != templates.end(); ++each) {
    if (each->second->used < oldest->second->used) oldest = each;
  }
  if (oldest != templates.end()) templates.erase(oldest);
}

// What a segment was, for the next time.
void learn(Tape* tape) {
  Segment& segment = *tape->segment;
  if (segment.followed && segment.position == segment.followed->words.size()) {
    segment.before = segment.followed->hash;
    segment.followed->needed = settings.seen;
    return;
  }
  if (segment.followed) leave(tape);
  const uint64_t hash = hash_of(segment.words, 0);
  const auto length = static_cast<long long>(segment.words.size());
  if (segment.kept && segment.key && length >= settings.least_words && length <= settings.most_words) {
    auto& known = templates[segment.key];
    if (!known) {
      known = std::make_shared<Template>();
      known->needed = settings.seen;
    }
    Sight now{segment.olds, segment.base, tape->lease_first_id};
    if (known->words != segment.words || !foresee(*known, now)) {
      if (known->id) known->needed = std::min<long long>(2 * known->needed, MAX_NEEDED);
      known->id = known->told = known->seen = 0;
      known->words = segment.words;
      known->foreseen.assign(segment.olds.size(), BY_DISTANCE);
      known->stalls.clear();
    }
    known->last = std::move(now);
    known->used = ++template_clock;
    known->hash = hash;
    if (++known->seen >= known->needed && !known->id) known->id = ++last_template;
    if (templates.size() > MAX_TEMPLATES) forget_oldest();
  }
  segment.before = hash;
}

// The program waits, and begins another segment; or a lease begins, and the first.
void begin_segment(Tape* tape, bool first) {
  Segment& segment = *tape->segment;
  if (first) segment.before = 0;
  else {
    settle(as<Commands>(tape->commands));
    learn(tape);
  }
  segment.words.clear();
  segment.followed = nullptr;
  segment.position = segment.validated = 0;
  segment.pending_nbytes = segment.operations = segment.said_count = 0;
  segment.said.clear();
  segment.olds.clear();
  segment.stops = false;
  segment.kept = true;
  segment.key = 0;
  segment.base = last_id;
}

PyObject* tape_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  auto* tape = as<Tape>(made);
  tape->commands = PyObject_CallNoArgs(as<PyObject>(reinterpret_cast<PyObject*>(commands_type)));
  tape->sites = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(sites_type));
  if (!tape->commands || !tape->sites) return nullptr;
  as<Commands>(tape->commands)->tape = tape;
  tape->segment = new Segment();
  tape->first_id = ++last_id;
  tape->lease_first_id = 1;
  return made;
}

void tape_dealloc(PyObject* object) {
  if (as<Tape>(object)->commands) as<Commands>(as<Tape>(object)->commands)->tape = nullptr;
  delete as<Tape>(object)->segment;
  Py_XDECREF(as<Tape>(object)->commands);
  Py_XDECREF(as<Tape>(object)->sites);
  freed_object(object);
}

PyObject* tape_begin_lease(PyObject* object, PyObject*) {
  begin_segment(as<Tape>(object), true);
  Py_RETURN_NONE;
}

PyObject* tape_wait(PyObject* object, PyObject*) {
  begin_segment(as<Tape>(object), false);
  Py_RETURN_NONE;
}

PyObject* tape_stalls(PyObject*, PyObject* arguments) {
  long long number, position;
  if (!PyArg_ParseTuple(arguments, "LL", &number, &position)) return nullptr;
  for (auto& [_, known] : templates) {
    const bool more = known->id == number && number && known->stalls.size() < MAX_STALLS;
    if (more && position >= 0) known->stalls.push_back(static_cast<size_t>(position));
  }
  Py_RETURN_NONE;
}

// What waits to be sent will not be.
PyObject* tape_lose(PyObject* object, PyObject*) {
  Segment& segment = *as<Tape>(object)->segment;
  segment.followed = nullptr;
  segment.kept = false;
  Py_RETURN_NONE;
}

}  // namespace
