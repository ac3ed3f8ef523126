"""Reads safetensors straight to cuda: they are read on the CPU and moved.

`torch.load` needs no help: it makes the storages of `storages.py` on cuda:0.
"""

from typing import Any

import torch

from dormouse.client_shim.patches import patch
from dormouse.client_shim.torch_face.import_hooks import when_imported


def install() -> None:
    when_imported("safetensors", _patch_safetensors)
    when_imported("safetensors.torch", _patch_safetensors_torch)


def _is_cuda(location: Any) -> bool:
    if isinstance(location, int) and not isinstance(location, bool):
        return True
    return isinstance(location, str | torch.device) and torch.device(location).type == "cuda"


def _patch_safetensors(module: Any) -> None:
    real = module.safe_open

    class SafeOpen:
        """`safe_open(file, framework, device="cuda")`."""

        def __init__(self, filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> None:
            self._cuda = framework in ("pt", "torch", "pytorch") and _is_cuda(device)
            self._file = real(filename, framework, "cpu" if self._cuda else device, **kwargs)

        def __enter__(self) -> "SafeOpen":
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> Any:
            value = self._file.get_tensor(name)
            return value.to("cuda") if self._cuda else value

        def get_slice(self, name: str) -> Any:
            value = self._file.get_slice(name)
            return _Slice(value) if self._cuda else value

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    patch(module, "safe_open", SafeOpen)


class _Slice:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, index: Any) -> Any:
        return self._value[index].to("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


def _patch_safetensors_torch(module: Any) -> None:
    real_file = module.load_file

    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> dict[str, Any]:
        if _is_cuda(device):
            return {name: value.to("cuda") for name, value in real_file(filename, "cpu", **kwargs).items()}
        result: dict[str, Any] = real_file(filename, device, **kwargs)
        return result

    patch(module, "load_file", load_file)
    if getattr(module, "safe_open", None) is not None:
        import safetensors

        patch(module, "safe_open", safetensors.safe_open)
