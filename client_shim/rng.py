"""Random numbers of cuda:0: seeds and states live with the executor, one default generator per instance and one per
`torch.Generator`.

A `torch.Generator(device="cuda")` here is a CPU generator object that passes through PyTorch's argument checks and
carries a number.
"""

from itertools import count
from typing import Any

import torch

from dormouse.client_shim.plans import generator_numbers
from dormouse.client_shim.remote_tensor import stream, world
from dormouse.schemas import stream as wire

_numbers = count(1)
_free: list[int] = []  # numbers of generators that are gone: a program may make one for each request
_OriginalGenerator = torch.Generator
_Original: Any = torch.Generator


class CudaGenerator(torch.Generator):
    """`torch.Generator(device="cuda")`."""

    dormouse_id: int
    _seed: int
    _address: int  # of the C++ object

    def __new__(cls) -> "CudaGenerator":
        self: CudaGenerator = _Original.__new__(cls, "cpu")
        self.dormouse_id = _free.pop() if _free else next(_numbers)
        self._address = _Original._cdata.__get__(self)
        self._seed = 0
        generator_numbers[self._address] = self.dormouse_id
        self.manual_seed(67280421310721)  # the seed that torch gives a new CUDA generator
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
        stream().set_rng_state(self.dormouse_id, bytes(new_state.cpu().numpy()))


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OriginalGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type == "cuda":
            return CudaGenerator()
        return _OriginalGenerator(device)


class Generator(metaclass=_GeneratorMeta):
    """Stands in for `torch.Generator`: makes ours for cuda, PyTorch's otherwise."""


def manual_seed(seed: int) -> None:
    if world.stream is not None:
        world.stream.seed(0, int(seed))


def _state(generator: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(stream().wait(wire.RNG_GET, generator)), dtype=torch.uint8)


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return _state(0)


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    stream().set_rng_state(0, bytes(new_state.cpu().numpy()))
