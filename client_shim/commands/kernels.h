// The way in: PyTorch's dispatcher calls one kernel for every operation on tensors of cuda:0.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "blank.h"
#include "recording.h"

namespace {

// A call that Python is asked of, until it says what the plan is.
struct Pending {
  Operation* operation;
  const Call* call;
};
thread_local const Pending* pending = nullptr;  // of the innermost call; null: of that no plan can be kept

struct Asking {
  const Pending* outer = pending;
  explicit Asking(const Pending* mine) { pending = mine; }
  ~Asking() { pending = outer; }
};

struct Counted {
  int64_t hits = 0, misses = 0;
} counted;

std::shared_ptr<Plan> plan_of(Operation* operation, const Key& key) {
  const auto [begin, end] = operation->plans.equal_range(KeyHash::hash(key.data(), key.size()));
  for (auto each = begin; each != end; ++each) {
    const auto& known = each->second.key;
    if (known.size() == key.size() && !std::memcmp(known.data(), key.data(), key.size() * sizeof(uint64_t))) {
      return each->second.plan;
    }
  }
  return nullptr;
}

// As PyTorch gives it to `__torch_dispatch__`, where enumerations are numbers to the dispatcher.
py::object object_of(const c10::Argument& argument, const IValue& value) {
  if (value.isInt()) {
    PyObject* found = nullptr;
    switch (bare(argument.real_type())->kind()) {
      case c10::TypeKind::ScalarTypeType:
        found = reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(value.toInt())));
        break;
      case c10::TypeKind::LayoutType:
        found = reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(value.toInt())));
        break;
      case c10::TypeKind::MemoryFormatType:
        found = torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(value.toInt()));
        break;
      default:
        break;
    }
    if (found) return py::reinterpret_borrow<py::object>(found);
  }
  return torch::jit::toPyObject(value);
}

PyObject* dispatch_in_python = nullptr;

// A mode of the program's is not to see what we ask tensors.
struct WithoutTorchFunction {
  at::impl::TorchFunctionDisabledState before = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  WithoutTorchFunction() { set(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~WithoutTorchFunction() { set(before); }
  static void set(at::impl::TorchFunctionDisabledState state) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(state);
  }
};

// remote_tensor.dispatch(op, args, kwargs)
void asked(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  const auto [positional, kwarg_only] = given(schema, described(handle)->kwarg_only, values);
  py::tuple args(positional);
  py::dict kwargs;
  for (size_t n = 0; n < arguments.size(); n++) {
    if (n < positional) args[n] = object_of(arguments[n], values[n]);
    else if (n >= kwarg_only && !is_default(arguments[n], values[n])) {
      kwargs[py::cast(arguments[n].name())] = object_of(arguments[n], values[n]);
    }
  }
  torch::jit::drop(*stack, arguments.size());
  const py::handle op = torch::detail::getTorchApiFunction(handle);
  PyObject* called[] = {op.ptr(), args.ptr(), kwargs.ptr()};
  const WithoutTorchFunction quiet;
  PyObject* returned = checked(PyObject_Vectorcall(dispatch_in_python, called, 3, nullptr));
  const auto result = py::reinterpret_steal<py::object>(returned);
  const auto& returns = schema.returns();
  if (returns.size() == 1) {
    stack->push_back(torch::jit::toIValue(result, returns[0].real_type()));
  } else if (!returns.empty()) {
    const auto several = py::cast<py::sequence>(result);
    TORCH_CHECK(py::len(several) == returns.size(), schema.name(), " returned ", py::len(several), " values");
    for (size_t n = 0; n < returns.size(); n++) {
      stack->push_back(torch::jit::toIValue(several[n], returns[n].real_type()));
    }
  }
}

// What a signature does not tell: whether storages exist, or can be created here, and whether a view lies in its.
bool may_be_followed(const Plan& plan, const Call& call) {
  for (const Result& result : plan.results) {
    if (result.kind == ALIAS && result.extent > storage_of(*call.tensors[result.number])->nbytes) return false;
  }
  if (plan.view) return true;
  for (const at::Tensor* tensor : call.tensors) {
    if (!storage_of(*tensor)->id && !created(storage_of(*tensor))) return false;
  }
  return true;
}

// Whether there is a plan, which was followed. Else Python is asked, and may say what the plan is.
bool followed(const c10::OperatorHandle& handle, Operation* operation, torch::jit::Stack* stack) {
  const size_t arguments = operation->schema->arguments().size();
  const auto values = torch::jit::last(*stack, arguments);
  Call call;
  if (!world.tape || !read(call, *operation, values)) return false;
  const std::shared_ptr<Plan> plan = plan_of(operation, call.key);
  if (plan && may_be_followed(*plan, call)) {
    counted.hits++;
    run(plan.get(), call, arguments, stack);
    return true;
  }
  counted.misses++;
  call.keep();
  const Pending mine{operation, &call};
  const Asking asking(&mine);
  asked(handle, stack);
  return true;
}

bool enabled = false;

bool is_ours(const IValue& value) {
  if (value.isTensor()) return storage_of(value.toTensor());
  if (!value.isList()) return false;
  for (const IValue& item : value.toListRef()) {
    if (is_ours(item)) return true;
  }
  return false;
}

// Python's lock, which bindings have let go of.
struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernel of every operation on tensors of cuda:0.
struct Kernel final : c10::OperatorKernel {
  std::shared_ptr<Operation> operation;
  Blank blank;  // or null
  explicit Kernel(std::shared_ptr<Operation> described)
      : operation(std::move(described)), blank(blank_for(*operation->schema)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    constexpr auto COMPOSITE = c10::DispatchKey::CompositeExplicitAutograd;
    {
      const Gil gil;
      if (operation->schema != &handle.schema()) operation = described(handle);  // it was defined anew
      if (enabled && blank && blank(stack)) return;
      if (followed(handle, operation.get(), stack)) return;
      bool ours = operation->factory || !handle.hasKernelForDispatchKey(COMPOSITE) ||
          (!enabled && operation->replaced);
      const auto values = torch::jit::last(*stack, operation->schema->arguments().size());
      for (const IValue& value : values) ours = ours || is_ours(value);
      if (ours) {
        const Asking asking(nullptr);  // no plan can be kept of it
        return asked(handle, stack);
      }
    }
    handle.callBoxedForDispatchKey(COMPOSITE, *stack);  // `x.to("cuda")` of a CPU tensor
  }
};

// PyTorch's own kernels of these do all there is to do.
const auto& ALIASES = *new std::unordered_set<std::string>{"detach", "alias", "lift", "lift_fresh"};

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    const c10::TypePtr type = bare(argument.type());
    const bool list = type->kind() == c10::TypeKind::ListType;
    const c10::TypePtr element = list ? bare(type->castRaw<c10::ListType>()->getElementType()) : type;
    if (element->kind() == c10::TypeKind::TensorType) return true;
  }
  return false;
}

// Kernels under the CUDA key, which stay.
struct Kernels {
  std::unordered_set<std::string> whole;                                // composites that are not taken apart
  std::unordered_map<std::string, std::unique_ptr<torch::Library>> libraries;  // by namespace
  std::mutex noting;                                                    // libraries are loaded without the GIL, too
  std::vector<c10::OperatorName> due;                                   // operations without one, or with a later one

  // What has no tensor argument comes here if it has a kernel already, factories.py's. Of a library's operations those that it writes in Python
  // for any device run here; others have a kernel of ours, whatever it has for CUDA.
  void cover(const c10::OperatorName& name) {
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle) return;
    const bool cuda = handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    const bool factory = !takes_tensors(handle->schema());
    if (factory && !cuda) return;  // Python has registered those that there are
    const size_t colons = name.name.find("::");
    const std::string space = name.name.substr(0, colons), base = name.name.substr(colons + 2);
    if (space == "aten") {
      if (handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !whole.count(base)) return;
      if (ALIASES.count(base)) return;
    } else if (!cuda && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      return;
    } else if (!cuda && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      return;
    }
    const std::shared_ptr<Operation> operation = described(*handle);
    operation->replaced = cuda;
    operation->factory = factory;
    auto& library = libraries[space];
    if (!library) {
      library = std::make_unique<torch::Library>(
          torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, static_cast<uint32_t>(__LINE__));
    }
    const std::string full = name.overload_name.empty() ? base : base + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(operation)));
  }

  void cover_all() {
    Quiet quiet;  // PyTorch warns of the first kernel that comes before another
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    std::vector<c10::OperatorName> names;
    {
      const std::lock_guard<std::mutex> lock(noting);
      std::swap(names, due);
    }
    for (const c10::OperatorName& name : names) cover(name);
  }
};
auto& kernels = *new Kernels();

struct Listener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    const std::lock_guard<std::mutex> lock(kernels.noting);
    kernels.due.push_back(op.operator_name());
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const auto found = operations.find(&op.schema());
    if (found == operations.end()) return;
    found->second->schema = nullptr;
    operations.erase(found);
  }
};

}  // namespace
