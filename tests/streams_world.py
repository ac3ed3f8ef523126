"""A simulated node with language models, for tests: models, runs, and what the core was told in them."""

import numpy as np

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec
from dormouse.controller.simulator.streams.serving import Streams
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

MB = 1_000_000
GB = 1_000.0 * MB
FIFO = Policy(order="fifo")

COST = StepCost(fixed_s=0.02, per_prompt_s=0.001)


def llm(prompt: int = 100, output: int = 11, nbytes: int = 300, kv: int = 1000, seat_s: float = 0.0) -> ModelSpec:
    """A stream alone takes 0.12 s to its first token, and 0.02 for each further one."""
    spec = LlmSpec(
        kv_nbytes=kv,
        cost=COST,
        ttft_s=1.0,
        tpot_s=0.1,
        prompt=Lengths(mean=prompt, most=prompt),
        output=Lengths(mean=output, most=output),
        seat_s=seat_s,
    )
    return ModelSpec(name="chat", nbytes=nbytes * MB, run_s=spec.alone_s, segment_nbytes=50 * MB, llm=spec)


def function(nbytes: int = 300, run_s: float = 0.1) -> ModelSpec:
    return ModelSpec(name="m", nbytes=nbytes * MB, run_s=run_s, segment_nbytes=50 * MB)


def made(models: list[ModelSpec], *faults: Fault, policy: Policy = FIFO, gpus: int = 1, mb: int = 1000) -> Simulation:
    """GPUs over links of 1 GB/s."""
    return Simulation(policy, Topology(host_bps=GB), gpus, mb * MB, models, [9.0] * len(models), 0.9, 0, faults)


def run(simulation: Simulation, *asked: tuple[float, int]) -> tuple[list[float], Streams]:
    """Latencies, and what became of streams."""
    times_s = np.array([at_s for at_s, _ in asked])
    found = simulation.run(times_s, np.array([who for _, who in asked])).tolist()
    assert simulation.streams is not None
    return found, simulation.streams


def watched(simulation: Simulation) -> list[tuple[float, ev.Event, list[ev.Action]]]:
    log: list[tuple[float, ev.Event, list[ev.Action]]] = []
    handle = simulation.core.handle

    def handled(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        simulation.core.check()
        assert not isinstance(event, ev.Tick) or simulation.core._queue.held_until_s > now_s, "or ticks never end"
        for gpu in simulation.gpus:
            gpu.residency.check()
            for lease in gpu.leases.values():
                if lease.runtime is not None:
                    lease.runtime.batch.check()
        log.append((now_s, event, actions))
        return actions

    simulation.core.handle = handled  # type: ignore[method-assign]
    return log


def kinds(log: list[tuple[float, ev.Event, list[ev.Action]]], kind: type[ev.Event]) -> list[float]:
    return [now_s for now_s, event, _ in log if isinstance(event, kind)]
