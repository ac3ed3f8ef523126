"""Counts of router and controller in Prometheus's text format: pure.

A function without requests for IDLE_S is not written by itself: with hundreds of functions, most series would never
change. Its counters are kept, so that they go on where they were. The bytes of its model are in the sum of all idle
ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest

from dormouse.schemas import messages as m

IDLE_S: Final = 3600.0
IDLE: Final = "(idle)"
"""In the place of a name; no function can be called so."""

NODES_FAULT: Final = (
    "build_failed",
    "build_timed_out",
    "disk_full",
    "environments_full",
    "host_refused",
    "index_unreachable",
    "no_pip",
)
"""Outcomes of builds that whoever runs the node can mend. They are written before there is one: who looks for growth
does not see the first of a series that was not there.
"""

_ENDS: Final = (*(format(bound, "g") for bound in m.BOUNDS_S), "+Inf")


class MachineShare(NamedTuple):
    """By a function's instances, of the machine."""

    memory_nbytes: int
    cpu_s: float


NOTHING_TAKEN: Final[Mapping[str, MachineShare]] = {}


class _Families:
    """``generate_latest`` only collects."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def written(scrape: m.Scrape, held: m.NodeMeasures | None, taken: Mapping[str, MachineShare] = NOTHING_TAKEN) -> bytes:
    """The whole text."""
    return bytes(generate_latest(_Families(families(scrape, held, taken))))


def families(scrape: m.Scrape, held: m.NodeMeasures | None, taken: Mapping[str, MachineShare]) -> list[Metric]:
    """``held`` is None if the controller has not answered in time. ``taken`` is by function."""
    functions = {each.name: each for each in scrape.functions}
    active = {name: each for name, each in functions.items() if _active(each)}
    metrics = [*_functions(functions, active), *_requests(active), *_tokens(active), *_instances(taken, active)]
    if held is not None:
        metrics += _models([each for each in held.functions if each.name in functions], active)
    if scrape.whole:
        refused = _counter(
            "refused", "Answers that are errors of no function's requests: not let in, malformed …", "code"
        )
        for code, count in scrape.refused.items():
            refused.add_metric([code], count)
        metrics += (refused, *_processes(scrape, held is not None))
        metrics += _kept(scrape.kept)
        if held is not None:
            metrics += _memory(held)
    return metrics


def _active(each: m.FunctionCounted) -> bool:
    """Whether it is asked, or has something to do."""
    return each.idle_s < IDLE_S or bool(each.running or each.waiting or {"queued", "begun"} & each.jobs.keys())


def _gauge(name: str, text: str, labels: Iterable[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dormouse_{name}", text, labels=[*labels])


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"dormouse_{name}", text, labels=labels)


def _histogram(name: str, text: str, spreads: Iterable[tuple[str, m.Spread]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"dormouse_{name}", text, labels=["function"])
    for function, spread in spreads:
        buckets = [*zip(_ENDS, map(float, accumulate(spread.counts)), strict=True)]
        family.add_metric([function], buckets, spread.sum_s)
    return family


def _functions(functions: dict[str, m.FunctionCounted], active: dict[str, m.FunctionCounted]) -> Iterator[Metric]:
    count = _gauge("functions", "Functions that are deployed; idle: nobody has asked for an hour", ["state"])
    count.add_metric(["active"], len(active))
    count.add_metric(["idle"], len(functions) - len(active))
    yield count
    info = _gauge("function_info", "A function's tenant", ["function", "tenant"])
    for each in active.values():
        info.add_metric([each.name, each.tenant], 1)
    yield info
    broken = _gauge("function_broken", "1: a function cannot be loaded, or is in quarantine", ["function"])
    for each in functions.values():
        if each.broken:
            broken.add_metric([each.name], 1)
    yield broken
    failing = _gauge("function_failing", "1: nearly all that is asked of a function fails", ["function"])
    for each in functions.values():
        if each.failing:
            failing.add_metric([each.name], 1)
    yield failing


def _requests(active: dict[str, m.FunctionCounted]) -> Iterator[Metric]:
    requests = _counter("requests", "Requests that have ended: ok, or an error's code", "function", "outcome")
    deadline = _counter("deadline_requests", "Requests by whether they met the declared deadline", "function", "met")
    stages = _counter("request_stage_seconds", "Where answered requests' time went", "function", "stage")
    running = _gauge("requests_running", "Requests that an instance has", ["function"])
    waiting = _gauge("requests_waiting", "Requests in a function's queue", ["function"])
    jobs = _gauge("jobs", "Jobs that are kept, by how they are", ["function", "state"])
    for name, each in active.items():
        for outcome, count in each.outcomes.items():
            requests.add_metric([name, outcome], count)
        deadline.add_metric([name, "true"], each.in_time)
        deadline.add_metric([name, "false"], each.late)
        for stage, spent_s in each.spent_s.items():
            stages.add_metric([name, stage], spent_s)
        running.add_metric([name], each.running)
        waiting.add_metric([name], each.waiting)
        for state, count in each.jobs.items():
            jobs.add_metric([name, state], count)
    yield from (requests, deadline, stages, running, waiting, jobs)
    text = "Answered requests, from arrival to answer"
    yield _histogram("request_duration_seconds", text, ((name, each.latency) for name, each in active.items()))


def _tokens(active: dict[str, m.FunctionCounted]) -> Iterator[Metric]:
    known = [(name, each.tokens) for name, each in active.items() if each.tokens is not None]
    text = "Of language models: from arrival to the first token"
    yield _histogram("time_to_first_token_seconds", text, ((name, tokens.first) for name, tokens in known))
    text = "Of language models: each further token, an answer's mean"
    yield _histogram("time_per_output_token_seconds", text, ((name, tokens.further) for name, tokens in known))
    prompt = _counter("prompt_tokens", "Tokens of prompts", "function")
    reused = _counter("prompt_tokens_cached", "Those of them whose KV was there", "function")
    made = _counter("generation_tokens", "Tokens that were made", "function")
    for name, tokens in known:
        prompt.add_metric([name], tokens.prompt)
        reused.add_metric([name], tokens.reused)
        made.add_metric([name], tokens.made)
    yield from (prompt, reused, made)


def _instances(taken: Mapping[str, MachineShare], active: dict[str, m.FunctionCounted]) -> Iterator[Metric]:
    text = "Memory of a function's instances in RAM; what they share with the process that they were forked from counts"
    memory = _gauge("function_memory_bytes", text, ["function"])
    spent = _counter("function_cpu_seconds", "Processor time of a function's instances", "function")
    for name in sorted(taken.keys() & active.keys()):
        memory.add_metric([name], taken[name].memory_nbytes)
        spent.add_metric([name], taken[name].cpu_s)
    if idle := taken.keys() - active.keys():
        memory.add_metric([IDLE], sum(taken[name].memory_nbytes for name in idle))
    yield from (memory, spent)


def _models(held: list[m.FunctionMeasures], active: dict[str, m.FunctionCounted]) -> Iterator[Metric]:
    wakes = _counter("wakes", "Times that a model was brought to a GPU, by the slowest source", "function", "source")
    text = "From a lease's begin until all was there, of wakes that ended before their lease"
    spent = SummaryMetricFamily("dormouse_wake_seconds", text, labels=["function", "source"])
    copied = _counter("wake_bytes", "Bytes that wakes copied", "function", "source")
    evictions = _counter("evictions", "Times that a model lost bytes on a GPU, by what for", "function", "reason")
    batches = _counter("batches", "Leases for several requests at once", "function")
    batched = _counter("batch_requests", "Requests that were served in batches", "function")
    places = _counter("batch_places", "Places that these batches had for requests", "function")
    failed = _counter("batches_failed", "Of them, those whose requests were tried one by one", "function")
    leases = _counter("leases", "Times that a function had a GPU", "function")
    gpu_s = _counter("gpu_seconds", "Time that GPUs have computed, as metered", "function")
    byte_s = _counter("memory_byte_seconds", "Bytes times seconds, by what they are, as metered", "function", "kind")
    resident = _gauge(
        "model_gpu_bytes", "Bytes of a model on a GPU; what several share counts for each", ["function", "gpu"]
    )
    idle: dict[int, int] = {}
    for each in held:
        name = each.name
        if name not in active:
            for number, nbytes in each.resident:
                idle[number] = idle.get(number, 0) + nbytes
            continue
        for number, nbytes in each.resident:
            resident.add_metric([name, str(number)], nbytes)
        for wake in each.wakes:
            wakes.add_metric([name, wake.source], wake.count)
            spent.add_metric([name, wake.source], wake.timed, wake.spent_us / 1e6)
            copied.add_metric([name, wake.source], wake.nbytes)
        for reason, count in each.evictions.items():
            evictions.add_metric([name, reason], count)
        leases.add_metric([name], each.leases)
        if each.batches:
            batches.add_metric([name], each.batches)
            batched.add_metric([name], each.batch_requests)
            places.add_metric([name], each.batch_places)
            failed.add_metric([name], each.batches_failed)
        gpu_s.add_metric([name], each.used.get("gpu_us", 0) / 1e6)
        for kind in ("weights", "kv", "activations", "adapter", "host"):
            if used := each.used.get(kind, 0):
                byte_s.add_metric([name, kind], used / 1000)
    for number, nbytes in idle.items():
        resident.add_metric([IDLE, str(number)], nbytes)
    yield from (wakes, spent, copied, evictions, leases, batches, batched, places, failed, gpu_s, byte_s, resident)


def _memory(held: m.NodeMeasures) -> Iterator[Metric]:
    memory = _gauge("gpu_memory_bytes", "A GPU's pool, by what it is used for", ["gpu", "kind"])
    capacity = _gauge("gpu_capacity_bytes", "A GPU's pool", ["gpu", "name"])
    seats = _gauge("gpu_seats", "Requests that have their memory on a GPU", ["gpu"])
    turns = _gauge("gpu_turns", "Of those, the ones that may compute", ["gpu"])
    moved = _counter("gpu_moved_bytes", "Bytes that were moved within a pool to make room", "gpu")
    for gpu in held.gpus:
        number, stats = str(gpu.number), gpu.stats
        kinds = ("weights", stats.weights_nbytes), ("kv", stats.kv_nbytes), ("activations", stats.activation_nbytes)
        for kind, nbytes in (*kinds, ("lost", stats.lost_nbytes), ("free", stats.free_nbytes)):
            memory.add_metric([number, kind], nbytes)
        capacity.add_metric([number, gpu.name], gpu.capacity_nbytes)
        seats.add_metric([number], gpu.seats)
        turns.add_metric([number], gpu.turns)
        moved.add_metric([number], stats.moved_nbytes)
    drained = _gauge("gpu_drained", "1: nothing new begins on a GPU, by `dormouse gpu drain`", ["gpu"])
    for number in map(str, held.drained):
        drained.add_metric([number], 1)
    yield from (memory, capacity, seats, turns, moved, drained)
    host = _gauge("host_memory_bytes", "Models outside GPUs, by where", ["kind"])
    budget = _gauge("host_budget_bytes", "The most that they may take", ["kind"])
    store = held.store
    for kind, nbytes, most in (
        ("host", store.host_nbytes, store.host_budget_nbytes),
        ("file", store.file_nbytes, store.file_budget_nbytes),
    ):
        host.add_metric([kind], nbytes)
        if most >= 0:
            budget.add_metric([kind], most)
    waiting = _gauge("gpu_requests_waiting", "Requests that wait for a GPU")
    waiting.add_metric([], held.waiting)
    trouble = _gauge("store_trouble", "1: models should be in files and are not; `dormouse status` says why")
    trouble.add_metric([], bool(store.trouble))
    yield from (host, budget, waiting, trouble)


def _processes(scrape: m.Scrape, controller: bool) -> Iterator[Metric]:
    up = _gauge("process_up", "Whether a process of the node is up", ["process"])
    starts = _counter("process_starts", "Times that it was started", "process")
    deaths = _counter("process_deaths", "Times that it died; what was replaced on purpose has not", "process")
    for role in {**scrape.up, **dict.fromkeys(scrape.down), **scrape.deaths}:
        deaths.add_metric([role], scrape.deaths.get(role, 0))
    for role, epoch in scrape.up.items():
        up.add_metric([role], 1)
        starts.add_metric([role], epoch)
    for role in scrape.down:
        up.add_metric([role], 0)
    answered = _gauge("controller_answered", "0: this text lacks what the controller counts; it was too slow")
    answered.add_metric([], controller)
    text = "Spans of OpenTelemetry: exported, failed (the endpoint has not taken them), dropped"
    spans = _counter("spans", text, "outcome")
    for outcome, count in scrape.spans.items():
        spans.add_metric([outcome], count)
    yield from (up, starts, deaths, answered, spans)


def _kept(kept: m.KeptCounted) -> Iterator[Metric]:
    builds = _counter("environment_builds", "Builds of functions' libraries: ok, or an error's code", "outcome")
    for outcome, count in (dict.fromkeys(NODES_FAULT, 0) | kept.builds).items():
        builds.add_metric([outcome], count)
    there = _gauge("environments", "Environments of functions' libraries")
    there.add_metric([], kept.environments)
    nbytes = _gauge("environment_bytes", "Bytes of them on the disk")
    nbytes.add_metric([], kept.environments_nbytes)
    secrets = _gauge("secrets", "Secrets that are kept", ["tenant"])
    for tenant, count in kept.secrets.items():
        secrets.add_metric([tenant], count)
    disk = _gauge("disk_free_bytes", "Room on the disk of the state directory")
    if kept.disk_free_nbytes >= 0:
        disk.add_metric([], kept.disk_free_nbytes)
    yield from (builds, there, nbytes, secrets, disk)
