"""Models whose kernels are tiny, so that launches are what counts: the forward alone on a real node,
with templates, without them, by Python alone, and in one process without redirection; with --compiled also by
`torch.compile`, whose graph is one command. All of them alternate, and every answer is compared. Beside them the
executor's processor time on the node, and an interpreter alone, which runs the frames of one forward again and again.
"""

import copy
import statistics
import time
from contextlib import ExitStack
from typing import Any, Final

import torch

from benchmarks.dashboard import spent_s
from benchmarks.fuzz_record import loopback
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report
from dormouse.client_shim.commands import recorder

COMMON: Final = """
import time, torch, transformers

def build():
    torch.manual_seed(0)
    return MODEL.eval()

def inputs(seed):
    torch.manual_seed(seed)
    return INPUTS

def forward(model, given):
    found = model(given)
    return found if isinstance(found, torch.Tensor) else found[0]

def load():
    return build().to("cuda")

@torch.no_grad()
def handle(model, request):
    given = inputs(request["seed"]).to("cuda")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    answer = forward(model, given).cpu()
    return {"ms": 1e3 * (time.perf_counter() - begun), "sum": answer.double().sum().item()}
"""

COMPILED: Final = """
from dormouse.client_shim.commands.handles import cpp
plain = handle

def load():
    return torch.compile(build().to("cuda"))

def handle(model, request):
    before = cpp.module.counts()[0]
    return plain(model, request) | {"commands": cpp.module.counts()[0] - before}
"""
BUILD_S: Final = 90.0  # so long a graph may take

BERT: Final = (
    "transformers.BertModel(transformers.BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=12, "
    "num_attention_heads=4, intermediate_size=64))"
)
GPT2: Final = (
    "transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=12, n_head=4, "
    "n_positions=64, attn_implementation='eager', bos_token_id=0, eos_token_id=0))"
)
RESNET: Final = "transformers.ResNetModel(transformers.ResNetConfig(embedding_size=4, hidden_sizes=[8] * 4))"
STACK: Final = (
    "torch.nn.Sequential(*(layer for _ in range(100) "
    "for layer in (torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.ReLU())))"
)
MODELS: Final = {
    "bert": (BERT, "torch.randint(100, (1, 8))", 153),
    "resnet": (RESNET, "torch.randn(1, 3, 32, 32)", 173),
    "gpt2-step": (GPT2, "torch.randint(100, (1, 1))", 255),
    "stack": (STACK, "torch.randn(1, 16)", 300),
}
"""What each is, what it is given, and its commands."""

NODE: Final = (
    '[gpu]\ncount = 1\ndevice = "host"\nmemory = "1GiB"\nthreads = 1\nfast_path = {}\ntemplates = "{}"\ncompile = {}\n'
)
WAYS: Final = {
    "followed": ("true", "on", "false"),
    "fast": ("true", "off", "false"),
    "python": ("false", "off", "false"),
    "compiled": ("true", "on", "true"),
}
OTHERS: Final = "without templates", "by Python alone", "compiled"
WARM: Final = 8  # forwards: a sequence is followed from about the fifth on


def alone_us(native: dict[str, Any], model: torch.nn.Module, rounds: int) -> dict[str, float]:
    """The interpreter's time for a forward, kernels included, by both ways in turn: its table is each time as it was
    before the first.
    """
    world = loopback().LoopbackWorld(templates=recorder.TemplateSettings(operations=0))
    try:
        there, given = copy.deepcopy(model).to("cuda"), native["inputs"](0)
        world.end_lease()
        world.begin_lease()
        executor = world.node.executors[0]
        interpreter = executor.interpreter
        table, frames = interpreter.table.by_id, list[bytes]()
        for _ in range(3):  # the first learns shapes
            sent = given.to("cuda")
            torch.cuda.synchronize()
            before, number = dict(table), interpreter._replies.frame
            executor.frames, executor.keep_frames = [], True
            answer = native["forward"](there, sent).cpu()
            frames = executor.frames
        assert torch.equal(answer, native["forward"](model, given)), "the frames are those of a right answer"
        plans = {"fast": interpreter._plans, "python": {}}
        times: dict[str, list[float]] = {way: [] for way in plans}
        for _ in range(rounds):
            for way, those in plans.items():
                table.clear()
                table.update(before)
                interpreter._replies.frame, interpreter._plans = number, those
                begun = time.perf_counter()
                for frame in frames:
                    interpreter.execute(frame)
                times[way].append(1e6 * (time.perf_counter() - begun))
        return {way: statistics.median(taken) for way, taken in times.items()}
    finally:
        world.close()


def is_built(node: TestNode, name: str) -> bool:
    """Once a forward is one command; False if that does not come."""
    deadline_s = time.monotonic() + BUILD_S
    while node.result(name, {"seed": 0})["commands"] != 1:
        if time.monotonic() > deadline_s:
            return False
    return True


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--compiled", action="store_true", help="a build takes half a minute for each model")
    args = parser.parse_args()
    ways = {way: on for way, on in WAYS.items() if args.compiled or way != "compiled"}
    rounds = 10 if args.quick else 60
    torch.set_num_threads(1)
    goals: list[Goal] = []
    everything: dict[str, Any] = {}
    natives: dict[str, tuple[dict[str, Any], torch.nn.Module]] = {}
    with ExitStack() as running, torch.no_grad():
        nodes = {way: running.enter_context(running_node(NODE.format(*on))) for way, on in ways.items()}
        for name in args.models.split(","):
            model, inputs, commands = MODELS[name]
            text = COMMON.replace("MODEL", model).replace("INPUTS", inputs)
            native: dict[str, Any] = {}
            exec(compile(text, name, "exec"), native)
            there = native["build"]()
            for way, node in nodes.items():
                node.deployed(name, text + (COMPILED if way == "compiled" else ""))
            if args.compiled and not is_built(nodes["compiled"], name):
                print(f"{name} takes more than one command: its function's log says why")
            times: dict[str, list[float]] = {way: [] for way in (*nodes, "native")}
            for seed in range(rounds + WARM):
                given = native["inputs"](seed)
                begun = time.perf_counter()
                expected = native["forward"](there, given)
                took_ms = {"native": 1e3 * (time.perf_counter() - begun)}
                for way, node in nodes.items():
                    answer = node.result(name, {"seed": seed})
                    error = abs(answer["sum"] - expected.double().sum().item())
                    assert error < (1e-3 if way == "compiled" else 1e-5), (name, way, seed)
                    took_ms[way] = answer["ms"]
                for way, took in took_ms.items() if seed >= WARM else ():
                    times[way].append(took)
            median_ms = {way: statistics.median(taken) for way, taken in times.items()}
            executors_us = {}
            for way, node in nodes.items():
                pid = node.pids()["gpu0"]
                begun_s = spent_s(pid)
                for seed in range(2 * rounds):
                    node.result(name, {"seed": seed})
                executors_us[way] = 1e6 * (spent_s(pid) - begun_s) / (2 * rounds * commands)
            everything[name] = {
                "executor_us_per_command": executors_us,
                "ms": median_ms,
                "us_per_command": {w: 1e3 * t / commands for w, t in median_ms.items()},
            }
            natives[name] = native, there
            followed, *others = (median_ms[way] / median_ms["native"] for way in ways)
            goals.append(Goal(name=f"{name} ÷ native", goal="<= 0.85", measured=followed, met=followed <= 0.85))
            for text, ratio in zip(OTHERS, others, strict=False):
                goals.append(Goal(name=f"{name}: {text} ÷ native", goal="(none)", measured=ratio, met=True))
    for name, (native, there) in natives.items():  # last, because this process meets the shim here
        alone = alone_us(native, there, rounds)
        everything[name]["alone_us_per_command"] = {way: taken / MODELS[name][2] for way, taken in alone.items()}
        print(name, everything[name], flush=True)
    report(goals, args, everything)


if __name__ == "__main__":
    main()
