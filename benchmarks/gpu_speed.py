"""How fast a function is beside native PyTorch on a GPU: Torpor's eight models, one token of GPT-2, a small MLP.

Native eager, native `torch.compile(mode="reduce-overhead")`, and a function on a node four ways: its commands
recorded, followed by templates, captured as CUDA graphs, and compiled (``[gpu] compile``). Beside them Torpor's
Figure 6: a message for each command, and to wait for each of them. All ways of a model alternate, and every answer is
compared with native eager's.

Times are the function's own, from the input on the host to the answer there; ``request`` is from the HTTP request to
its answer. Compiling comes last, while there is time; all ways but Figure 6's are then measured anew beside it. `make
gpu-speed` runs it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any, Final

from benchmarks.gpu_models import MODELS, difference, source
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report
from dormouse.gpuserver.device.cuda.probe import device_memory_is_host_memory

WAYS: Final = """
def load():
    model, inputs = build(1)
    return {"model": (model, inputs), "compiled": (torch.compile(model), inputs)}

def handle(states, request):
    from dormouse.client_shim.commands import recorder
    from dormouse.client_shim.torch_face.remote_tensor import world
    way, seed = request
    stream = world.stream
    each = {"unbatched": lambda: stream._connection.flush(), "synchronous": torch.cuda.synchronize}.get(way)
    if each is not None:
        settings = recorder.RecorderSettings(1, 1, 0, 0, 1)  # of each command it is told
        recorder.connect(stream.tape, stream.record, lambda plan, number: each(), lambda *_: False, each, settings)
    recorded, began = stream.commands_recorded, time.perf_counter()
    try:
        answer, issued_ms = forward(states["compiled" if way == "compiled" else "model"], seed)
    finally:
        if each is not None:
            stream.connect()
    spent_ms = (time.perf_counter() - began) * 1e3
    commands = stream.commands_recorded - recorded
    return {"answer": answer, "ms": spent_ms, "issued_ms": issued_ms, "commands": commands}
"""

NATIVE: Final = """
import json, sys
torch.set_num_threads(1)
states = {"eager": build(1)}
for line in sys.stdin:
    way, seed = json.loads(line)
    if way not in states:
        states[way] = torch.compile(states["eager"][0], mode="reduce-overhead"), states["eager"][1]
    began = time.perf_counter()
    answer, issued_ms = forward(states[way], seed)
    spent_ms = (time.perf_counter() - began) * 1e3
    print(json.dumps({"answer": answer, "ms": spent_ms, "issued_ms": issued_ms}), flush=True)
"""

SECTION: Final = (
    '[gpu]\ncount = 1\ndevice = "cuda"\nmemory = "{memory}"\nactivations = "512MiB"\nthreads = 1\n'
    'templates = "{templates}"\ngraphs = "{graphs}"\ncompile = {compiled}\n'
)
NODES: Final = {
    "recorded": {"templates": "off", "graphs": "off", "compiled": "false"},
    "replayed": {"templates": "on", "graphs": "off", "compiled": "false"},
    "captured": {"templates": "on", "graphs": "on", "compiled": "false"},
    "compiled": {"templates": "on", "graphs": "off", "compiled": "true"},
}
FIGURE_6: Final = ("unbatched", "synchronous")  # on the node of "recorded"
EAGER: Final = "eager"
REDUCED: Final = "reduce-overhead"
LAUNCH_BOUND: Final = ("GPT-2-step", "MLP")
WARM: Final = 10  # requests: a template is followed from about the fifth on
BUILD_S: Final = 90.0  # so long a graph of one model may take


class Native:
    """A model in a process of its own, which answers as it is asked."""

    def __init__(self, model: str, device: str) -> None:
        command = [sys.executable, "-c", source(model, device) + NATIVE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, way: str, seed: int) -> dict[str, Any]:
        """Raises RuntimeError: the process has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([way, seed]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"native PyTorch ({way}) ended with {process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()


class Model:
    """One of them, all ways in turn."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.function = name.lower()
        self.native = Native(name, device)
        self.code = source(name, "cuda") + WAYS
        self.worst: dict[str, float] = {}

    def ask(self, way: str, seed: int, nodes: dict[str, TestNode]) -> dict[str, Any]:
        if way in (EAGER, REDUCED):
            return self.native.ask(way, seed)
        node = nodes["recorded" if way in FIGURE_6 else way]
        began = time.perf_counter()
        told: dict[str, Any] = node.result(self.function, [way, seed])
        return told | {"request": (time.perf_counter() - began) * 1e3}

    def measure(self, ways: tuple[str, ...], nodes: dict[str, TestNode], rounds: int) -> dict[str, Any]:
        """Of each way, medians in ms; and how far its answers are from native eager's at most."""
        times: dict[str, list[dict[str, Any]]] = {way: [] for way in (EAGER, *ways)}
        for seed in range(WARM + rounds):
            expected: list[float] = []
            for way, found in times.items():
                told = self.ask(way, seed, nodes)
                if way == EAGER:
                    expected = told["answer"]
                self.worst[way] = max(self.worst.get(way, 0.0), difference(told.pop("answer"), expected))
                if seed >= WARM:
                    found.append(told)
        result: dict[str, Any] = {}
        for way, found in times.items():
            numbers = {name: statistics.median(each[name] for each in found) for name in found[0]}
            result[way] = numbers | {"difference": self.worst[way]}
        return result

    def wait_for_build(self, nodes: dict[str, TestNode]) -> None:
        """Until a call is one command. Raises RuntimeError."""
        deadline_s, seed = time.monotonic() + BUILD_S, 0
        plain = self.ask("replayed", 0, nodes)["commands"]
        while (commands := self.ask("compiled", seed, nodes)["commands"]) > max(2, plain // 8):
            seed += 1
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"after {BUILD_S:g} s a forward still has {commands} commands")


def goals_of(results: dict[str, dict[str, Any]]) -> list[Goal]:
    found = []

    def goal(name: str, way: str, beside: str, most: float | None) -> None:
        ways = results[name]
        if not all("ms" in ways.get(each, {}) for each in (way, beside)):
            return
        ratio = ways[way]["ms"] / ways[beside]["ms"]
        text = "(none)" if most is None else f"<= {most}"
        found.append(Goal(name=f"{name}: {way} ÷ {beside}", goal=text, measured=ratio, met=ratio <= (most or ratio)))

    for name in results:
        goal(name, "recorded", EAGER, None)
        goal(name, "replayed", EAGER, 1.0)
        goal(name, "captured", EAGER, 0.5 if name in LAUNCH_BOUND else None)
        goal(name, "compiled", EAGER, 0.5 if name in LAUNCH_BOUND else None)
        goal(name, "compiled", REDUCED, 1.2)
        for way in FIGURE_6:
            goal(name, way, "recorded", None)
    return found


def main(args: argparse.Namespace) -> None:
    import torch

    began_s = time.monotonic()
    device = "cuda" if not device_memory_is_host_memory() and torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, Any]] = {}

    def tell(name: str, found: dict[str, Any]) -> None:
        results.setdefault(name, {}).update(found)
        print(name, json.dumps(found), flush=True)
        if args.out is not None:  # as it goes: the next one may be the one that does not end
            args.out.write_text(json.dumps({"results": results}, indent=1) + "\n")

    models: list[Model] = []  # that work
    with ExitStack() as running:
        nodes = {
            way: running.enter_context(running_node(SECTION.format(memory=args.memory, **settings)))
            for way, settings in NODES.items()
        }
        for name in args.models.split(","):
            model = Model(name, device)
            running.callback(model.native.close)
            try:
                for node in nodes.values():
                    node.deployed(model.function, model.code)
                ways = (
                    "recorded",
                    "replayed",
                    "captured",
                    *(FIGURE_6 if model.name in args.figure6.split(",") else ()),
                )
                tell(name, model.measure(ways, nodes, args.rounds))
                models.append(model)
            except (RuntimeError, AssertionError) as error:  # the others are worth having
                tell(name, {"failed": str(error)[:1000]})
        for model in models:
            if time.monotonic() - began_s > args.seconds:
                tell(model.name, {"compiled": {"not tried": f"{args.seconds:g} s were over"}})
                continue
            try:
                model.native.ask(REDUCED, 0)
                model.wait_for_build(nodes)
                tell(model.name, model.measure(("recorded", "replayed", REDUCED, "compiled"), nodes, args.rounds))
            except (RuntimeError, AssertionError) as error:
                tell(model.name, {"compiled": {"failed": str(error)[:1000]}})
    report(goals_of(results), args, {"results": results})
    if any("failed" in found for found in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", default=",".join((*LAUNCH_BOUND, *reversed(MODELS))))
    parser.add_argument(
        "--figure6", default="ResNet-152,BERT-base", help="models of which Torpor's Figure 6 is measured"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each way, after those that warm up")
    parser.add_argument("--memory", default="6GiB", help="of each node on the GPU")
    parser.add_argument("--seconds", type=float, default=300.0, help="after so many nothing more is compiled")
    main(parser.parse_args())
