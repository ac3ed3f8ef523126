"""ServerlessLoRA's tables beside what its policies and Dormouse's do in the simulator: 16 GPUs, the paper's rates.

    python -m benchmarks.serverless_lora_tables --data DIR [--quick] [--out FILE]

``DIR`` as for benchmarks.serverless_lora. What the paper gives only in figures, or not at all, is said where it is
assumed. Costs are GB of GPU memory x seconds, of all that a function holds while it is kept, and compared as ratios:
the price list that the paper cites has no rates.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.report import arguments, report
from benchmarks.serverless_lora_workload import (
    BACKBONES,
    CLASSES,
    CONTEXT_NBYTES,
    GPU_NBYTES,
    Pairs,
    arrivals,
    lengths,
    models,
    topology,
)
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation

GPUS: Final = 16

KEPT_S: Final = 300.0
"""How long an idle function is kept: "several minutes" (§2.2)."""

COLD_S: Final = 5.0
"""Of a function without anything pre-loaded: container, libraries, context, kernels. Assumed: Fig. 1 is a picture. An
import of torch and transformers alone takes 3 to 5 s on a machine like this one.
"""

UNKNOWN_NBYTES: Final = 10_500_000_000
"""Of a GPU, beside weights and KV: the one constant that is fitted, to the ratio of the peak batches of Table 2."""


class System(NamedTuple):
    """``always``: it is there the whole time, as virtual machines are. ``isolation``, ``shared``: who has a backbone of
    its own. ``cold_s``: what a start takes after a function was not kept. ``sequences`` at once, at most.
    """

    policy: SimulatedPolicy = SimulatedPolicy()
    isolation: str = "function"
    shared: bool = True
    cold_s: float = 0.0
    sequences: int = 128
    always: bool = False


SYSTEMS: Final[dict[str, System]] = {
    "Dormouse": System(),
    "Dormouse, one runtime a tenant": System(isolation="tenant"),
    "vLLM-like": System(shared=False, always=True),
    "dLoRA-like": System(isolation="tenant", always=True),
    "NBS: no shared backbone": System(shared=False),
    "NPL: nothing pre-loaded": System(cold_s=COLD_S),
    "NAB 1: no batches": System(sequences=1),
    "NAB 2: 10, 500 ms": System(SimulatedPolicy(batching="fixed", batch_size=10, batch_delay_ms=500)),
    "NAB 3: 20, 1000 ms": System(SimulatedPolicy(batching="fixed", batch_size=20, batch_delay_ms=1000)),
    "Eq. 3, literally": System(SimulatedPolicy(batching="fill-or-expire")),
}

PAPER: Final[dict[str, tuple[float | None, float, float | None]]] = {
    "Dormouse": (576, 2977, 7.53),
    "NBS: no shared backbone": (2608, 4959, 12.55),
    "NPL: nothing pre-loaded": (1345, 3747, 9.48),
    "NAB 1: no batches": (1386, 3799, 9.61),
    "NAB 2: 10, 500 ms": (693, 3425, 8.66),
    "NAB 3: 20, 1000 ms": (721, 3526, 8.92),
    "vLLM-like": (None, 2433, 20.93 + 42.96),
    "dLoRA-like": (None, 2636, 7.32 + 11.40),
}
"""TTFT and E2E in ms, cost in $: Table 3 (Normal), and the mean and the sum of both backbones of Table 1 (Normal)."""


class Result(NamedTuple):
    """Of all streams: means in ms, the share whose first token was late, and GB x hours."""

    ttft_ms: float
    e2e_ms: float
    late: float
    gb_hours: float
    e2e_7b_ms: float
    e2e_13b_ms: float


def run(system: System, kind: str, data: Path, pairs: Pairs, most: int) -> Result:
    specs = [_spec(spec, system) for spec in models(pairs, system.isolation, system.cold_s)]
    asked = arrivals(data, kind, 1.0, most)
    llms = [spec.llm for spec in specs if spec.llm is not None]
    ttfts = [llm.ttft_s for llm in llms]
    simulation = Simulation(system.policy, topology(GPUS), GPUS, GPU_NBYTES, specs, ttfts, 0.99)
    count, apart_s = len(specs), 60.0  # each is asked once before: what is pre-loaded is there
    times_s = np.concatenate([np.arange(count) * apart_s, asked.times_s + count * apart_s])
    simulation.run(times_s, np.concatenate([np.arange(count), asked.functions]), count)
    streams = simulation.streams
    assert streams is not None
    first_s, over_s = streams.first_s[count:], streams.over_s[count:]
    seven = asked.functions < count // 2
    return Result(
        float(first_s.mean() * 1000),
        float(over_s.mean() * 1000),
        float((first_s > np.asarray(ttfts)[asked.functions]).mean()),
        _gb_hours(specs, system, asked.times_s, asked.functions, over_s),
        float(over_s[seven].mean() * 1000),
        float(over_s[~seven].mean() * 1000),
    )


def _spec(spec: ModelSpec, system: System) -> ModelSpec:
    assert spec.llm is not None
    idle_s = 1e6 if system.always else KEPT_S if system.cold_s else spec.llm.idle_s
    llm = msgspec.structs.replace(spec.llm, sequences=system.sequences, idle_s=idle_s)
    # a process that is not kept starts anew: then that is what its seat takes
    llm = msgspec.structs.replace(llm, start_s=0.0, seat_s=system.cold_s)
    return msgspec.structs.replace(spec, llm=llm, base_nbytes=spec.base_nbytes if system.shared else 0)


def _gb_hours(
    specs: Sequence[ModelSpec],
    system: System,
    times_s: npt.NDArray[np.float64],
    functions: npt.NDArray[np.int64],
    over_s: npt.NDArray[np.float64],
) -> float:
    """A function holds its adapter and its context while it is kept; a backbone is held while any of its own is."""
    span_s = float(times_s[-1])
    if system.always:
        runtimes = len(BACKBONES) if system.isolation == "tenant" else len(specs)
        return runtimes * GPU_NBYTES / 1e9 * span_s / 3600
    total, half = 0.0, len(specs) // 2
    for number, spec in enumerate(specs):
        own = functions == number
        llm = spec.llm
        assert llm is not None
        held = llm.adapter_nbytes + CONTEXT_NBYTES + (0 if system.shared else spec.nbytes - llm.adapter_nbytes)
        total += held * _kept_s(times_s[own], over_s[own])
    if system.shared:
        for number, backbone in enumerate(BACKBONES):
            own = functions // half == number
            total += backbone.nbytes * _kept_s(times_s[own], over_s[own])
    return total / 1e9 / 3600


def _kept_s(times_s: npt.NDArray[np.float64], over_s: npt.NDArray[np.float64]) -> float:
    """While a request is there, and for KEPT_S after it."""
    kept_s, until_s = 0.0, -1.0
    for at_s, took_s in zip(times_s.tolist(), over_s.tolist(), strict=True):
        end_s = at_s + took_s + KEPT_S
        kept_s += max(0.0, end_s - max(at_s, until_s))
        until_s = max(until_s, end_s)
    return kept_s


def table_2() -> dict[str, float]:
    """Peak batches on a GPU with two of four 7B functions, in bytes: with one backbone, with two, and their ratio."""
    one, two = (GPU_NBYTES - count * BACKBONES[0].nbytes - UNKNOWN_NBYTES for count in (1, 2))
    tokens = one / 73 / BACKBONES[0].kv_nbytes
    return {"ratio": one / two, "tokens of a sequence at a batch of 73": tokens, "batch of two": two / one * 73}


def main() -> None:
    parser = arguments(__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="where the arrivals and lengths are")
    args = parser.parse_args()
    pairs, most = lengths(args.data), 200 if args.quick else 1 << 30
    found: dict[str, Mapping[str, Any]] = {}
    for kind in ("Normal",) if args.quick else CLASSES:
        results = {name: run(system, kind, args.data, pairs, most) for name, system in SYSTEMS.items()}
        found[kind] = {name: result._asdict() for name, result in results.items()}
        _show(kind, results)
    print("\nTable 2:", {name: round(value, 2) for name, value in table_2().items()}, "paper: 73 / 32 = 2.28")
    report([], args, {"results": found, "table_2": table_2()})


def _show(kind: str, results: Mapping[str, Result]) -> None:
    ours = results["Dormouse"]
    print(f"\n{kind:32}{'TTFT ms':>9}{'paper':>7}{'E2E ms':>9}{'paper':>7}{'late':>7}{'GB h, ratio':>13}{'paper':>7}")
    for name, each in results.items():
        ttft, e2e, cost = PAPER.get(name, (None, None, None)) if kind == "Normal" else (None, None, None)
        ratio = f"{each.gb_hours:.0f} {each.gb_hours / ours.gb_hours:.2f}"
        paper = "-" if cost is None else f"{cost / 7.53:.2f}"
        print(
            f"{name:32}{each.ttft_ms:9.0f}{ttft or '-':>7}{each.e2e_ms:9.0f}{e2e or '-':>7}{each.late:7.1%}"
            f"{ratio:>13}{paper:>7}",
            flush=True,
        )


if __name__ == "__main__":
    main()
