// Calls that Python has planned, by their signatures.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "storages.h"

namespace {

using c10::IValue;

constexpr int FRESH = 0, ALIAS = 1, SAME = 2, NOTHING = 3;  // kinds of results, as recorder.py numbers them

struct Result {
  int kind;
  int number;  // slot, or operand counted over tensors
  Geometry geometry;
  int64_t extent = 0;  // bytes that its storage must have
};

struct Plan {
  Owned plan;  // of Python
  int64_t id = 0;
  int64_t serial = 0;  // of this signature: several may have one id
  int64_t told = 0;  // the epoch in which the executor knew it
  int64_t most_nbytes = 0;
  bool view = false, listed = false;
  std::vector<int64_t> fresh_nbytes;
  std::vector<int> written_at;
  std::vector<int> operand_kinds;
  std::vector<Result> results;
};

struct Operand {
  const at::Tensor* tensor = nullptr;
  IValue number;  // otherwise

  enum Kind { STORAGE, WHOLE, REAL, TRUTH };
  Kind kind() const {
    if (tensor) return STORAGE;
    return number.isDouble() ? REAL : number.isBool() ? TRUTH : WHOLE;
  }
};

using Key = c10::SmallVector<uint64_t, 48>;

struct KeyHash {
  size_t operator()(const std::vector<uint64_t>& key) const { return hash(key.data(), key.size()); }
  static size_t hash(const uint64_t* words, size_t count) {
    uint64_t value = 0x9E3779B97F4A7C15ull ^ count;
    for (size_t n = 0; n < count; n++) {
      value = (value ^ words[n]) * 0xFF51AFD7ED558CCDull;
      value ^= value >> 32;
    }
    return value;
  }
};

// Plans of one operation by signature. Chained by hand, because keys to look up with are not vectors.
struct Entry {
  std::vector<uint64_t> key;
  std::shared_ptr<Plan> plan;  // whoever follows it keeps it: another thread may forget all
};

struct Operation {
  const c10::FunctionSchema* schema = nullptr;
  std::vector<char> number;         // arguments that are Scalars
  bool numbers_by_position = false; // some of them have defaults, and may be left out with those behind
  size_t kwarg_only = 0;            // where they begin
  bool replaced = false;            // it had another kernel under the CUDA key, in Python
  bool factory = false;             // it makes a tensor from no other
  bool numbers_in_key = false;      // they decide the result's shape
  std::unordered_multimap<size_t, Entry> plans;
};

// These are never destroyed: by then there is no Python.
auto& operations = *new std::unordered_map<const c10::FunctionSchema*, std::shared_ptr<Operation>>();
auto& plans_by_serial = *new std::unordered_map<int64_t, std::shared_ptr<Plan>>();
int64_t last_plan = 0;
auto& limits = *new std::vector<long double>();  // numbers.py
auto& deciding = *new std::unordered_set<std::string>();  // operations whose numbers decide shapes: operations.py
size_t planned = 0, most_plans = 60000, forgotten = 0;

std::shared_ptr<Operation> described(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema* schema = &handle.schema();
  auto& found = operations[schema];
  if (!found) {
    found = std::make_shared<Operation>();
    found->schema = schema;
    found->kwarg_only = schema->arguments().size();
    found->numbers_in_key = deciding.count(schema->name());
    for (size_t n = 0; n < schema->arguments().size(); n++) {
      const auto& argument = schema->arguments()[n];
      found->number.push_back(bare(argument.real_type())->kind() == c10::TypeKind::NumberType);
      if (argument.kwarg_only() && n < found->kwarg_only) found->kwarg_only = n;
      if (!argument.kwarg_only() && found->number.back() && argument.default_value()) found->numbers_by_position = true;
    }
  }
  return found;
}

// --- signatures

enum Tag : uint64_t {
  IS_NONE = 1, IS_DEFAULT, IS_TENSOR, IS_NUMBER, IS_INT, IS_DOUBLE, IS_BOOL, IS_STRING, IS_DEVICE, IS_INTS,
  IS_DOUBLES, IS_BOOLS, IS_TENSORS, IS_SHARED
};

struct Call {
  bool numbers_in_key;
  Key key;
  c10::SmallVector<Operand, 6> operands;
  c10::SmallVector<const at::Tensor*, 6> tensors;
  std::vector<at::Tensor> kept;

  // From now on the arguments may leave the stack.
  void keep() {
    kept.reserve(tensors.size());
    size_t next = 0;
    for (Operand& operand : operands) {
      if (!operand.tensor) continue;
      kept.push_back(*operand.tensor);
      operand.tensor = tensors[next++] = &kept.back();
    }
  }
};

// numbers.magnitude
uint64_t magnitude(long double value, bool whole) {
  if (!std::isfinite(static_cast<double>(value)) && !whole) return static_cast<uint64_t>(-1);
  const long double size = value < 0 ? (whole ? -1 - value : -value) : value;
  const auto place = std::lower_bound(limits.begin(), limits.end(), size) - limits.begin();
  return static_cast<uint64_t>(value >= 0 || whole ? place : -2 - place);
}

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

bool sign_number(Call& call, const IValue& value) {
  uint64_t kind = 0;
  long double size = 0;
  bool whole = true;
  if (value.isBool()) {
    kind = 1;
    size = value.toBool();
  } else if (value.isInt()) {
    kind = 2;
    size = value.toInt();
  } else if (value.isDouble()) {
    kind = 3;
    size = value.toDouble();
    whole = false;
  } else {
    return false;
  }
  const bool small = size >= 0 && size < 128;
  const uint64_t sign = size < 0 ? 1 << 13 : 0;
  call.key.push_back(IS_NUMBER | kind << 8 | (small ? 0 : (magnitude(size, whole) & 0xffff) << 16 | 1 << 12 | sign));
  if (call.numbers_in_key) {
    call.key.push_back(whole ? static_cast<uint64_t>(static_cast<int64_t>(size)) : bits_of(value.toDouble()));
  } else {
    call.operands.push_back({nullptr, value});
  }
  return true;
}

bool sign_tensor(Call& call, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    call.key.push_back(IS_NONE);
    return true;
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) {
    if (!impl->is_cpu() || impl->dim() != 0) return false;
    switch (tensor.scalar_type()) {
      case at::kLong:
        return sign_number(call, IValue(*tensor.const_data_ptr<int64_t>()));
      case at::kDouble:
        return sign_number(call, IValue(*tensor.const_data_ptr<double>()));
      case at::kBool:
        return sign_number(call, IValue(*tensor.const_data_ptr<bool>()));
      default:
        return false;
    }
  }
  if (!storage_of(tensor)) return false;
  const auto size = tensor.sizes(), stride = tensor.strides();
  call.key.push_back(
      IS_TENSOR | static_cast<uint64_t>(tensor.scalar_type()) << 8 | static_cast<uint64_t>(size.size()) << 16 |
      static_cast<uint64_t>(bits_of(tensor)) << 24);
  for (const int64_t length : size) call.key.push_back(static_cast<uint64_t>(length));
  for (const int64_t step : stride) call.key.push_back(static_cast<uint64_t>(step));
  call.key.push_back(static_cast<uint64_t>(tensor.storage_offset()));
  call.operands.push_back({&tensor, IValue()});
  call.tensors.push_back(&tensor);
  return true;
}

void sign_length(Call& call, uint64_t tag, size_t length) {
  call.key.push_back(tag | static_cast<uint64_t>(length) << 8);
}

bool sign(Call& call, const IValue& value, bool number) {
  if (value.isNone()) {
    call.key.push_back(IS_NONE);
  } else if (value.isTensor()) {
    return sign_tensor(call, value.toTensor());
  } else if (number) {
    return sign_number(call, value);
  } else if (value.isInt()) {
    call.key.push_back(IS_INT);
    call.key.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    call.key.push_back(IS_BOOL | static_cast<uint64_t>(value.toBool()) << 8);
  } else if (value.isDouble()) {
    call.key.push_back(IS_DOUBLE);
    call.key.push_back(bits_of(value.toDouble()));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    call.key.push_back(IS_STRING | text.size() << 8);
    for (const char letter : text) call.key.push_back(static_cast<uint64_t>(static_cast<uint8_t>(letter)));
  } else if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    if (!device.is_cuda() || device.index() > 0) return false;
    call.key.push_back(IS_DEVICE);
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    sign_length(call, IS_INTS, list.size());
    for (const int64_t item : list) call.key.push_back(static_cast<uint64_t>(item));
  } else if (value.isDoubleList()) {
    const auto list = value.toDoubleList();
    sign_length(call, IS_DOUBLES, list.size());
    for (const double item : list) call.key.push_back(bits_of(item));
  } else if (value.isBoolList()) {
    const auto list = value.toBoolList();
    sign_length(call, IS_BOOLS, list.size());
    for (const bool item : list) call.key.push_back(item);
  } else if (value.isTensorList() || value.isList()) {
    const auto list = value.toListRef();
    sign_length(call, IS_TENSORS, list.size());
    for (const IValue& item : list) {
      if (item.isNone()) call.key.push_back(IS_NONE);
      else if (!item.isTensor() || !sign_tensor(call, item.toTensor())) return false;
    }
  } else {
    return false;
  }
  return true;
}

// What has its default value Python is not given (parseIValuesToPyArgsKwargs).
bool is_default(const c10::Argument& argument, const IValue& value) {
  return argument.default_value().has_value() && !(*argument.default_value() != value);
}

// How many arguments are given by position, and from where on by name.
std::pair<size_t, size_t> given(const c10::FunctionSchema& schema, size_t kwarg_only, c10::ArrayRef<IValue> values) {
  size_t positional = kwarg_only;
  while (positional > 0 && is_default(schema.arguments()[positional - 1], values[positional - 1])) positional--;
  return {positional, kwarg_only};
}

// Whether the call is one that plans may be kept of: with tensors of ours, if any, and plain literals. A Scalar that
// Python is not given is no operand.
bool read(Call& call, const Operation& operation, c10::ArrayRef<IValue> values) {
  const auto& arguments = operation.schema->arguments();
  call.numbers_in_key = operation.numbers_in_key;
  const size_t kwarg_only = operation.kwarg_only;
  const size_t positional =
      operation.numbers_by_position ? given(*operation.schema, kwarg_only, values).first : kwarg_only;
  for (size_t n = 0; n < values.size(); n++) {
    const bool number = operation.number[n];
    if (number && (n < kwarg_only ? n >= positional : is_default(arguments[n], values[n]))) {
      call.key.push_back(IS_DEFAULT);
    } else if (!sign(call, values[n], number)) {
      return false;
    }
  }
  // Which operands are one tensor, or parts of one storage: what is written may also be read.
  for (size_t n = 1; n < call.tensors.size(); n++) {
    for (size_t m = 0; m < n; m++) {
      if (storage_of(*call.tensors[m]) != storage_of(*call.tensors[n])) continue;
      call.key.push_back(IS_SHARED | n << 8 | m << 32 | (call.tensors[m]->is_same(*call.tensors[n]) ? 1 << 7 : 0));
      break;
    }
  }
  return operation.factory || !call.tensors.empty();
}

}  // namespace
