"""What a scrape of `/metrics` costs each process: a node with so many functions, all of them active.

    python -m benchmarks.metrics [--functions 500]

Processor time of one thread, of the code that a node runs: what the router does for a scrape, and is not there for
requests; what the controller does; what the metrics process does, beside them. Medians.
"""

import argparse
import gzip
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from benchmarks.report import Goal, arguments, report
from dormouse.controller.ledger import Used
from dormouse.controller.measures import measures
from dormouse.controller.status import NO_STORE
from dormouse.core.decisions.requests.events import Timing
from dormouse.core.decisions.requests.state import RouterState, ServedFunction
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.router.admin.scrapes import counted
from dormouse.router.front.stats import FunctionStats
from dormouse.router.metrics.exposition import written
from dormouse.router.metrics.main import LEVEL
from dormouse.schemas import messages as m
from dormouse.schemas.policy import DEFAULT

GOAL_MS: Final = 1.0
GPUS: Final = 4


def median_ms(work: Callable[[], Any], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        began_ns = time.thread_time_ns()
        work()
        spent.append((time.thread_time_ns() - began_ns) / 1e6)
    return statistics.median(spent)


def of_router(names: list[str]) -> tuple[RouterState, dict[str, FunctionStats]]:
    picture, stats = RouterState(4, 64, "1-"), {}
    for name in names:
        spec = m.FunctionSpec(name=name, version=1, entry="f.py", snapshot="s")
        picture.functions[name] = ServedFunction(spec)
        known = stats[name] = FunctionStats()
        for run_s in (0.002, 0.03, 0.4):
            known.answered(Timing(queue_s=0.001, wait_s=0.002, run_s=run_s), None, spec)
        known.failed("function_raised")
        known.asked_s = time.monotonic()
    return picture, stats


def of_controller(names: list[str]) -> tuple[Scheduler, dict[str, Used]]:
    """Each has been woken once."""
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=len(names), policy=DEFAULT)
    for gpu in range(GPUS):
        core.handle(ev.ExecutorUp(gpu, 1, m.PoolStats(free_nbytes=1 << 40, largest_nbytes=1 << 40)), 0.0)
    for number, name in enumerate(names):
        core.handle(ev.InstanceKnown(f"{name}-1", name), 0.0)
        core.handle(ev.ModelSized(f"{name}-1", 1, 1 << 20), 0.0)
        for action in core.handle(ev.Asked(number, f"{name}-1", 9.0, 1, True), 0.0):
            if isinstance(action, ev.WakeOn):
                done = m.Done(
                    serial=action.lease.serial, outcome="ended", gpu_us=10, copied_nbytes=1 << 20, peer_nbytes=0,
                    file_nbytes=0, resident=[(action.instance, 1 << 20)], peak_activation_nbytes=0, version=1,
                    stats=m.PoolStats(free_nbytes=1 << 39, largest_nbytes=1 << 39),
                )  # fmt: skip
                core.handle(ev.LeaseOver(action.lease.gpu, 1, done), 0.0)
    return core, dict.fromkeys(names, Used(gpu_us=7, weights=7, activations=7, host=7))


def main(args: argparse.Namespace) -> None:
    names = [f"function-{number}" for number in range(args.functions)]
    rounds = 5 if args.quick else 50
    picture, stats = of_router(names)
    core, used = of_controller(names)
    scrapes = msgspec.msgpack.Encoder()

    def held() -> bytes:
        return m.packed(measures(core, used, {}, NO_STORE))

    measured = held()

    def scrape() -> m.Scrape:
        now_s = time.monotonic()
        functions = [
            counted(picture, name, each, stats.get(name), now_s, now_s, {"succeeded": 3}, [])
            for name, each in picture.functions.items()
        ]
        return m.Scrape(
            query=1, functions=functions, measures=measured, whole=True, up={"router": 1}, down=[], gzip=True
        )

    sent = scrape()
    text = written(sent, m.unpacked(measured))
    router_ms = median_ms(lambda: scrapes.encode(scrape()), rounds)
    controller_ms = median_ms(held, rounds)
    written_ms = median_ms(lambda: gzip.compress(written(sent, m.unpacked(measured)), LEVEL), max(3, rounds // 10))
    packed_nbytes = len(gzip.compress(text, LEVEL))
    print(f"{args.functions} functions: {len(text):,} bytes, packed {packed_nbytes:,}; sent {len(measured):,}")
    print(f"the controller: {controller_ms:.2f} ms; the metrics process: {written_ms:.0f} ms")
    goals = [
        Goal(
            name=f"router, a scrape of {args.functions} functions",
            goal=f"<= {GOAL_MS:g} ms",
            measured=round(router_ms, 3),
            met=router_ms <= GOAL_MS,
        )
    ]
    report(goals, args, {"controller_ms": controller_ms, "written_ms": written_ms, "nbytes": len(text)})


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", type=int, default=500)
    main(parser.parse_args())
