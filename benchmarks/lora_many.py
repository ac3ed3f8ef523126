"""Many more adapters over one backbone than a GPU holds, on a node: three hundred over room for twenty.

The backbone is tiny, and so are its adapters, each of its own random values; weights are fp32. All are asked at once,
twice. Every answer is judged by PEFT's model of that adapter. How many were on the GPU at a time is counted in the
node's recording, which has what an executor says of it after each lease and each eviction. An instance of a language
model takes some 33 MiB of memory here: three hundred want 10 GB.
"""

import itertools
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.llm_judge import judged
from benchmarks.llm_streams import Stream, at_once
from benchmarks.llm_tiny import make_folder, never_special, prompts, reference
from benchmarks.lora_adapters import ALL
from benchmarks.nodes.testnode import running_node
from benchmarks.report import Goal
from dormouse.controller.recording import Recording
from dormouse.core import modelfolder
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.folder import FunctionFolder

ADAPTERS, QUICK = 300, 60
HOLDS: Final = 20
MEMORY: Final = "20MiB"
"""Ten granules. The backbone has 0.54 MB and each adapter 0.71: `HOLDS` take eight, and KV the others."""

LONGEST: Final = "280s"
"""A token of each answer within that: all are asked at once, and take turns on the GPU."""

BASE: Final = "base"
PROMPT: Final = 12
NEW: Final = 12
CONFIG: Final = """
[sandbox]
[gpu]
count = 1
memory = "{memory}"
threads = 1
pool = "pages"
seat_idle_ms = 2000
[record]
path = "{record}"
"""


def many(quick: bool) -> tuple[list[Goal], dict[str, Any]]:
    count, names, wrong, lacking = QUICK if quick else ADAPTERS, list[str](), list[str](), list[str]()
    first_s, pause_s = [0.0], [0.0]
    with tempfile.TemporaryDirectory(prefix="dm") as place:
        folder, record = Path(place), Path(place) / "record"
        make_folder(folder / BASE, never_special(reference("llama")))
        models = {f"a{number}": adapted(folder / f"a{number}", number) for number in range(count)}
        with running_node(CONFIG.format(memory=MEMORY, record=record)) as node:
            settings = {"llm": True, "dtype": "float32"}
            node.admin.deploy(BASE, FunctionFolder(folder / BASE, "config.json", False), settings)
            began_s = time.monotonic()
            for name in models:
                node.admin.deploy(
                    name, modelfolder.find_adapter(str(folder / name)), {"base": BASE, "timeout": LONGEST}
                )
            deploy_s = (time.monotonic() - began_s) / count
            began_s = time.monotonic()
            for turn in range(2):
                asked, asked_s = prompts(turn, *[PROMPT] * count), time.monotonic()
                streams = [Stream(node.port, *each, NEW) for each in zip(models, asked, strict=True)]
                for name, stream in zip(models, at_once(streams), strict=True):
                    names.append(name)
                    first_s += [heard_s - asked_s for heard_s in stream.times_s[:1]]
                    pause_s += [after - before for before, after in itertools.pairwise(stream.times_s)]
                    if stream.lacking:
                        lacking.append(f"{name}: {stream.lacking}")
                    elif judged(models[name], [stream.prompt], [stream.tokens]).wrong():
                        wrong.append(name)
            all_s = time.monotonic() - began_s
            node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
            gpu = node.status()["gpus"]["0"]
            back = gpu["free_nbytes"] + gpu["weights_nbytes"] + gpu["lost_nbytes"]
            wakes = sum(row["evictions"] for row in node.status()["functions"].values())
        most = most_at_once(Recording(str(record)))
    goals = [
        Goal(name=f"{count} adapters: answers that lack tokens", goal="0", measured=len(lacking), met=not lacking),
        Goal(name=f"of {len(names)}, that are not PEFT's", goal="0", measured=len(wrong), met=not wrong),
        Goal(
            name="adapters on the GPU at a time, the most",
            goal=f">= {HOLDS}",
            measured=most,
            met=most >= HOLDS,
        ),
        Goal(name="times that an adapter left", goal="", measured=wakes, met=True),
        Goal(name="seconds to deploy one", goal="", measured=deploy_s, met=True),
        Goal(name="seconds until all were answered twice", goal="", measured=all_s, met=True),
        Goal(name="seconds to a first token, the most", goal="", measured=max(first_s), met=True),
        Goal(name="seconds from a token to the next, the most", goal="", measured=max(pause_s), met=True),
        Goal(
            name="bytes of the GPU that are not back",
            goal="0",
            measured=gpu["capacity_nbytes"] - back,
            met=back == gpu["capacity_nbytes"] and not gpu["kv_nbytes"],
        ),
    ]
    return goals, {"lacking": lacking, "wrong": wrong}


@torch.no_grad()
def adapted(folder: Path, seed: int) -> Any:
    """PEFT's model, saved in the folder."""
    import peft  # type: ignore[import-untyped, unused-ignore]

    with warnings.catch_warnings(action="ignore"):
        config = peft.LoraConfig(r=64, target_modules=ALL, lora_alpha=64)
        model = peft.get_peft_model(never_special(reference("llama")), config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.save_pretrained(str(folder))
    return model.eval()


def most_at_once(recording: Recording) -> int:
    """Of models that add to another, how many were whole on a GPU at the same time."""
    who: dict[str, str] = {}
    bases: dict[str, str] = {}
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    most = 0

    def follow(resident: Any) -> None:
        for instance, nbytes in resident:
            there = bases.get(who.get(instance, ""), "") and 0 < sizes.get(instance, 0) <= nbytes
            (whole.add if there else whole.discard)(instance)

    for entry in recording.events():
        match entry.event:
            case ev.FunctionKnown(function=name, base=base):
                bases[name] = base
            case ev.InstanceKnown(instance=instance, function=name):
                who[instance] = name
            case ev.ModelSized(instance=instance, nbytes=nbytes):
                sizes[instance] = nbytes
            case ev.Evicted(resident=resident):
                follow(resident)
            case ev.LeaseOver(done=done):
                follow(done.resident)
        most = max(most, len(whole))
    return most
