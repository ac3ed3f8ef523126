"""An instance's random numbers on one GPU: generators of its own, so that no other instance's draws can be seen in
them."""

from typing import Any

import torch

from dormouse.gpuserver.commands.definitions import ProtocolViolation
from dormouse.gpuserver.commands.storages import CommandFailed, StorageFailure
from dormouse.schemas import stream as wire


class Generators:
    """The generators of an instance, by number: 0 is the default one; others come into being when they are seeded."""

    def __init__(self, device: torch.device, default: torch.Generator) -> None:
        self._device = device
        self._by_number = {0: default}

    def get(self, number: int) -> torch.Generator:
        generator = self._by_number.get(number)
        if generator is None:
            raise ProtocolViolation(f"generator {number} was never seeded")
        return generator

    def seed(self, number: int, seed: int) -> None:
        if number not in self._by_number:
            if len(self._by_number) >= wire.MAX_GENERATORS:
                raise ProtocolViolation("too many generators")
            self._by_number[number] = torch.Generator(self._device)
        self._by_number[number].manual_seed(seed)

    def state(self, number: int) -> bytes:
        return bytes(self.get(number).get_state().numpy())

    def set_state(self, number: int, state: Any) -> None:
        generator = self.get(number)
        if not isinstance(state, bytes):
            raise ProtocolViolation("a generator's state that is not bytes")
        # The size of a state depends on the device: a program may well have one of another.
        if len(state) != generator.get_state().numel():
            raise CommandFailed(StorageFailure("RuntimeError", "RNG state is wrong size"))
        try:
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        except RuntimeError as error:
            raise CommandFailed(StorageFailure("RuntimeError", str(error))) from None

    def device_default(self) -> torch.Generator:
        """PyTorch's own generator, for the operations that draw from it and take no other."""
        if self._device.type == "cuda":
            generators: Any = torch.cuda.default_generators
            return generators[self._device.index or 0]  # type: ignore[no-any-return]
        return torch.default_generator
