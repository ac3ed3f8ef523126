"""Language models of Llama's shapes on one GPU, with random weights: steps, adapters, wakes, two models at once.

    python -m benchmarks.gpu_llm --part decode|lora|equal|wake|shared|turns|brief [--shape 8b|1b|tiny] [--out FILE]

* ``decode``: tokens/s of 1 to 64 streams and prompt tokens/s, in the engine, beside `transformers` with the same
  tensors (sdpa, a static batch), in turn.
* ``lora``: 32 streams of eight adapters of rank 16 on all seven products of each layer, beside the base alone, in turn.
* ``equal``: the tokens of a small model in fp32 by PEFT's, unmerged.
* ``wake``: a node: first tokens from asleep, with and without a process that computes; beside what `transformers` takes
  from files in the page cache.
* ``shared``: a node with a base and eight adapters: what waking one copies, and bytes on the GPU.
* ``turns``: a node with `turns = 2`: two backbones at once beside one after the other.
* ``brief``: most of the last three, on one node.

The last four are in gpu_llm_node.py. What is there is written after each measurement. Results: docs/gpu.md.
"""

import argparse
import gc
import http.client
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import gpu_llm_node
from benchmarks.gpu_llm_models import DEVICE, SHAPES, adapter_folders, begin, engine_of, low_ranks, weights_of
from benchmarks.gpu_llm_node import MIN_MIXED
from benchmarks.llm_alone import random_prompt
from benchmarks.llm_judge import GAP, judged
from benchmarks.report import Goal, arguments, report
from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime.engine import Engine
from dormouse.gpuserver.runtime.models import parameters_on_meta

PARTS: Final = ("decode", "lora", "equal", "wake", "shared", "turns", "brief")
STREAMS: Final = (1, 8, 32, 64)
PROMPT: Final = 128
PROMPTS: Final = (128, 1024)
ADAPTERS: Final = 8
RANK: Final = 16


class Told:
    """What was measured so far, in the file after each."""

    def __init__(self, out: Path | None) -> None:
        self._out, self.results = out, dict[str, Any]()

    def put(self, **found: Any) -> None:
        self.results |= found
        print(json.dumps(found), flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps({"results": self.results}, indent=1) + "\n")


def settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    settle()
    began_s = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - began_s


def prompt(seed: int, length: int, shape: str) -> list[int]:
    return random_prompt(seed, length, min(40_000, SHAPES[shape]["vocab_size"]))


def answered(engine: Engine, prompts: list[list[int]], new: int, which: list[int] | None = None) -> float:
    """The median seconds of steps in which each of these streams gets a token and no prompt is computed."""
    for number, each in enumerate(prompts):
        begin(engine, number, each, new, which[number] if which else NO_ADAPTER)
    steps = [0.0]
    while not engine.batch.idle:
        whole = len(engine.batch.running) == len(prompts) and all(each.left == 1 for each in engine.batch.running)
        began_s = time.perf_counter()
        assert engine.step() is not None
        if whole:
            steps.append(time.perf_counter() - began_s)
    return statistics.median(steps[1:] or steps)


class Issued:
    """Seconds in which each step of an engine has given the device its work."""

    def __init__(self, engine: Engine) -> None:
        self.each_s: list[float] = []
        forward = engine._forward

        def timed(parts: Any) -> torch.Tensor:
            began_s = time.perf_counter()
            found = forward(parts)
            self.each_s.append(time.perf_counter() - began_s)
            return found

        engine._forward = timed  # type: ignore[method-assign]


@contextmanager
def without_graphs(engine: Engine) -> Iterator[None]:
    graphs, engine.graphs = engine.graphs, None
    try:
        yield
    finally:
        engine.graphs = graphs


def graphs_told(engine: Engine) -> dict[str, Any]:
    """Of its graphs. What they take of the GPU is the driver's, and in torch's pool of memory."""
    graphs = engine.graphs
    if graphs is None:
        return {"graphs": None}
    told = {"graphs": len(graphs._graphs), "replayed": graphs.replayed, "trouble": graphs.trouble}
    before = free_nbytes()
    graphs.forget()
    return told | {"MiB that came back without them": (free_nbytes() - before) / (1 << 20)}


def free_nbytes() -> int:
    settle()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def peer_of(shape: str, dtype: torch.dtype, weights: dict[str, torch.Tensor]) -> Any:
    """`transformers`' own model over the same tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig
    made: Any = AutoModelForCausalLM
    known = {name: value for name, value in SHAPES[shape].items() if name != "model_type"}
    with parameters_on_meta():
        model = made.from_config(config.for_model("llama", **known), dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.to(DEVICE)  # what is computed of the configuration
    return model.eval()


def decode(told: Told, shape: str, quick: bool) -> list[Goal]:
    dtype, new = torch.bfloat16, 8 if quick else 48
    weights = weights_of(SHAPES[shape], dtype)
    streams = STREAMS[:2] if quick else STREAMS
    engine = engine_of(shape, dtype, weights, max(streams) * (PROMPT + new + 16) + 2 * max(PROMPTS))
    peer, goals, issued = peer_of(shape, dtype, weights), [], Issued(engine)
    serial = iter(range(1, 1 << 20))

    def theirs(batch: int, length: int, tokens: int) -> float:
        rows = torch.tensor([prompt(next(serial), length, shape) for _ in range(batch)], device=DEVICE)
        given = {"attention_mask": torch.ones_like(rows), "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            return seconds(
                lambda: peer.generate(rows, min_new_tokens=tokens, max_new_tokens=tokens, eos_token_id=None, **given)
            )

    def ours(batch: int, length: int, tokens: int) -> tuple[float, float]:
        prompts = [prompt(next(serial), length, shape) for _ in range(batch)]
        steps: list[float] = []
        return seconds(lambda: steps.append(answered(engine, prompts, tokens))), steps[0]

    for batch in streams:
        ours(batch, PROMPT, 4)
        theirs(batch, PROMPT, 4)
        issued.each_s.clear()
        rounds = [(*ours(batch, PROMPT, new), theirs(batch, PROMPT, new)) for _ in range(1 if quick else 2)]
        whole, step, other = (statistics.median(column) for column in zip(*rounds, strict=True))
        issued_ms = statistics.median(issued.each_s) * 1e3
        with without_graphs(engine):
            plain = ours(batch, PROMPT, new)[1]
        ratio = other / whole
        told.put(
            **{
                f"{shape}, {batch} streams": {
                    "tokens/s": batch * new / whole,
                    "step ms": step * 1e3,
                    "of these, until its kernels are issued": issued_ms,
                    "step ms without graphs": plain * 1e3,
                    "decoding alone, tokens/s": batch / step if step else None,
                    "transformers tokens/s": batch * new / other,
                    "ratio": ratio,
                }
            }
        )
        goals.append(Goal(name=f"{shape}, {batch} streams / transformers", goal="", measured=ratio, met=True))
    for length in PROMPTS[:1] if quick else PROMPTS:
        ours(1, length, 1)
        theirs(1, length, 1)
        pairs = [(ours(1, length, 1)[0], theirs(1, length, 1)) for _ in range(1 if quick else 5)]
        mine, other = (length / statistics.median(column) for column in zip(*pairs, strict=True))
        key = f"{shape}, a prompt of {length}"
        told.put(**{key: {"tokens/s": mine, "transformers tokens/s": other, "ratio": mine / other}})
        goals.append(Goal(name=f"{key} / transformers", goal="", measured=mine / other, met=True))
    told.put(**{f"{shape}, graphs": graphs_told(engine)})
    return goals


def lora(told: Told, shape: str, quick: bool) -> list[Goal]:
    dtype, new, batch = torch.bfloat16, 6 if quick else 48, 8 if quick else 32
    engine = engine_of(shape, dtype, weights_of(SHAPES[shape], dtype), batch * (PROMPT + new + 16))
    numbers = [engine.adapters.open() for _ in range(ADAPTERS)]
    for number in numbers:
        engine.bind(number, low_ranks(shape, dtype, RANK, number))
    sides: dict[str, list[int] | None] = {"base": None, "mixed": [numbers[each % ADAPTERS] for each in range(batch)]}
    found: dict[str, list[float]] = {side: [] for side in sides}
    serial = iter(range(1, 1 << 20))
    for turn in range(2 if quick else 9):
        for side in sorted(sides, reverse=bool(turn % 2)):
            prompts = [prompt(next(serial), PROMPT, shape) for _ in range(batch)]
            steps: list[float] = []
            spent_s = seconds(lambda: steps.append(answered(engine, prompts, new, sides[side])))  # noqa: B023
            if turn:  # the first compiles
                found[side].append(batch * new / spent_s)
                told.put(**{f"{shape}, {side}, step ms": steps[0] * 1e3})
    told.put(**{f"{shape}, graphs": graphs_told(engine)})
    ratios = [one / other for one, other in zip(found["mixed"], found["base"], strict=True)]
    ratio = statistics.median(ratios)
    told.put(**{f"{shape}, {batch} streams, tokens/s": found, "mixed / base": ratio})
    name = f"{shape}: {ADAPTERS} adapters mixed / base alone, {batch} streams"
    return [Goal(name=name, goal=f">= {MIN_MIXED}", measured=ratio, met=ratio >= MIN_MIXED)]


def equal(told: Told, shape: str, quick: bool) -> list[Goal]:
    """With four adapters as PEFT's own code reads them; whatever the ``shape``."""
    import peft  # type: ignore[import-untyped, unused-ignore]

    dtype, new = torch.float32, 8 if quick else 32
    weights = {name: 4 * each if each.dim() > 1 else each for name, each in weights_of(SHAPES["small"], dtype).items()}
    engine = engine_of("small", dtype, weights, 12 * (64 + new + 16))
    count = 2 if quick else 4
    numbers = [NO_ADAPTER, *(engine.adapters.open() for _ in range(count))]
    for number in numbers[1:]:
        parts = low_ranks("small", dtype, RANK, number)
        engine.bind(number, {name: low._replace(down=4 * low.down, up=4 * low.up) for name, low in parts.items()})
    asked = [(number, prompt(100 + each, 20 + 13 * each, "small")) for number in numbers for each in range(2)]
    begun = [begin(engine, at, given, new, number) for at, (number, given) in enumerate(asked)]
    while not engine.batch.idle:
        engine.step()
    wrong = tokens = 0
    texts: set[tuple[int, ...]] = set()
    with tempfile.TemporaryDirectory() as place:
        for number, folder in zip(
            numbers[1:], adapter_folders(Path(place), "small", dtype, RANK, count, 4), strict=True
        ):
            model = peer_of("small", dtype, weights).cpu()
            with warnings.catch_warnings(action="ignore"):
                judge = peft.PeftModel.from_pretrained(model, folder).eval()
            own = [each for each, (of, _) in zip(begun, asked, strict=True) if of == number]
            answers = [each.tokens[each.prompt :] for each in own]
            judgement = judged(judge, [each.tokens[: each.prompt] for each in own], answers)
            wrong, tokens = wrong + judgement.wrong(), tokens + judgement.tokens
            texts.update(tuple(each) for each in answers)
    told.put(**{"tokens judged by PEFT": tokens, "wrong": wrong, "different answers": len(texts)})
    name = f"tokens that are not PEFT's, beyond a gap of {GAP}, of {tokens}"
    return [
        Goal(name=name, goal="0", measured=wrong, met=wrong == 0),
        Goal(name="answers that differ", goal=str(2 * count), measured=len(texts), met=len(texts) == 2 * count),
    ]


def main(args: argparse.Namespace) -> None:
    told, goals = Told(args.out), list[Goal]()
    work: dict[str, Callable[[Told, str, bool], list[Goal]]] = {
        "decode": decode, "lora": lora, "equal": equal, **gpu_llm_node.PARTS,
    }  # fmt: skip
    failed = False
    for part in args.part:
        began_s = time.perf_counter()
        try:
            goals += work[part](told, args.shape, args.quick)
        except (AssertionError, OSError, RuntimeError, http.client.HTTPException) as error:  # the next may well go
            traceback.print_exc()
            failed = True
            told.put(**{f"{part} failed": f"{type(error).__name__}: {error}"[-1000:]})
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        told.put(**{f"{part} took s": time.perf_counter() - began_s})
    report(goals, args, {"results": told.results})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, required=True)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    main(parser.parse_args())
