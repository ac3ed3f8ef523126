"""What redirection costs: round trips, bytes on the wire, latency against one process. (`recording` has client time.)

A real node with one emulated GPU. ``native`` runs the same model in this process with the executor's number of
threads; both sides alternate, and every answer is compared. Times are the function's own, from the input on the host
to the answer there, and the request's. Two more ways of redirection, of two models, are those that Torpor compares
itself with (its Fig. 6): a message for each command, and to wait for each of them.
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

COMMON = """
import gc, time, torch, transformers
from dormouse.client_shim.commands import recorder
from dormouse.client_shim.stream.stream import Stream

def stream():
    return next(thing for thing in gc.get_objects() if type(thing) is Stream)

def build():
    torch.manual_seed(0)
    with torch.no_grad():
        return MODEL.eval()

def load():
    return {"model": build().to("cuda"), "stream": stream()}

def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return INPUTS

def counts(stream):
    sent_nbytes = stream.connections.sent_nbytes
    return stream.commands_recorded, stream.answers.round_trips, stream.shape_misses, sent_nbytes

def handle(state, request):
    stream = state["stream"]
    if request["way"] == "batched":
        return answer(state, request)
    each = {"unbatched": lambda: stream._connection.flush(), "synchronous": torch.cuda.synchronize}[request["way"]]
    settings = recorder.RecorderSettings(1, 1, 0, 0, 1)  # of each command it is told
    recorder.connect(stream.tape, stream.record, lambda plan, number: each(), lambda *_: False, each, settings)
    try:
        return answer(state, request)
    finally:
        stream.connect()

def answer(state, request):
    current = state["stream"]
    x = inputs(request["seed"])
    before = counts(current)
    started = time.perf_counter()
    y = state["model"](x.to("cuda"))[0]
    recorded = time.perf_counter()
    total = y.double().sum().item()
    answered = time.perf_counter()
    after = counts(current)
    commands, trips, misses, nbytes = (b - a for a, b in zip(before, after))
    return {"sum": total, "commands": commands, "trips": trips, "misses": misses, "nbytes": nbytes,
            "client_us": (recorded - started) * 1e6, "ms": (answered - started) * 1e3}
"""
MODELS = {
    "BERT-base": (
        "transformers.BertForQuestionAnswering(transformers.BertConfig())",
        "torch.randint(0, 30000, (1, 128), generator=generator)",
    ),
    "ResNet-50": (
        "transformers.ResNetModel(transformers.ResNetConfig())",
        "torch.randn(1, 3, 224, 224, generator=generator)",
    ),
    "ResNet-152": (
        "transformers.ResNetModel(transformers.ResNetConfig(depths=[3, 8, 36, 3]))",
        "torch.randn(1, 3, 224, 224, generator=generator)",
    ),
    "ViT-B": (
        "transformers.ViTModel(transformers.ViTConfig())",
        "torch.randn(1, 3, 224, 224, generator=generator)",
    ),
    "MLP": (
        "torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())))",
        "torch.randn(1, 1024, generator=generator)",
    ),
}
FIGURE_6 = ("BERT-base", "ResNet-50")
SLOWER = ("unbatched", "synchronous")
MAX = 1.02  # of native's time, and of the MLP, which takes no time, so many ms more
MAX_MS = 0.4
ONE_OPERATION = """
import torch
def load():
    return torch.arange(16.0).to("cuda")
def handle(state, request):
    return (state + 1).tolist()
"""


def source(name: str) -> str:
    model, inputs = MODELS[name]
    return COMMON.replace("MODEL", model).replace("INPUTS", inputs)


def measure(node: TestNode, name: str, repeats: int) -> dict[str, Any]:
    """Alternate one redirected and one native request."""
    text = source(name)
    function = name.lower().replace("-", "")
    node.deployed(function, text)
    native: dict[str, Any] = {}
    exec(compile(text, name, "exec"), native)
    model = native["build"]()
    ways = ("batched", *(SLOWER if name in FIGURE_6 else ()))
    times: dict[str, list[float]] = {way: [] for way in (*ways, "native")}
    answers = []
    for seed in range(repeats + 2):
        taken_s, sums = {}, []
        for way in ways:
            started = time.perf_counter()
            answer = node.result(function, {"seed": seed, "way": way})
            taken_s[way] = time.perf_counter() - started
            sums.append(answer["sum"])
            if way == "batched" and seed >= 2:  # the first learns shapes, the second is the first that knows them
                answers.append(answer)
        started = time.perf_counter()
        with torch.no_grad():
            expected = model(native["inputs"](seed))[0].double().sum().item()
        taken_s["native"] = time.perf_counter() - started
        for found in sums:
            assert abs(found - expected) <= 1e-3 * max(1.0, abs(expected)), (name, seed, found, expected)
        if seed >= 2:
            for way, seconds in taken_s.items():
                times[way].append(seconds)
    median_s = {way: statistics.median(seconds) for way, seconds in times.items()}
    commands = answers[0]["commands"]
    return {
        "commands": commands,
        "forward_us_per_command": statistics.median(a["client_us"] / a["commands"] for a in answers),
        "round_trips": max(a["trips"] for a in answers),
        "shape_misses": max(a["misses"] for a in answers),
        "wire_nbytes_per_command": statistics.median(a["nbytes"] / a["commands"] for a in answers),
        "native_ms": median_s["native"] * 1e3,
        "redirected_ms": median_s["batched"] * 1e3,
        "function_ms": (function_ms := statistics.median(a["ms"] for a in answers)),
        "function_ratio": function_ms / (median_s["native"] * 1e3),
        "ratio": median_s["batched"] / median_s["native"],
        **{f"{way}_ratio": median_s[way] / median_s["native"] for way in ways[1:]},
    }


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    repeats = 5 if args.quick else 25
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    results: dict[str, Any] = {}
    with running_node('[gpu]\ncount = 1\nmemory = "2GiB"\nthreads = 1\n') as node:
        ready = time.perf_counter()  # every process is up, the zygote warm
        node.deployed("one", ONE_OPERATION)
        node.result("one", {})
        results["first_answer_s"] = time.perf_counter() - ready
        for name in MODELS:
            results[name] = measure(node, name, repeats)
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
        times = []
        for _ in range(repeats * 8):
            started = time.perf_counter()
            assert node.result("one", {}) == [float(k + 1) for k in range(16)]
            times.append(time.perf_counter() - started)
        results["one_operation_ms"] = statistics.median(times) * 1e3
    goals = []
    for name in MODELS:
        r = results[name]
        goals += [
            Goal(
                name=f"{name}: a command with the model's own Python, µs",
                goal="(none)",
                measured=r["forward_us_per_command"],
                met=True,
            ),
            Goal(
                name=f"{name}: round trips, 1 download",
                goal="== 1",
                measured=r["round_trips"],
                met=r["round_trips"] == 1,
            ),
            *(
                Goal(name=f"{name}: {way} / native", goal="(none)", measured=r[f"{way}_ratio"], met=True)
                for way in (SLOWER if name in FIGURE_6 else ())
            ),
            Goal(name=f"{name}: bytes per command", goal="(none)", measured=r["wire_nbytes_per_command"], met=True),
        ]
    goals.append(
        Goal(
            name="deploy and first answer of a warm node, s",
            goal="<= 5",
            measured=results["first_answer_s"],
            met=results["first_answer_s"] <= 5,
        )
    )
    for name in MODELS:
        native_ms, ratio = results[name]["native_ms"], results[name]["function_ratio"]
        if name == "MLP":
            more_ms = results[name]["function_ms"] - native_ms
            goals.append(
                Goal(name="MLP: redirected, ms more", goal=f"<= {MAX_MS}", measured=more_ms, met=more_ms <= MAX_MS)
            )
        else:
            text = f"{name} ({native_ms:.0f} ms): redirected / native"
            goals.append(Goal(name=text, goal=f"<= {MAX}", measured=ratio, met=ratio <= MAX))
    one_ms = results["one_operation_ms"]
    goals.append(Goal(name="one operation, HTTP to HTTP, ms", goal="<= 0.9", measured=one_ms, met=one_ms <= 0.9))
    report(goals, args, {"results": results})


if __name__ == "__main__":
    main()
