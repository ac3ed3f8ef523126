"""Builds the simulated objects from a scenario's tables, each value checked: pure. Raises ConfigError that names the
key.
"""

import math
from collections.abc import Sequence

from dormouse.controller.simulator.checks import Checks
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.streams.adapters import read_adapter
from dormouse.controller.simulator.streams.reading import read_llm
from dormouse.controller.simulator.tree import (
    MAX_BATCH,
    MAX_GPUS,
    MAX_INSTANCES,
    Arrivals,
    FaultAt,
    Gpus,
    ModelSection,
    Size,
    Time,
    Tree,
)
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.errors import ConfigError


def read_topology(check: Checks, gpus: Gpus) -> Topology:
    count = gpus.count
    check.need(1 <= count <= MAX_GPUS, "gpus.count", count, f"write a number from 1 to {MAX_GPUS}")
    host = check.nbytes("gpus.link", gpus.link)
    switch = check.nbytes("gpus.switch", gpus.switch) if gpus.switch != "" else 0
    switches = [gpu // 2 for gpu in range(count)] if gpus.switches is None else gpus.switches
    check.need(
        len(switches) == count, "gpus.switches", f"of {len(switches)}", f"write one number for each of {count} GPUs"
    )
    return Topology(
        host_bps=float(min(host, switch) if switch else host),
        switch_bps=float(switch),
        switches=tuple(switches) if switch else (),
        peer_bps=_peers(check, gpus.peer, count),
    )


def _peers(check: Checks, peer: Size | list[list[Size]], count: int) -> tuple[tuple[float, ...], ...]:
    """The matrix; one bandwidth stands for all pairs."""
    if peer == "":
        return ()
    if not isinstance(peer, list):
        bps = float(check.nbytes("gpus.peer", peer))
        return tuple(tuple(bps if a != b else 0.0 for b in range(count)) for a in range(count))
    square = len(peer) == count and all(len(row) == count for row in peer)
    check.need(square, "gpus.peer", "not square", f"write one bandwidth, or {count} lists of {count}, 0 for no link")
    return tuple(
        tuple(
            float(check.nbytes(f"gpus.peer[{a}][{b}]", to)) if a != b and to not in (0, "0", "") else 0.0
            for b, to in enumerate(row)
        )
        for a, row in enumerate(peer)
    )


def read_model(
    check: Checks, at: str, model: ModelSection, topology: Topology, gpu_nbytes: int, base: str
) -> ModelSpec:
    """``base``: where the scenario has the model whose content it shares."""
    nbytes = check.nbytes(f"{at}.size", model.size)
    check.need(
        nbytes <= gpu_nbytes,
        f"{at}.size",
        f"{nbytes:,} bytes ({model.name})",
        f"no GPU holds more than gpus.memory, {gpu_nbytes:,}: use a smaller model or larger GPUs",
    )
    check.need(0.0 < model.percentile < 100.0, f"{at}.percentile", model.percentile, "write a number between 0 and 100")
    check.need(model.functions >= 1, f"{at}.functions", model.functions, "write at least 1, or remove the model")
    check.need(
        1 <= model.instances <= MAX_INSTANCES,
        f"{at}.instances",
        model.instances,
        f"write how many of a function may run at once, 1 to {MAX_INSTANCES}",
    )
    max_instances, load_s = _replicas(check, at, model)
    if model.llm is not None:
        shared_nbytes = int(_shared(check, at, model) * nbytes)
        adapter_nbytes, group = read_adapter(check, at, model, base)
        llm = read_llm(check, at, model, nbytes, gpu_nbytes, (adapter_nbytes, group))
        return ModelSpec(
            name=model.name,
            nbytes=nbytes + adapter_nbytes,
            base=base,
            base_nbytes=nbytes if adapter_nbytes else shared_nbytes,
            segment_nbytes=check.nbytes(f"{at}.segment", model.segment),
            run_s=llm.alone_s,
            llm=llm,
            max_instances=max_instances,
            load_s=load_s,
            tenant=model.tenant,
        )
    if model.run == "":
        raise ConfigError(f"{check.origin}: {at}.run is missing; write it")
    run_s = check.seconds(f"{at}.run", model.run)
    peer_bps = max((bps for row in topology.peer_bps for bps in row), default=0.0)
    activation_nbytes = 0
    if model.activation not in (0, ""):
        activation_nbytes = check.nbytes(f"{at}.activation", model.activation)
        check.need(
            nbytes + activation_nbytes <= gpu_nbytes,
            f"{at}.activation",
            f"{activation_nbytes:,} bytes ({model.name})",
            f"with its size that is more than gpus.memory, {gpu_nbytes:,}: write less, or use larger GPUs",
        )
    shared = _shared(check, at, model)
    native_nbytes = check.nbytes(f"{at}.native", model.native) if model.native != "" else 0
    check.need(
        native_nbytes <= gpu_nbytes,
        f"{at}.native",
        f"{native_nbytes:,} bytes ({model.name})",
        f"no GPU has more than gpus.memory, {gpu_nbytes:,}: write less, or use larger GPUs",
    )

    def seconds(key: str, value: Time) -> float:
        return check.seconds(f"{at}.{key}", value) if value != "" else 0.0

    return ModelSpec(
        name=model.name,
        nbytes=nbytes,
        activation_nbytes=activation_nbytes,
        base=at,
        base_nbytes=int(shared * nbytes),
        segment_nbytes=check.nbytes(f"{at}.segment", model.segment),
        instances=model.instances,
        max_instances=max_instances,
        load_s=load_s,
        batch=model.batch,
        batch_wait_s=seconds("batch_wait", model.batch_wait),
        per_request_s=_per_request_s(check, at, model, run_s),
        idempotent=model.idempotent,
        native_nbytes=native_nbytes,
        native_run_s=seconds("native_run", model.native_run),
        cold_start_s=seconds("cold_start", model.cold_start),
        allocate_s=seconds("allocate", model.allocate),
        run_s=run_s,
        host_s=seconds("host", model.host),
        extra_s=_extra_s(check, f"{at}.wake", model.wake, run_s, nbytes, topology.host_bps),
        peer_extra_s=_extra_s(check, f"{at}.peer_wake", model.peer_wake, run_s, nbytes, peer_bps),
        tenant=model.tenant,
    )


def _replicas(check: Checks, at: str, model: ModelSection) -> tuple[int, float]:
    """How many instances there may be at a time, and how long one that comes loads."""
    most, key = model.max_instances, f"{at}.max_instances"
    check.need(0 <= most <= MAX_INSTANCES, key, most, f"write 1 to {MAX_INSTANCES}, or 0 for one for each GPU")
    comes = bool(model.batch) or model.llm is not None
    check.need(most == 1 or comes, key, most, "write instances: these come and go only with batch or [models.llm]")
    if model.load == "":
        return most, 0.0
    check.need(most != 1, f"{at}.load", repr(model.load), "write max_instances, which it is for, or leave it out")
    return most, check.seconds(f"{at}.load", model.load)


def _per_request_s(check: Checks, at: str, model: ModelSection, run_s: float) -> float:
    """Without ``per_request`` a batch takes as long as its requests one by one."""
    check.need(
        0 <= model.batch <= MAX_BATCH, f"{at}.batch", model.batch, f"write 1 to {MAX_BATCH} requests, or leave it out"
    )
    if not model.batch:
        for key, value in (("batch_wait", model.batch_wait), ("per_request", model.per_request)):
            check.need(value == "", f"{at}.{key}", repr(value), "write batch = 8, or leave it out")
        return 0.0
    check.need(model.host == "", f"{at}.host", model.host, "leave it out: that is not simulated with batch")
    more = "leave it out, or write max_instances: with batch they come and go"
    check.need(model.instances == 1, f"{at}.instances", model.instances, more)
    if model.per_request == "":
        return run_s
    per_request_s = check.seconds(f"{at}.per_request", model.per_request)
    more = f"one request takes {run_s * 1000:g}ms (run) in all: write at most that"
    check.need(per_request_s <= run_s, f"{at}.per_request", repr(model.per_request), more)
    return per_request_s


def _shared(check: Checks, at: str, model: ModelSection) -> float:
    check.need(0.0 <= model.shared <= 1.0, f"{at}.shared", model.shared, "write a share of the size from 0 to 1")
    return model.shared


def _extra_s(check: Checks, key: str, wake: Time, run_s: float, nbytes: int, bps: float) -> float:
    """Seconds that a wake adds beyond the longer of run and copy, from its duration; 0 where none is given."""
    if wake == "":
        return 0.0
    wake_s = check.seconds(key, wake)
    if bps <= 0.0:
        return 0.0
    least_s = max(run_s, nbytes / bps)
    check.need(
        wake_s >= least_s - 1e-12,
        key,
        repr(wake),
        f"run and copy alone take {math.ceil(least_s * 1e4) / 10:g}ms: write at least that, or leave it out",
    )
    return max(0.0, wake_s - least_s)


def read_shares(check: Checks, read: Tree) -> tuple[tuple[str, float], ...]:
    """Of the GPUs' time, by tenant; none where none is written."""
    known = {model.tenant for model in read.models}
    for name, tenant in read.tenants.items():
        check.need(name in known, f"tenants.{name}", "unknown", f"no model has this tenant, only {', '.join(known)}")
        right = tenant.share is None or (math.isfinite(tenant.share) and tenant.share > 0.0)
        check.need(right, f"tenants.{name}.share", tenant.share, "write a number above 0")
    return tuple(sorted((name, tenant.share) for name, tenant in read.tenants.items() if tenant.share is not None))


def read_quotas(check: Checks, read: Tree) -> dict[str, int]:
    """Of each GPU's memory, by tenant."""
    given = {name: tenant.gpu_memory for name, tenant in read.tenants.items() if tenant.gpu_memory != ""}
    return {name: check.nbytes(f"tenants.{name}.gpu_memory", size) for name, size in given.items()}


def read_faults(check: Checks, faults: Sequence[FaultAt], gpus: int, begins_s: float) -> list[Fault]:
    """In the order of their times, which the scenario counts from the end of the warming up, at ``begins_s``."""
    found: list[Fault] = []
    up_s: dict[int, float] = {}  # since when, by GPU that was lost before
    for i, fault in enumerate(faults):
        at = f"faults[{i}]"
        check.need(0 <= fault.gpu < gpus, f"{at}.gpu", fault.gpu, f"write a number from 0 to {gpus - 1}")
        at_s = check.seconds(f"{at}.at", fault.at)
        up = up_s.get(fault.gpu, 0.0)
        check.need(
            at_s > up, f"{at}.at", repr(fault.at), f"GPU {fault.gpu} is gone then: write a time after it is back"
        )
        back_s = math.inf
        if fault.back != "":
            back_s = check.seconds(f"{at}.back", fault.back)
            check.need(back_s > at_s, f"{at}.back", repr(fault.back), "write a time after `at`, or leave it out")
        up_s[fault.gpu] = back_s
        back = None if back_s == math.inf else begins_s + back_s
        found.append(Fault(gpu=fault.gpu, at_s=begins_s + at_s, back_s=back, drain=fault.drain))
    return sorted(found, key=lambda fault: (fault.at_s, fault.gpu))


def read_arrivals(check: Checks, arrivals: Arrivals) -> Arrivals:
    choices, withins = ("poisson", "regular", "trace"), ("random", "poisson", "gaps")
    process, minutes, trace, within = arrivals.process, arrivals.minutes, arrivals.trace, arrivals.within
    check.need(process in choices, "arrivals.process", repr(process), f"write one of {', '.join(choices)}")
    if minutes is not None:
        right = math.isfinite(minutes) and minutes > 0.0
        check.need(right, "arrivals.minutes", minutes, "write a number above 0")
    check.need(within in withins, "arrivals.within", repr(within), f"write one of {', '.join(withins)}")
    right = math.isfinite(arrivals.scale) and arrivals.scale > 0.0
    check.need(right, "arrivals.scale", arrivals.scale, "write a number above 0")
    if process == "trace":
        check.need(trace != "", "arrivals.trace", "missing", "write the path of a CSV file of counts")
        return arrivals
    for key, found, unset in (
        ("trace", trace, ""),
        ("within", within, "random"),
        ("scale", arrivals.scale, 1),
    ):
        check.need(found == unset, f"arrivals.{key}", repr(found), 'write process = "trace", or remove it')
    return arrivals


def read_rates(check: Checks, read: Tree) -> list[float]:
    """Requests per minute of a function of each model; none with a trace."""
    traced = read.arrivals.process == "trace"
    common = read.arrivals.rate
    given = [("arrivals.rate", common), *((f"models[{i}].rate", model.rate) for i, model in enumerate(read.models))]
    for key, rate in given:
        check.need(rate is None or not traced, key, rate, "remove it: a trace has its own rates")
        right = rate is None or (math.isfinite(rate) and rate > 0.0)
        check.need(right, key, rate, "write requests per minute and function, above 0")
    if traced:
        return []
    rates = [common if model.rate is None else model.rate for model in read.models]
    check.need(None not in rates, "arrivals.rate", "missing", "write requests per minute and function")
    return [rate for rate in rates if rate is not None]
