"""What the simulator is told of language models on a node: from the streams and leases of other nodes
(live_llm_node.py), and an engine in this process (llm_fit.py).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from benchmarks.live_llm_node import Heard, Measured, World
from dormouse.controller.recording import Recording
from dormouse.controller.simulator.streams.batch import STEP_TOKENS
from dormouse.controller.simulator.streams.cost import StepCost, prompt_tokens
from dormouse.core.decisions.scheduling import events as ev

OUTLIER: Final = 4.0
"""So many times the median, and something else than a step lies between two tokens."""

SAME_STEP: Final = 0.25
"""Tokens that a runtime's clients have within this part of a step's time are of one step."""


class SeenStep(NamedTuple):
    """As MeasuredStep (llm_fit.py); ``own``: the step before it was of the same runtime."""

    sequences: int
    context: int
    prompt: int
    seconds: float
    own: bool


def steps(part: Measured, runtimes: Mapping[str, str]) -> dict[str, list[SeenStep]]:
    """By runtime, from the times at which clients had tokens: a step lies between two such times if a stream of the
    second one's runtime has gone on. ``runtimes`` of models.
    """
    streams = [*part.alone, *part.streams]
    same_s = SAME_STEP * statistics.median(stream.tpot_s for stream in part.alone)
    ends = {runtime: _ends(streams, runtimes, runtime, same_s) for runtime in dict.fromkeys(runtimes.values())}
    every = np.sort(np.concatenate(list(ends.values())))
    return {runtime: _steps(streams, runtimes, runtime, at, every) for runtime, at in ends.items()}


def _ends(
    streams: Sequence[Heard], runtimes: Mapping[str, str], runtime: str, same_s: float
) -> npt.NDArray[np.float64]:
    ends: list[float] = []
    for at_s in sorted(at_s for stream in streams if runtimes[stream.name] == runtime for at_s in stream.tokens_s):
        if not ends or at_s - ends[-1] > same_s:
            ends.append(at_s)
    return np.array(ends)


def _steps(
    streams: Sequence[Heard],
    runtimes: Mapping[str, str],
    runtime: str,
    at: npt.NDArray[np.float64],
    every: npt.NDArray[np.float64],
) -> list[SeenStep]:
    """``at``: the ends of this runtime's steps; a step of it begins at the end of one of ``every`` runtime's."""
    spans = []
    for stream in streams:
        if runtimes[stream.name] == runtime and stream.ended and len(stream.tokens_s) > 1:
            first, last = np.searchsorted(at, [stream.tokens_s[0], stream.tokens_s[-1]], side="right") - 1
            spans.append((int(first), int(last), stream.prompt))
    before = np.searchsorted(every, at) - 1
    found = []
    for index in range(1, len(at)):
        going = [(first, prompt) for first, last, prompt in spans if first < index <= last]
        prompts = [prompt for first, _, prompt in spans if first == index]
        if going and sum(prompts) <= STEP_TOKENS:
            context = sum(prompt + index - first for first, prompt in going)
            began_s = float(every[before[index]])
            own = began_s == float(at[index - 1])
            found.append(SeenStep(len(going), context, sum(prompts), float(at[index]) - began_s, own))
    return found


@dataclass(frozen=True, kw_only=True)
class Base:
    """Of a base: its steps, ``factor`` times what they take an engine alone, a stream's time before the first, and what
    passes more if the step before was another runtime's.
    """

    cost: StepCost
    factor: float
    before_s: float
    turn_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    bases: dict[str, Base]
    runs_s: list[tuple[float, ...]]  # of each function
    nbytes: dict[str, int]
    gpu_nbytes: int


def calibrated(
    world: World, parts: Sequence[Measured], records: Sequence[Path], alone: Mapping[str, StepCost]
) -> Calibration:
    """From two nodes, and engines that were ``alone``, of each base."""
    runs_s: list[list[float]] = [[] for _ in range(world.functions)]
    for record in records:
        for who, run_s in runs_of(Recording(str(record))):
            runs_s[who].append(run_s)
    nbytes, gpu_nbytes = sizes(Recording(str(records[0])))
    return Calibration(
        bases={name: base_of(world, name, parts, cost) for name, cost in alone.items()},
        runs_s=[tuple(runs) for runs in runs_s],
        nbytes=nbytes,
        gpu_nbytes=gpu_nbytes,
    )


def base_of(world: World, name: str, parts: Sequence[Measured], alone: StepCost) -> Base:
    """What other work on the machine adds to a decode step, and what adapters do, is a factor: of steps that follow
    another of their runtime, while there are some. What those take longer that follow another runtime's, is the change
    of the turn. What a prompt's token costs there, and what a stream takes before its first step, follow from the first
    tokens of single streams: of short prompts and of long ones. Of several models, each has the turn after another.
    """
    bases, runtimes = world.bases, world.runtimes
    mine = {runtimes[model] for model, base in bases.items() if base == name}
    seen = [
        step for part in parts for runtime, some in steps(part, runtimes).items() if runtime in mine for step in some
    ]
    seen = [step for step in seen if not step.prompt]
    ratios = [step.seconds / alone.step_s(*step[:3]) for step in seen]
    most = OUTLIER * statistics.median(ratios)
    seen = [step for step, ratio in zip(seen, ratios, strict=True) if ratio < most]
    own, others = ([step for step in seen if step.own is is_own] for is_own in (True, False))
    some = own or seen
    factor = sum(step.seconds for step in some) / sum(alone.step_s(*step[:3]) for step in some)
    turn_s = 0.0
    if own and others:
        turn_s = max(0.0, statistics.mean(step.seconds - factor * alone.step_s(*step[:3]) for step in others))
    singles = [stream for part in parts for stream in part.alone if stream.ended and bases[stream.name] == name]
    first_s = np.array([stream.first_s for stream in singles])
    rows = np.array([[1.0, float(prompt_tokens(stream.prompt, 0, alone.free_tokens))] for stream in singles])
    left_s = np.maximum(first_s - factor * alone.fixed_s, 0.0)
    (before_s, per_prompt_s), _ = nnls(rows / first_s[:, None], left_s / first_s)
    cost = StepCost(
        fixed_s=factor * alone.fixed_s,
        per_sequence_s=factor * alone.per_sequence_s,
        per_context_s=factor * alone.per_context_s,
        per_prompt_s=float(per_prompt_s),
        free_tokens=alone.free_tokens,
    )
    before_s = max(0.0, float(before_s) - turn_s)  # of single ones, that is in it
    return Base(cost=cost, factor=factor, before_s=before_s, turn_s=turn_s)


def runs_of(recording: Recording) -> list[tuple[int, float]]:
    """GPU time of the functions' leases that copied nothing."""
    found, who = [], {}
    owners: dict[tuple[int, int], str] = {}
    for entry in recording.events():
        match entry.event:
            case ev.InstanceKnown(instance=instance, function=name):
                who[instance] = name
            case ev.LeaseOver(gpu=gpu, done=done):
                name = who[owners.pop((gpu, done.serial))]
                if name.startswith("f") and name[1:].isdecimal() and not done.copied_nbytes:
                    found.append((int(name[1:]), done.gpu_us / 1e6))
        for action in entry.actions:
            if isinstance(action, ev.WakeOn):
                owners[action.lease.gpu, action.lease.serial] = action.instance
    return found


def sizes(recording: Recording) -> tuple[dict[str, int], int]:
    """Bytes of each function's model, and of a pool."""
    who, nbytes, capacity = {}, {}, 0
    for entry in recording.events():
        match entry.event:
            case ev.InstanceKnown(instance=instance, function=name):
                who[instance] = name
            case ev.ModelSized(instance=instance, nbytes=size) if instance in who:
                nbytes[who[instance]] = size
            case ev.ExecutorUp(stats=stats):
                capacity = stats.free_nbytes + stats.weights_nbytes + stats.kv_nbytes + stats.lost_nbytes
    return nbytes, capacity
