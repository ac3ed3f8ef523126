"""C++ and Python record the same commands, with the same operands, and free the same storages: each program runs in two
worlds, more than once, so that what is recorded was seen before.
"""

import copy
import gc
from typing import Any

import pytest
import torch
from recorded_programs import CUDA, PROGRAMS

from dormouse.schemas import stream as wire


class _Log:
    """What an executor was told, with storages by the order of their first mention."""

    def __init__(self, interpreter: Any) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self._names: dict[int, int] = {}
        operation, freed = interpreter._operation, interpreter._handlers[wire.FREE]

        def told(kernel: Any, commands: list[Any], position: int) -> int:
            middle = position + kernel.n_operands
            operands = commands[position:middle]
            storages = [self._name(operands[place]) for place in kernel.tensors]
            numbers = [value for place, value in enumerate(operands) if place not in kernel.tensors]
            fresh = [self._name(number) for number in commands[middle : middle + kernel.n_fresh]]
            shapes = [(meta.dtype, meta.size, meta.stride, meta.offset) for meta in kernel.metas]
            self.lines.append((kernel.name, shapes, storages, [(type(n), n) for n in numbers], fresh))
            return int(operation(kernel, commands, position))

        def free(commands: list[Any], position: int) -> int:
            count = commands[position]
            dead = sorted(self._name(number) for number in commands[position + 1 : position + 1 + count])
            self.lines.append(("free", dead))
            return int(freed(commands, position))

        interpreter._operation, interpreter._handlers[wire.FREE] = told, free

    def _name(self, storage: int) -> int:
        return self._names.setdefault(storage, len(self._names))


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("loopback", ["cpp"], indirect=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_record_the_same(loopback: Any, name: str) -> None:
    make, run, given = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    kind = type(loopback)
    found, answers, followed = [], [], []
    loopback.close()
    for by_cpp in (True, False):
        world = kind(by_cpp=by_cpp)
        try:
            there = copy.deepcopy(model).to(CUDA) if model is not None else None
            world.end_lease()
            world.begin_lease()
            executor = world.node.executors[0]
            executor.interpreter._plans.clear()  # all is run by Python, which tells us
            executor.interpreter._plan = lambda *_: None
            gc.collect()
            x = given.to(CUDA)
            torch.cuda.synchronize()  # what earlier worlds have left is told of
            log = _Log(executor.interpreter)
            for _ in range(3):
                answer = run(there, x).cpu()
            world.end_lease()
            found.append(log.lines)
            answers.append(answer)
            followed.append(world.by_cpp and world.hits())
        finally:
            world.close()
    cpp, python = found
    assert len(cpp) > 3
    for place, (one, other) in enumerate(zip(cpp, python, strict=False)):
        assert one == other, (cpp[max(0, place - 3) : place + 4], python[max(0, place - 3) : place + 4])
    assert len(cpp) == len(python), (cpp[-3:], python[-3:])
    assert followed[0] > len(cpp) // 3, "most of it was recorded by C++"
    assert torch.equal(*answers)
