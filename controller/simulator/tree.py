"""Keys of a scenario file: their names, defaults and bounds. Pure. docs/simulator.md describes them; building.py checks
their values.
"""

import re
from typing import Final

import msgspec

from dormouse.controller.simulator.baselines import SimulatedPolicy

MAX_GPUS: Final = 1024
MAX_NODES: Final = 1024
MAX_FUNCTIONS: Final = 100_000
"""Beyond these a scenario is taken for a slip of the pen: it would need days, or all memory."""

MAX_SEED: Final = 1 << 63

MAX_INSTANCES: Final = 64
"""Of one function, each on a GPU of its own: a node has no more GPUs. `max_instances`, too."""

MAX_BATCH: Final = 128
"""As `dormouse deploy --batch` allows."""

Size = str | int
Time = str | int | float


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Gpus(Section, frozen=True, kw_only=True):
    """``[gpus]``"""

    count: int
    memory: Size
    link: Size = "10GB"
    switch: Size = ""
    switches: list[int] | None = None
    peer: Size | list[list[Size]] = ""
    nodes: int = 1


class LengthSection(Section, frozen=True, kw_only=True):
    """``prompt`` and ``output`` of ``[models.llm]``, if they vary."""

    mean: float
    most: int
    variation: float = 0.0


class LlmSection(Section, frozen=True, kw_only=True):
    """``[models.llm]``"""

    kv: Size
    step: Time
    ttft: Time
    tpot: Time
    per_sequence: Time = 0
    per_context: Time = 0
    per_prompt: Time = 0
    free_tokens: int = 0
    prompt: int | LengthSection | None = None
    output: int | LengthSection | None = None
    lengths: str = ""
    context: int = 8192
    idle: Time = "2s"
    seat: Time = 0
    turn: Time = 0
    step_tokens: int = 256
    adapter: Size = 0
    base: str = ""
    isolation: str = "tenant"  # "tenant" | "function"
    tenant: str = ""
    context_memory: Size = 0
    start: Time = 0


class ModelSection(Section, frozen=True, kw_only=True):
    """``[[models]]``"""

    name: str
    size: Size
    run: Time = ""
    host: Time = ""
    wake: Time = ""
    peer_wake: Time = ""
    deadline: Time = "1s"
    percentile: float = 98.0
    functions: int = 1
    rate: float | None = None
    activation: Size = 0
    shared: float = 0.0
    idempotent: bool = False
    native: Size = ""
    native_run: Time = ""
    cold_start: Time = ""
    allocate: Time = ""
    instances: int = 1
    max_instances: int = 1
    load: Time = ""
    batch: int = 0
    batch_wait: Time = ""
    per_request: Time = ""
    segment: Size = "256MB"
    llm: LlmSection | None = None
    tenant: str = "default"


class TenantShare(Section, frozen=True, kw_only=True):
    """``[tenants.NAME]``"""

    share: float | None = None
    gpu_memory: Size = ""


class FaultAt(Section, frozen=True, kw_only=True):
    """``[[faults]]``"""

    gpu: int
    at: Time
    back: Time = ""
    drain: bool = False


class Arrivals(Section, frozen=True, kw_only=True):
    """``[arrivals]``: ``rate`` in requests per minute and function; ``scale`` is what a trace's counts are multiplied
    with.
    """

    process: str = "poisson"  # "poisson" | "regular" | "trace"
    rate: float | None = None
    minutes: float | None = None
    trace: str = ""
    within: str = "random"  # "random" | "poisson" | "gaps": when, within a trace's minutes
    scale: float = 1.0
    warm: bool = True


class Tree(Section, frozen=True, kw_only=True):
    gpus: Gpus
    models: list[ModelSection]
    arrivals: Arrivals
    policy: SimulatedPolicy = SimulatedPolicy()
    faults: list[FaultAt] = []
    tenants: dict[str, TenantShare] = {}
    seed: int = 0


def worded(message: str) -> str:
    """msgspec's message, its key first and with what to write."""
    text, _, where = message.partition(" - at `$")
    at = where.rstrip("`").removeprefix(".")
    if (match := re.match(r"Object (contains unknown|missing required) field `(.+)`", text)) is None:
        return f"{at or 'scenario'}: {text[0].lower()}{text[1:]}; see docs/simulator.md"
    key = f"{at}.{match[2]}" if at else match[2]
    if match[1].startswith("missing"):
        return f"{key} is missing; write it"
    table = {
        "": Tree,
        "gpus": Gpus,
        "models": ModelSection,
        "arrivals": Arrivals,
        "policy": SimulatedPolicy,
        "faults": FaultAt,
        "tenants": TenantShare,
    }
    key = key.replace("[...]", ".*")
    known = (LlmSection if ".llm" in at else table[re.split(r"[\[.]", at)[0]]).__struct_fields__
    if at.endswith(("llm.prompt", "llm.output")):
        known = LengthSection.__struct_fields__
    return f"{key} is not a key; write one of {', '.join(known)}"
