"""Sequences of commands that come again: followed by the recorder, computed ahead by the interpreter, never wrong."""

import copy
import gc
import random
import sys
import threading
from typing import Any

import pytest
import torch
from recorded_programs import CUDA, PROGRAMS

from dormouse.client_shim.commands import recorder
from dormouse.client_shim.commands.handles import cpp

BY_CPP = pytest.mark.parametrize("loopback", ["cpp"], indirect=True)
# Few operations in a row that a graph could hold, or the program has come through them when ahead begins.
NOT_REPLAYED = ("convolutions", "lstm", "in place", "shapes")
FOLLOWED = recorder.TemplateSettings(seen=1, least_words=8)


def _followed() -> tuple[int, int]:
    """Commands that templates had, and templates that were left."""
    _, _, commands, left = cpp.module.counts()
    return commands, left


def _world(loopback: Any, settings: recorder.TemplateSettings, captures: bool = False) -> Any:
    loopback.close()
    return type(loopback)(templates=settings, captures=captures)


def _until_computed(world: Any) -> None:
    """Until the executor has done all that it has heard, and all that it may do ahead."""
    done = threading.Event()
    world.node.executors[0]._inbox.put(done.set)
    assert done.wait(60)


def _templates(world: Any) -> Any:
    return world.node.executors[0].interpreter._templates


@BY_CPP
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_comes_again_is_followed_and_the_same(loopback: Any, name: str, checked: bool, captures: bool) -> None:
    make, run, given = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    world = _world(loopback, FOLLOWED._replace(checked=checked), captures)
    try:
        there = copy.deepcopy(model).to(CUDA) if model is not None else None
        world.end_lease()
        answers = []
        for _ in range(4):
            world.begin_lease()
            for _ in range(3):
                x = given.to(CUDA)
                torch.cuda.synchronize()
                before = _followed()
                answers.append(run(there, x).cpu())
            world.end_lease()
            gc.collect()
        commands, left = (now - then for now, then in zip(_followed(), before, strict=True))
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        assert left == 0
        assert commands > 0 or name == "lstm"  # one command
        compared = _templates(world).compared
        assert compared > 0 or not checked or name in ("lstm", "convolutions")  # few commands behind the first four
        replayed = world.node.executors[0].interpreter.capture_counts.replayed
        assert not world.by_cpp or replayed > 0 or name in NOT_REPLAYED
    finally:
        world.close()


class _Program:
    """A sequence of small operations on a few tensors, by chance; it runs on any device."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.steps = [self.step() for _ in range(self.random.randrange(12, 40))]

    def step(self) -> tuple[Any, ...]:
        kind = self.random.choice(("add", "mul", "matmul", "relu_", "add_", "scale", "layer", "clone", "copy_", "drop"))
        return kind, self.random.randrange(4), self.random.randrange(4), self.random.choice((0.5, 2, -1.0, 3))

    def changed(self) -> "_Program":
        """The same but for one step, or a wait, or an error."""
        other = copy.copy(self)
        other.steps = list(self.steps)
        at = self.random.randrange(len(self.steps))
        how = self.random.choice(("same",) * 6 + ("other", "left out", "wait", "write", "error"))
        if how == "other":
            other.steps[at] = self.step()
        elif how == "left out":
            del other.steps[at]
        elif how != "same":
            other.steps.insert(at, (how, self.random.randrange(4), 0, 0.25))
        return other

    def run(self, parts: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        held = list(parts)
        for kind, a, b, number in self.steps:
            x, y = held[a], held[b]
            match kind:
                case "add":
                    held[a] = x + y
                case "mul":
                    held[a] = x * y * 0.5
                case "matmul":
                    held[a] = x @ weight
                case "relu_":
                    held[a] = (x - 0.1).relu_()
                case "add_":
                    x.add_(y, alpha=0.25)
                case "scale":
                    held[a] = x * number
                case "layer":
                    held[a] = torch.nn.functional.layer_norm(x, (4,), weight[0], weight[1])
                case "clone":
                    held[b] = x.clone()
                case "copy_":
                    held[a] = torch.empty_like(x).copy_(y)
                case "drop":
                    held[a] = held[b]
                case "wait":
                    held[a] = x + x.sum().item() * 0.01
                case "write":
                    x.copy_(torch.full((3, 4), number))
                case "error":
                    raise KeyError("half-way")
        return torch.stack(held).tanh()


@BY_CPP
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_programs_that_change_by_chance(loopback: Any, seed: int, checked: bool, captures: bool) -> None:
    """Differences in the middle of what is computed ahead, right after a wait, and of what was written."""
    world = _world(loopback, FOLLOWED._replace(checked=checked), captures)
    try:
        torch.manual_seed(seed)
        weight = torch.randn(4, 4) / 2
        there = weight.to(CUDA)
        world.end_lease()
        program = _Program(seed)
        before, errors = _followed(), 0
        for round_number in range(40):
            world.begin_lease()
            for _ in range(program.random.choice((1, 1, 2))):
                given = [torch.randn(3, 4) for _ in range(4)]
                one = program.changed() if round_number > 4 else program
                sent = [part.to(CUDA) for part in given]
                if program.random.random() < 0.5:
                    torch.cuda.synchronize()
                try:
                    expected = one.run(given, weight)
                except KeyError:
                    errors += 1
                    with pytest.raises(KeyError):
                        one.run(sent, there)
                    continue
                assert torch.allclose(one.run(sent, there).cpu(), expected, atol=1e-5, equal_nan=True), round_number
            world.end_lease()
        commands, left = (now - then for now, then in zip(_followed(), before, strict=True))
        assert commands > 50
        assert left > 0
        assert errors > 0
        assert not world.by_cpp or world.node.executors[0].interpreter.capture_counts.replayed > 0
    finally:
        world.close()


@BY_CPP
def test_what_the_lease_had_before_is_foreseen_and_not_taken_for_what_is_new(loopback: Any) -> None:
    """An accumulator of a lease that has made much before it, and then of one that has made little: the number that is
    foreseen for it is that of a result."""
    world = _world(loopback, FOLLOWED)
    try:
        weight = torch.arange(4.0).add(1)
        there = weight.to(CUDA)
        world.end_lease()
        before = _followed()
        for made in (160, 160, 160, 5):
            world.begin_lease()
            part = there
            for _ in range(made):
                part = part * 0.5
            total = part * 0
            assert total.tolist() == [0.0] * 4
            for _ in range(5):
                sums = [there * 1.0]
                for _ in range(60):
                    sums.append(sums[-1] + 1.0)
                _until_computed(world)
                total.add_(sums[-1])
                assert torch.equal(torch.stack(sums).cpu(), weight + torch.arange(61.0)[:, None])
            assert torch.equal(total.cpu(), (weight + 60) * 5)
            world.end_lease()
        assert _followed()[0] - before[0] > 500
    finally:
        world.close()


@BY_CPP
@pytest.mark.parametrize("followed", [True, False])
def test_threads_record_in_turn(loopback: Any, followed: bool) -> None:
    """While one of them waits for room in the window, too."""
    world = _world(loopback, FOLLOWED._replace(operations=4 if followed else 0))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        parts = [torch.zeros(4, device=CUDA) for _ in range(3)]
        errors: list[BaseException] = []

        def add(part: torch.Tensor) -> None:
            try:
                with torch.no_grad():
                    for _ in range(3000):
                        part.add_(1)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=add, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert [part.tolist() for part in parts] == [[3000.0] * 4] * 3
    finally:
        sys.setswitchinterval(interval)
        world.close()


@BY_CPP
@pytest.mark.parametrize("count", [5460, 5461])
def test_a_sequence_of_about_the_greatest_length(loopback: Any, count: int) -> None:
    world = _world(loopback, FOLLOWED)
    try:
        ones = torch.ones(4).to(CUDA)
        world.end_lease()
        world.begin_lease()
        before = _followed()
        for _ in range(6):
            x = ones * 1.0
            for _ in range(count):
                x.add_(1.0)
            assert x.tolist() == [1.0 + count] * 4
        assert (_followed()[0] > before[0]) == (count == 5460)
    finally:
        world.close()
