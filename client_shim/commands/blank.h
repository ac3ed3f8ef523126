// Tensors without a value: made by `empty`, filled by a copy of no bytes, created when a command names them.
#pragma once

#include <c10/core/MemoryFormat.h>

#include <cstdint>

#include "recording.h"

namespace {

using Blank = bool (*)(torch::jit::Stack* stack);

bool is_plain(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool: case at::kByte: case at::kChar: case at::kShort: case at::kInt: case at::kLong:
    case at::kHalf: case at::kBFloat16: case at::kFloat: case at::kDouble:
      return true;
    default:
      return false;
  }
}

// The options [dtype, layout, device, pin_memory] of a factory, if they are the usual ones.
bool read_options(c10::ArrayRef<IValue> values, at::ScalarType& dtype) {
  dtype = values[0].isNone() ? at::get_default_dtype_as_scalartype() : static_cast<at::ScalarType>(values[0].toInt());
  const bool strided = values[1].isNone() || static_cast<at::Layout>(values[1].toInt()) == at::kStrided;
  const bool pinned = !values[3].isNone() && values[3].toBool();
  const bool here = values[2].isDevice() && values[2].toDevice().is_cuda() && values[2].toDevice().index() <= 0;
  return strided && !pinned && here && is_plain(dtype);
}

// A tensor whose storage does not exist yet, if it is small and there is room for it: transfers.py's `_empty`.
bool make_empty(Geometry geometry, size_t arguments, torch::jit::Stack* stack) {
  int64_t last = geometry.offset;
  bool none = false;
  for (size_t n = 0; n < geometry.size.size(); n++) {
    const int64_t length = geometry.size[n], step = geometry.stride[n];
    if (length < 0 || step < 0 || length > world.blank_nbytes || step > world.blank_nbytes) return false;
    none = none || !length;
    last += length ? (length - 1) * step : 0;
    if (last > world.blank_nbytes) return false;
  }
  const int64_t nbytes = none ? 0 : (last + 1) * static_cast<int64_t>(c10::elementSize(geometry.dtype));
  if (nbytes > world.blank_nbytes) return false;
  if (!world.tape || world.tape->held_nbytes + nbytes > world.tape->watched_nbytes) return false;
  Owned storage(checked(storage_made(nbytes, 0)));
  at::Tensor made = tensor_made(storage_for(storage.object), geometry);
  torch::jit::drop(*stack, arguments);
  stack->emplace_back(std::move(made));
  return true;
}

// empty.memory_format(size, *, dtype, layout, device, pin_memory, memory_format)
bool empty_rows(torch::jit::Stack* stack) {
  const auto values = torch::jit::last(*stack, 6);
  Geometry geometry;
  if (!values[0].isIntList() || !read_options(values.slice(1, 4), geometry.dtype)) return false;
  const bool rows = values[5].isNone() || static_cast<at::MemoryFormat>(values[5].toInt()) == at::MemoryFormat::Contiguous;
  if (!rows) return false;
  for (const int64_t length : values[0].toIntList()) geometry.size.push_back(length);
  geometry.stride.resize(geometry.size.size());
  int64_t step = 1;
  for (size_t n = geometry.size.size(); n-- > 0;) {
    geometry.stride[n] = step;
    if (geometry.size[n] < 0 || geometry.size[n] > world.blank_nbytes || step > world.blank_nbytes) return false;
    step *= std::max<int64_t>(geometry.size[n], 1);
  }
  return make_empty(std::move(geometry), 6, stack);
}

// empty_strided(size, stride, *, dtype, layout, device, pin_memory)
bool empty_strided(torch::jit::Stack* stack) {
  const auto values = torch::jit::last(*stack, 6);
  Geometry geometry;
  if (!values[0].isIntList() || !values[1].isIntList() || !read_options(values.slice(2, 4), geometry.dtype)) return false;
  for (const int64_t length : values[0].toIntList()) geometry.size.push_back(length);
  for (const int64_t step : values[1].toIntList()) geometry.stride.push_back(step);
  return geometry.size.size() == geometry.stride.size() && make_empty(std::move(geometry), 6, stack);
}

// copy_(self, source, non_blocking): of no bytes, from the CPU.
bool copy_nothing(torch::jit::Stack* stack) {
  const auto values = torch::jit::last(*stack, 3);
  const at::Tensor &target = values[0].toTensor(), &source = values[1].toTensor();
  if (!storage_of(target) || target.numel() || !source.defined() || !source.is_cpu()) return false;
  if (source.layout() != at::kStrided || source.sizes() != target.sizes()) return false;
  torch::jit::drop(*stack, 2);
  return true;
}

// What does an operation that leaves nothing to record.
Blank blank_for(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::empty" && schema.overload_name() == "memory_format") return empty_rows;
  if (schema.name() == "aten::empty_strided" && schema.overload_name().empty()) return empty_strided;
  if (schema.name() == "aten::copy_" && schema.overload_name().empty()) return copy_nothing;
  return nullptr;
}

// Have the executor make a small storage, before a command names it: as remote_tensor.py's `create`.
bool created(Storage* storage) {
  if (storage->nbytes > world.blank_nbytes) return false;
  static const auto zeros = c10::Dispatcher::singleton().findSchemaOrThrow("aten::zeros", "");
  torch::jit::Stack stack{
      c10::List<int64_t>({storage->nbytes}), static_cast<int64_t>(at::kByte), IValue(),
      c10::Device(c10::kCUDA, 0), IValue()};
  zeros.callBoxedForDispatchKey(c10::DispatchKey::CUDA, stack);
  Storage* made = storage_of(stack.back().toTensor());
  std::swap(storage->id, made->id);
  return storage->id;
}

}  // namespace
