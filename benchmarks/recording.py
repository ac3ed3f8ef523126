"""The function's side of a command alone: a forward whose frames are dropped, against the same forward of which nothing
is recorded, the same as a sequence of commands that came before, and native PyTorch. Kernels are tiny, and what is left
of native is PyTorch's own work; all four alternate. Two more are of a program that changes each time, after its first
forward of two: as such, and where no sequence is known. The second part is native and recorded by Python.
"""

import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgpack
import torch
from torch import nn

from benchmarks.fuzz_record import loopback
from benchmarks.report import Goal, arguments, report
from dormouse.client_shim.commands.handles import cpp
from dormouse.schemas import stream as wire


class Dropped:
    """An executor's channel that has acknowledged each frame when it is asked, and has dropped it."""

    def __init__(self, serial: int, sent: int) -> None:
        self.serial, self.sent = serial, sent
        self._replies: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.sent += 1
        self._replies.append(msgpack.packb([wire.ACK, self.serial, self.sent]))

    def recv(self, timeout_s: float) -> bytes | None:
        return self._replies.pop(0) if self._replies else None


def models() -> dict[str, tuple[nn.Module, Callable[[Any, Any], Any], torch.Tensor]]:
    """Each, how it is called, and what it is given."""
    import transformers

    torch.manual_seed(0)
    bert: Any = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=12, num_attention_heads=4, intermediate_size=64
        )
    )
    resnet: Any = transformers.ResNetModel(
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[8, 8, 8, 8], depths=[3, 4, 6, 3])
    )
    settings: dict[str, Any] = {"attn_implementation": "eager"}  # the other asks whether a mask is one of ones
    gpt2: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=12, n_head=4, n_positions=64, **settings)
    )
    stack = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())))

    return {
        "BERT-base's layers": (bert.eval(), lambda model, ids: model(ids)[0], torch.randint(100, (1, 8))),
        "ResNet-50's layers": (resnet.eval(), lambda model, image: model(image)[0], torch.randn(1, 3, 32, 32)),
        "GPT-2's layers, a step": (
            gpt2.eval(),
            lambda model, ids: model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits,
            torch.randint(100, (1, 1)),
        ),
        "stack of 300": (stack.eval(), lambda model, x: model(x), torch.randn(1, 16)),
    }


def timed_us(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun)


def measured(
    by_cpp: bool, model: nn.Module, run: Callable[[Any, Any], Any], given: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Medians, µs per command."""
    world = loopback().LoopbackWorld(by_cpp=by_cpp)
    try:
        assert world.by_cpp == by_cpp, "the library is not built: make setup"
        there, sent = copy.deepcopy(model).to("cuda"), given.to("cuda")
        world.end_lease()
        world.begin_lease()
        for _ in range(3):
            answer = run(there, sent).cpu()
        torch.testing.assert_close(answer, run(model, given), msg="the commands are those of a right answer")
        before = world.stream.commands_recorded
        run(there, sent)
        commands = world.stream.commands_recorded - before
        torch.cuda.synchronize()
        connection = world.stream._connection
        real, connection.channel = connection.channel, Dropped(connection.lease.serial, connection.number - 1)
        times: dict[str, list[float]] = {"native": [], "recorded": [], "not recorded": [], "validated": []}
        times |= {"changing": [], "unknown": []}
        followed = 0
        chance = random.Random(0)
        changes = [torch.neg, torch.abs, torch.sign, torch.exp, torch.sin, torch.cos, torch.tanh, torch.relu]

        def changing(again: bool) -> None:
            begin(again)
            change = chance.choice(changes)

            def both() -> None:
                change(run(there, sent))
                run(there, sent)

            times["changing" if again else "unknown"].append(timed_us(both) / 2)

        def begin(again: bool) -> None:
            """As after a wait; ``again``: what comes is what came before."""
            world.stream._ready()  # who waits tells of what has died
            world.stream.tape.wait()
            if not again:
                world.stream.tape.lose()

        def validated() -> None:
            nonlocal followed
            begin(True)
            before = cpp.module.counts()[2]
            times["validated"].append(timed_us(lambda: run(there, sent)))
            followed = cpp.module.counts()[2] - before

        def recorded() -> None:
            begin(False)
            times["recorded"].append(timed_us(lambda: run(there, sent)))

        def not_recorded() -> None:
            begin(False)
            cpp.module.set_recording(False)
            times["not recorded"].append(timed_us(lambda: run(there, sent)))
            cpp.module.set_recording(True)

        ways = [lambda: times["native"].append(timed_us(lambda: run(model, given))), recorded]
        if by_cpp:
            ways += [validated, not_recorded]
        for _ in range(rounds + 6):
            chance.shuffle(ways)  # who comes behind native finds caches cold
            for way in ways:
                way()
        assert not by_cpp or followed > 0.9 * commands, (followed, commands)
        for number in range(rounds if by_cpp else 0):  # behind the others: it would make them be followed later
            for again in (True, False) if number % 2 else (False, True):
                changing(again)
        connection.channel, connection.suspect = real, True
        medians = {name: statistics.median(taken[6:]) / commands for name, taken in times.items() if taken}
        return {"commands": commands} | medians
    finally:
        world.close()


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    rounds = 20 if args.quick else 200
    torch.set_num_threads(1)
    goals: list[Goal] = []
    everything: dict[str, Any] = {}
    with torch.no_grad():
        for name, (model, run, given) in models().items():
            cpp, python = (measured(way, model, run, given, rounds) for way in (True, False))
            everything[name] = {"cpp": cpp, "python": python}
            print(name, everything[name], flush=True)
            validated = cpp["validated"] - cpp["not recorded"]
            added, ratio = cpp["recorded"] - cpp["not recorded"], cpp["recorded"] / cpp["not recorded"]
            changing = cpp["changing"] / cpp["unknown"]
            goals += [
                Goal(name=f"{name}: recording a command, µs", goal="<= 0.8", measured=added, met=added <= 0.8),
                Goal(name=f"{name}: the same, validated, µs", goal="<= 0.5", measured=validated, met=validated <= 0.5),
                Goal(name=f"{name}: recorded ÷ not recorded", goal="<= 1.08", measured=ratio, met=ratio <= 1.08),
                Goal(name=f"{name}: changing ÷ recorded", goal="<= 1.05", measured=changing, met=changing <= 1.05),
                Goal(
                    name=f"{name}: recorded ÷ native", goal="(none)", measured=cpp["recorded"] / cpp["native"], met=True
                ),
                Goal(
                    name=f"{name}: by Python ÷ native",
                    goal="(none)",
                    measured=python["recorded"] / python["native"],
                    met=True,
                ),
            ]
    report(goals, args, everything)


if __name__ == "__main__":
    main()
