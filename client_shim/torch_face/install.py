"""Installs the shim: after `install`, this process has a `cuda:0`.

`prepare` is the part that can be done once in the zygote, before a fork: it patches and registers, starts no thread
and runs no operation. `install` connects a prepared process to a backend.
"""

from typing import Any

import torch

from dormouse.client_shim import torch_device, torch_dispatcher, torch_private
from dormouse.client_shim.commands import composites, metas, recorder
from dormouse.client_shim.commands.handles import cpp
from dormouse.client_shim.patches import patch, undo
from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.stream.backend import Backend
from dormouse.client_shim.stream.numerics import NUMERICS
from dormouse.client_shim.stream.stream import Stream
from dormouse.client_shim.torch_face import (
    compiled,
    cuda_face,
    factories,
    fast_paths,
    files,
    forked,
    higher_order,
    lazy_modules,
    tensor_methods,
    torchscript,
)
from dormouse.client_shim.torch_face.remote_tensor import RemoteTensor, use, watch_inference_mode, world, wrap
from dormouse.core.native import RECORDER
from dormouse.schemas.messages import DeviceInfo
from dormouse.schemas.numerics import Setting

_prepared = False
_registered = False


def prepare(by_cpp: bool = True) -> None:
    """Make `cuda` exist, without anything behind it yet. Can be repeated. ``by_cpp``: commands are recorded by C++, if
    that is built.
    """
    global _prepared, _registered
    if _prepared:
        return
    torch_private.check_version()
    torch_device.install_device_guard()
    torch_private.swap_on_module_conversion(True)
    torch_private.swap_despite_weak_references(patch)
    tensor_methods.install()
    if not _registered:
        torch_private.keep_dynamo_out()
        factories.install()
        composites.install()
        _registered = True
    cuda_face.install()
    compiled.install()
    files.install()
    torchscript.install()
    fast_paths.install()
    higher_order.install(patch)
    lazy_modules.install()
    _watch_default_dtype()
    NUMERICS.notice(torch_private.bindings())
    torch_private.watch_settings(patch, _numerics_changed)
    watch_inference_mode()
    _test(RemoteTensor)
    _prepared = True
    if by_cpp:
        record_by_cpp()


def record_by_cpp() -> None:
    """Once it is built; until then, and without a compiler, Python records."""
    if cpp.module is None and (module := RECORDER.load()) is not None:
        use(module)
        torch_private.swap_on_module_conversion(False)  # these are PyTorch's own tensors: `.data =` does
        tensor_methods.install_on_tensors()
        torch_dispatcher.watch_operations(patch, module.cover)
        _test(torch.Tensor)


def _test(base: type) -> None:
    torch_private.self_test(lambda: wrap(remote_storage.kind(24), metas.intern(torch.float32, (2, 3), (1, 2))), base)
    world.inference = False  # that was the test


def prepare_unfollowed() -> None:
    """`prepare` where ``[gpu] templates`` is off."""
    recorder.template_settings = recorder.template_settings._replace(operations=0)
    prepare()


def prepare_checked() -> None:
    """`prepare` where ``[gpu] templates`` is check."""
    recorder.template_settings = recorder.template_settings._replace(checked=True)
    prepare()


def prepare_python() -> None:
    """`prepare` where the node file says so."""
    prepare(by_cpp=False)


def install(backend: Backend, device: DeviceInfo, by_cpp: bool = True) -> Stream:
    """Connect this process's cuda:0; the runner begins and ends leases on the returned stream."""
    prepare(by_cpp)
    cuda_face.connect(device)
    compiled.connect(device)
    world.stream = Stream(backend)
    if cpp.module is not None:
        world.stream.connect()
    forked.watch_forks()
    return world.stream


def uninstall() -> None:
    """Put PyTorch's attributes back. For tests; kernels registered with the dispatcher stay and do nothing for CPU
    tensors."""
    global _prepared
    undo()
    torch_private.swap_on_module_conversion(False)
    world.stream = None
    recorder.forget_plans()
    use(None)
    _prepared = False


def _numerics_changed(setting: Setting, values: list[Any]) -> None:
    if world.stream is not None:
        world.stream.set_numerics(setting, values)
    else:
        NUMERICS.set(setting, values)


def _watch_default_dtype() -> None:
    """Predictions depend on the default dtype: they are forgotten when it changes."""
    real = torch.set_default_dtype

    def set_default_dtype(d: torch.dtype, /) -> None:
        if d is not torch.get_default_dtype():
            recorder.forget_plans()
        real(d)

    patch(torch, "set_default_dtype", set_default_dtype)
