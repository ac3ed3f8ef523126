"""`torch.cuda` as a program sees it: one device, answered from a snapshot taken when the instance starts.

Only `synchronize` asks the executor, and only while a lease is held. Nothing here records an operation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch

from dormouse.client_shim import torch_device
from dormouse.client_shim.commands.room import LARGE_SHARE, Room
from dormouse.client_shim.patches import nothing, patch
from dormouse.client_shim.torch_face import (
    accelerator_face,
    cuda_memory,
    cuda_streams,
    cuda_tools,
    rng,
    tensor_types,
)
from dormouse.client_shim.torch_face.cuda_tools import refuse
from dormouse.client_shim.torch_face.device_numbers import expect_device
from dormouse.client_shim.torch_face.device_properties import DeviceProperties
from dormouse.client_shim.torch_face.import_hooks import when_imported
from dormouse.client_shim.torch_face.tensor_methods import no_backward
from dormouse.schemas.messages import DeviceInfo

CUDA: Final = "13.0"
"""`torch.version.cuda` where the GPU is emulated: that of PyTorch 2.13's own build for CUDA."""

UNCONNECTED: Final = DeviceInfo(
    name="Dormouse virtual GPU", total_nbytes=8 << 30, capability=(8, 0), multiprocessors=108, cuda=CUDA
)

_device = UNCONNECTED


def _of_device(answer: Callable[[DeviceInfo], Any]) -> Any:
    def query(device: Any = None) -> Any:
        expect_device(device)
        return answer(_device)

    return query


def install() -> None:
    """Patch `torch.cuda`; safe before a fork (starts no thread, runs no operation)."""
    cuda: Any = torch.cuda
    patch(torch.version, "cuda", _device.cuda or CUDA)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "_lazy_call": lambda function, **kwargs: function(),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "_device_count_nvml": lambda: 1,
        "current_device": lambda: 0,
        "set_device": expect_device,
        "get_device_name": _of_device(lambda info: info.name),
        "get_device_capability": _of_device(lambda info: info.capability),
        "get_device_properties": _of_device(DeviceProperties),
        "can_device_access_peer": _can_access,
        "get_arch_list": lambda: ["sm_{}{}".format(*_device.capability)],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or _device.capability >= (8, 0),
        "is_tf32_supported": lambda: _device.capability >= (8, 0),
        "ipc_collect": nothing,
        "device": _DeviceContext,
        "device_of": _DeviceOf,
        "_DeviceGuard": _DeviceContext,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "_compile_kernel": refuse("compiling a CUDA kernel", "Use PyTorch's own operations."),
        "cudart": refuse("torch.cuda.cudart()", "Use PyTorch's own operations."),
    }
    answers |= cuda_memory.answers()
    answers |= {
        "manual_seed": rng.manual_seed,
        "manual_seed_all": rng.manual_seed,
        "seed": rng.seed,
        "seed_all": rng.seed,
        "initial_seed": lambda: rng.DEFAULT.initial_seed(),
        "default_generators": (rng.DEFAULT,),
        "get_rng_state": rng.get_rng_state,
        "set_rng_state": rng.set_rng_state,
        "get_rng_state_all": lambda: [rng.get_rng_state()],
        "set_rng_state_all": rng.set_rng_state_all,
    }
    for name, answer in answers.items():
        patch(cuda, name, answer)
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):
        # As the real ones, they only fail once the kernel is called: libraries define kernels that they never use.
        kernel = refuse("a CUDA kernel made by torch.cuda.jiterator", "Use PyTorch's own operations.")
        patch(cuda.jiterator, name, lambda *args, kernel=kernel, **kwargs: kernel)
    for module, names in ((cuda.memory, cuda.memory.__all__), (cuda.random, cuda.random.__all__)):
        for name in names:
            if name in answers:
                patch(module, name, answers[name])
    patch(torch, "Generator", rng.Generator)
    # Else an LSTM is moved to the GPU by an operation of cuDNN's, in a torch that has that.
    patch(torch, "_use_cudnn_rnn_flatten_weight", lambda: False)
    cuda_streams.install()
    cuda_tools.install()
    tensor_types.install()
    accelerator_face.install()
    _install_refusals()


def connect(device: DeviceInfo) -> None:
    global _device
    _device = device
    patch(Room, "large_nbytes", device.total_nbytes // LARGE_SHARE)
    cuda_memory.connect(device.total_nbytes)
    patch(torch.version, "cuda", device.cuda or CUDA)


def _can_access(device: Any, peer_device: Any) -> bool:
    expect_device(device)
    expect_device(peer_device)
    return False


class _DeviceContext(nullcontext[None]):
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        expect_device(device)
        self.idx = 0


class _DeviceOf(_DeviceContext):
    """`torch.cuda.device_of(tensor)`."""

    def __init__(self, obj: Any = None) -> None:
        super().__init__(None)
        self.idx = 0 if isinstance(obj, torch.Tensor) and obj.is_cuda else -1


@contextmanager
def _refusing() -> Iterator[None]:
    """A backward pass that begins on the CPU and reaches operations of cuda:0 fails with words of PyTorch's own."""
    try:
        yield
    except RuntimeError as error:
        if any(text in str(error) for text in torch_device.NO_ACCELERATOR):
            no_backward()
        raise


def _install_refusals() -> None:
    autograd: Any = torch.autograd
    real_backward, real_grad = autograd.backward, autograd.grad

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if first.is_cuda:
            no_backward()
        with _refusing():
            real_backward(tensors, *args, **kwargs)

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (outputs, inputs):
            first = value if isinstance(value, torch.Tensor) else next(iter(value))
            if first.is_cuda:
                no_backward()
        with _refusing():
            return real_grad(outputs, inputs, *args, **kwargs)

    patch(autograd, "backward", backward)
    patch(autograd, "grad", grad)
    extension = refuse(
        "building a C++ or CUDA extension",
        "Its kernels would have to be in the GPU's executor; use PyTorch's own operations.",
    )

    def refuse_extensions(module: Any) -> None:
        for name in ("load", "load_inline"):
            patch(module, name, extension)

    when_imported("torch.utils.cpp_extension", refuse_extensions)  # importing it here would slow every start
