"""The systems of ServerlessLoRA's evaluation as settings of the simulator, and what a run of one gives.

A serverless platform ends an instance that has had no request for ``kept_s``, with all that it has on the GPU, starts
another one when all of a function's are busy, and runs closed batches, as a pipeline of transformers does (§6.1). What
a start takes is a sum of parts (`Constants`); which of them a system has ahead is what it is about.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from benchmarks.serverless_lora_holding import Held, held, watched
from benchmarks.serverless_lora_workload import (
    ADAPTERS,
    BACKBONES,
    COMPUTE_SHARE,
    GPU_NBYTES,
    LINK_BPS,
    MEMORY_SHARE,
    Arrivals,
    Pairs,
    arrivals,
    models,
)
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.outcome import tpot_s
from dormouse.core.decisions.scheduling.topology import Topology

GPUS: Final = 16

FUNCTIONS: Final = len(BACKBONES) * ADAPTERS

WARM_S: Final = 60.0
"""Each function is asked once before, so much after the one before it: what is pre-loaded is there."""


class Constants(NamedTuple):
    """Each has its source here; what the paper gives in no number is called an assumption.

    ``library_s``: to import torch 2.13, transformers' Llama and peft takes 1.2, 2.3 and 0.1 s of a processor here
    (measured thrice). ``context_s``: a CUDA context, an assumption. ``kernels``: the first inference without cached
    kernels takes a fifth of the deadline (§6.8), 0.5 and 0.8 s, of which the prompt's own time is taken off; this is a
    factor of that. ``adapter_s``: to load an adapter, in ServerlessLLM's own measurement without its loader (OSDI'24),
    which this paper says does not speed it up. ``checkpoint_bps``: ServerlessLLM takes "at least one second" (§6.2) for
    the smaller model, 13.5 GB. ``slower``: an ordinary loader, the least of the 3.6 to 8.2 times in OSDI'24.
    ``kept_s``: "several minutes" (§2.2). ``batch`` and ``instances`` at most of a function: assumptions ("fixed and
    smaller batch sizes"). ``answers``: a factor of the lengths of GSM8K's answers. ``idle``: what a GB costs while its
    instance is idle, beside one that computes: the same. Alibaba's idle mode has 0.5 beside 2.1 (`IDLE_MODE`), but
    nothing in the paper says that it was on.
    """

    library_s: float = 3.7
    context_s: float = 0.3
    kernels: float = 1.0
    adapter_s: float = 0.37
    checkpoint_bps: float = BACKBONES[0].nbytes / 1.0
    slower: float = 3.6
    link_bps: float = LINK_BPS
    memory_share: float = MEMORY_SHARE
    compute_share: float = COMPUTE_SHARE
    kept_s: float = 300.0
    batch: float = 4.0
    instances: float = 4.0
    answers: float = 1.0
    idle: float = 1.0


UNIT_CNY: Final = 0.00011
GB_UNITS: Final = 2.1
IDLE_MODE: Final = 0.5 / 2.1
"""Alibaba Function Compute bills units of 0.00011 CNY (list price of the first tier, from 2024-08-27, help.aliyun.com),
2.1 of them for a GB second of a GPU of its Tesla series, and 0.5 while idle. Which series the paper means, and what of
CPUs, it does not say (GPUs are 90 % of its cost): so this price is an assumption, and ratios are what is compared.
"""


class System(NamedTuple):
    """``shared``: functions have one backbone. ``always``: it is there the whole time, as virtual machines are.
    ``cold``: nothing but the backbone's bytes is pre-loaded. ``platform``: see this module. ``loads``: by ``link``, by
    ServerlessLLM's ``checkpoint`` loader, or an ``ordinary`` one. ``batch``: sequences at once; 0: what a platform has.
    """

    policy: SimulatedPolicy = SimulatedPolicy()
    isolation: str = "function"
    shared: bool = True
    always: bool = False
    cold: bool = False
    platform: bool = False
    loads: str = "link"
    batch: int = 128


class Parts(NamedTuple):
    """What a start takes, of one backbone's function, in seconds."""

    library_s: float
    context_s: float
    backbone_s: float
    adapter_s: float
    kernels_s: float


RELEASE: Final = SimulatedPolicy(release=True)

SYSTEMS: Final[dict[str, System]] = {
    "Dormouse": System(),
    "Dormouse, one runtime a tenant": System(isolation="tenant"),
    "Eq. 3, else as Dormouse": System(SimulatedPolicy(batching="fill-or-expire")),
    "vLLM-like": System(shared=False, always=True),
    "dLoRA-like": System(isolation="tenant", always=True),
    "InstaInfer-like": System(
        SimulatedPolicy(release=True, preload=True, preload_holds=True),
        shared=False, cold=True, platform=True, loads="ordinary", batch=0,
    ),
    "ServerlessLLM-like": System(RELEASE, shared=False, cold=True, platform=True, loads="checkpoint", batch=0),
}  # fmt: skip

LOCAL: Final = SimulatedPolicy(affinity=False)
"""An instance goes where its backbone is, if nobody computes there just then: else kept instances, which are placed one
by one while the others are idle, all stand on one GPU when a burst comes.
"""


def _with(**settings: Any) -> SimulatedPolicy:
    return replace(LOCAL, **settings)


ABLATIONS: Final[dict[str, System]] = {
    "ServerlessLoRA-like": System(LOCAL, platform=True),
    "Eq. 3": System(_with(batching="fill-or-expire"), platform=True),
    "NBS: no shared backbone": System(_with(release=True), shared=False, platform=True, loads="ordinary"),
    "NPL: nothing pre-loaded": System(_with(release=True), cold=True, platform=True, loads="ordinary"),
    "NDO: nothing offloaded": System(_with(offload="never"), platform=True),
    "NAB 1: no batches": System(LOCAL, platform=True, batch=1),
    "NAB 2: 10, 500 ms": System(_with(batching="fixed", batch_size=10, batch_delay_ms=500), platform=True, batch=10),
    "NAB 3: 20, 1000 ms": System(_with(batching="fixed", batch_size=20, batch_delay_ms=1000), platform=True, batch=20),
}
"""The paper's platform with all that it proposes, in which nobody waits while an instance is idle, and without each."""


def parts(spec: ModelSpec, system: System, constants: Constants) -> Parts:
    """Of a start with nothing there."""
    llm = spec.llm
    assert llm is not None
    prompt_s = llm.cost.stream_s(round(llm.prompt.mean), 1, llm.step_tokens)
    backbone = next(each for each in BACKBONES if each.name == spec.name)
    return Parts(
        constants.library_s,
        constants.context_s,
        backbone.nbytes / load_bps(system, constants),
        constants.adapter_s,
        (backbone.ttft_s / 5 - prompt_s) * constants.kernels,
    )


def load_bps(system: System, constants: Constants) -> float:
    if system.loads == "link":
        return constants.link_bps
    return constants.checkpoint_bps / (constants.slower if system.loads == "ordinary" else 1.0)


def specs_of(system: System, pairs: Pairs, constants: Constants, functions: int = FUNCTIONS) -> list[ModelSpec]:
    """The functions, or the first ones, and then the further instances of each."""
    longer = tuple((prompt, max(1, round(answer * constants.answers))) for prompt, answer in pairs)
    whole = models(longer, system.isolation, 0)[:functions]
    first = [_spec(spec, number, system, constants) for number, spec in enumerate(whole)]
    return first * (max(1, round(constants.instances)) if system.platform else 1)


def _spec(spec: ModelSpec, number: int, system: System, constants: Constants) -> ModelSpec:
    llm = spec.llm
    assert llm is not None
    memory, compute = MEMORY_SHARE / constants.memory_share, COMPUTE_SHARE / constants.compute_share
    cost = StepCost(
        fixed_s=llm.cost.fixed_s * memory,
        per_context_s=llm.cost.per_context_s * memory,
        per_prompt_s=llm.cost.per_prompt_s * compute,
    )
    llm = replace(llm, cost=cost, idle_s=1e6 if system.always else constants.kept_s if system.platform else llm.idle_s)
    llm = replace(llm, sequences=system.batch or max(1, round(constants.batch)))
    if system.platform:
        llm = replace(llm, family=f"{spec.name} {number}", closed=True)
    if system.cold:
        each = parts(replace(spec, llm=llm), system, constants)
        # the copy of an own backbone goes on meanwhile, and a shared one is copied where it is not there
        own_s = 0.0 if system.shared else each.backbone_s
        start_s = each.library_s + each.context_s + own_s + each.adapter_s
        llm = replace(llm, start_s=start_s, seat_s=each.kernels_s)
    return replace(spec, llm=llm, base_nbytes=spec.base_nbytes if system.shared else 0)


class Result(NamedTuple):
    """Of all streams, or those over one backbone: means in ms, and the share whose first token was late."""

    streams: int
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    late: float


class Run(NamedTuple):
    """``by`` backbone, and ``all``. ``ended_s``: when the last answer was whole, after the first request."""

    by: dict[str, Result]
    held: Held
    ended_s: float

    def cost_cny(self, idle: float, backbone: str = "all") -> float:
        """GB seconds, of which those of idle instances count so much, at a list price."""
        names = [backbone] if backbone != "all" else list(self.held.active_gb_s)
        gb_s = sum(self.held.active_gb_s[name] + idle * self.held.idle_gb_s[name] for name in names)
        return gb_s * GB_UNITS * UNIT_CNY


def run(
    system: System,
    asked: Arrivals,
    pairs: Pairs,
    constants: Constants = Constants(),  # noqa: B008
    gpus: int = GPUS,
    gpu_nbytes: int = GPU_NBYTES,
    functions: int = FUNCTIONS,
) -> Run:
    """Of ``functions`` that are asked once before, too."""
    specs = specs_of(system, pairs, constants, functions)
    ttfts = [spec.llm.ttft_s for spec in specs if spec.llm is not None]
    topology = Topology(host_bps=load_bps(system, constants))
    simulation = Simulation(system.policy, topology, gpus, gpu_nbytes, specs, ttfts, 0.99)
    leases = watched(simulation)
    begin_s = functions * WARM_S
    times_s = np.concatenate([np.arange(functions) * WARM_S, asked.times_s + begin_s])
    simulation.run(times_s, np.concatenate([np.arange(functions), asked.functions]), functions)
    streams = simulation.streams
    assert streams is not None
    mine = streams.part(slice(functions, None))
    of = asked.functions // ADAPTERS
    each_s, deadlines_s = tpot_s(mine), np.asarray(ttfts)[asked.functions]

    def result(which: npt.NDArray[np.bool_]) -> Result:
        first_s, over_s = mine.first_s[which], mine.over_s[which]
        ttft_ms, tpot_ms, e2e_ms = (float(each.mean() * 1e3) for each in (first_s, each_s[which], over_s))
        late = float((first_s > deadlines_s[which]).mean())
        return Result(int(which.sum()), ttft_ms, tpot_ms, e2e_ms, late)

    found = {backbone.name: result(of == number) for number, backbone in enumerate(BACKBONES) if (of == number).any()}
    found["all"] = result(np.ones(len(of), bool))
    span_s = float(asked.times_s[-1])
    after_s = 0.0 if system.platform or specs[0].llm is None else constants.kept_s - specs[0].llm.idle_s
    whole = held(leases, specs, system.shared, begin_s, after_s, span_s if system.always else None)
    return Run(found, whole, float(np.max(asked.times_s + mine.over_s)))


def run_class(
    system: System,
    kind: str,
    data: Path,
    pairs: Pairs,
    most: int = 1 << 30,
    constants: Constants = Constants(),  # noqa: B008
) -> Run:
    return run(system, arrivals(data, kind, 1.0, most), pairs, constants)
