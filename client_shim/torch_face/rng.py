"""Random numbers of cuda:0: seeds and states live with the executor, one default generator per instance and one per
`torch.Generator`.

A `torch.Generator(device="cuda")` here is a CPU generator object that passes through PyTorch's argument checks and
carries a number.
"""

import gc
import os
from typing import Any, Final, Self

import torch

from dormouse.client_shim.commands.definitions import generator_numbers
from dormouse.client_shim.torch_face.device_numbers import expect_device, named
from dormouse.client_shim.torch_face.remote_tensor import stream, world
from dormouse.schemas import stream as wire

STATE_NBYTES: Final = 1 << 16
"""More than any generator's state has."""

_free = list(range(wire.MAX_GENERATORS - 1, 0, -1))  # numbers, the next one last: a program may make one each request
_OriginalGenerator = torch.Generator
_Original: Any = torch.Generator


class CudaGenerator(torch.Generator):
    """`torch.Generator(device="cuda")`."""

    dormouse_id: int
    _seed: int
    _address: int  # of the C++ object

    def __new__(cls) -> "CudaGenerator":
        if not _free:
            gc.collect()
        if not _free:
            raise NotImplementedError(
                f"more than {wire.MAX_GENERATORS - 1} generators on cuda:0 of a Dormouse function at once"
            )
        self = cls._numbered(_free.pop())
        self.manual_seed(67280421310721)  # the seed that torch gives a new CUDA generator
        return self

    @classmethod
    def _numbered(cls, number: int) -> Self:
        """An object that stands for the executor's generator of this number."""
        self: Self = _Original.__new__(cls, "cpu")
        self.dormouse_id = number
        self._address = _Original._cdata.__get__(self)
        self._seed = 0
        generator_numbers[self._address] = number
        return self

    def __del__(self) -> None:
        if generator_numbers.pop(self._address, None) is not None:
            _free.append(self.dormouse_id)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def manual_seed(self, seed: int) -> "CudaGenerator":
        self._seed = int(seed)
        stream().seed(self.dormouse_id, self._seed)
        return self

    def seed(self) -> int:
        self.manual_seed(int(torch.randint(2**62, (), device="cpu").item()))
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_state(self) -> torch.Tensor:
        return _state(self.dormouse_id)

    def set_state(self, new_state: torch.Tensor) -> None:  # type: ignore[override]
        _set_state(self.dormouse_id, new_state)


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OriginalGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        device = named(device)
        if torch.device(device).type == "cuda":
            expect_device(device)
            return CudaGenerator()
        return _OriginalGenerator(device)


class Generator(metaclass=_GeneratorMeta):
    """Stands in for `torch.Generator`: makes ours for cuda, PyTorch's otherwise."""


class DefaultGenerator(CudaGenerator):
    """`torch.cuda.default_generators[0]`; the executor's number 0."""

    def __new__(cls) -> "DefaultGenerator":
        return cls._numbered(0)

    def __del__(self) -> None:
        pass  # lives for ever: its number is never free

    def manual_seed(self, seed: int) -> "DefaultGenerator":
        manual_seed(seed)
        return self


DEFAULT = DefaultGenerator()


def seed() -> None:
    manual_seed(int.from_bytes(os.urandom(7)))


def manual_seed(seed: int) -> None:
    DEFAULT._seed = int(seed)
    if world.stream is not None:
        world.stream.seed(0, int(seed))


def _state(generator: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(stream().wait(wire.RNG_GET, generator)), dtype=torch.uint8)


def _set_state(generator: int, state: torch.Tensor) -> None:
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        raise TypeError("RNG state must be a torch.ByteTensor")
    if state.numel() > STATE_NBYTES:
        raise RuntimeError("RNG state is wrong size")
    stream().set_rng_state(generator, bytes(state.cpu().numpy()))
    stream().wait(wire.SYNC)  # only the executor knows whether it is a state, and PyTorch says so at once


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    expect_device(device)
    return _state(0)


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    expect_device(device)
    _set_state(0, new_state)


def set_rng_state_all(new_states: Any) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
