"""The node's configuration: TOML in, one checked structure out; unknown keys are refused with their line.

Owns names, defaults and units of settings. The effect of a setting is described where it is used.
"""

import os
import re
from pathlib import Path
from typing import Final, Self

import msgspec

from dormouse.core.paths import default_run_directory, home_directory
from dormouse.core.sandbox.reach import places
from dormouse.core.sandbox.world import World
from dormouse.schemas import policy
from dormouse.schemas.errors import ConfigError

MIN_NBYTES: Final = {"buddy": 128 << 20, "pages": 2 << 20}
"""A partition of the block scheme, a small granule: a pool that is smaller has no room at all."""

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


MAX_NBYTES: Final = 1 << 63
"""Sizes from here on fit no signed integer of a message, and no machine."""

YEAR_MS: Final = 365 * 24 * 3_600_000
"""More is a mistake; some millions of times more would fit no message."""


def parse_nbytes(text: str | int) -> int:
    """``"2GiB"``, ``"512 MB"`` or a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; write a number and one of B, KB, MB, GB, KiB, MiB, GiB")
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    if nbytes >= MAX_NBYTES:
        raise ConfigError(f"{text} is more than any machine has; write less than 8 EiB")
    return int(nbytes)


def parse_duration_ms(text: str | int | float) -> int:
    """``"80ms"``, ``"2s"``, ``"5m"`` or a number of milliseconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write a number and one of ms, s, m, h")
    milliseconds = float(match[1]) * {"ms": 1, "": 1, "s": 1000, "m": 60_000, "h": 3_600_000}[match[2]]
    if milliseconds > YEAR_MS:
        raise ConfigError(f"{text} is too long; write at most a year, 8760h")
    if milliseconds < 1:
        raise ConfigError(f"{text} is too short; write at least 1ms")
    return int(milliseconds)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class NodeSection(_Section, frozen=True, kw_only=True):
    """``[node]``"""

    name: str = "default"
    host: str = "127.0.0.1"
    port: int = 8700
    run: str = ""  # default: /run/dormouse/<name> for root, else below $XDG_RUNTIME_DIR or /tmp
    state: str = ""  # default: $XDG_STATE_HOME/dormouse/<name>
    sharing: str = "tenant"  # "none" | "tenant" | "node": functions whose equal tensors are kept once
    isolation: str = "tenant"  # "tenant" | "function": whose language models a runtime computes for, if equal
    adapters: str = ""  # below which folder those lie that POST /v1/load_lora_adapter may name; "": it takes none
    secrets_key: str = ""  # the file of the key of tenants' secrets; default: STATE/secrets.key
    admins: tuple[str, ...] = ()  # users, by name or numeric uid, who may administrate beside the node's own and root
    tenants: str = (
        "one"  # "one" | "many": kernels of all functions share the executors' memory, so many must trust each other
    )
    hosts: tuple[str, ...] = ()  # names by which clients call the node; loopback's and its own address are known
    cors: tuple[str, ...] = ()  # origins whose pages may invoke, e.g. "https://app.example"
    tls_cert: str = ""  # PEM files: the chain, and its key without a password
    tls_key: str = ""
    behind_proxy: bool = False  # a proxy speaks TLS with the clients; every request then needs a key
    open_loopback: bool = False  # requests from this machine need no key though there are keys


class GpuSection(_Section, frozen=True, kw_only=True):
    """``[gpu]``: the devices that the node's executors drive."""

    device: str = "auto"  # "auto" | "cuda" | "host"
    count: int = 0  # executors; 0: one for each GPU that CUDA finds, else emulated ones, at most 2
    memory: str = ""  # taken of each GPU, activations included; default: all that is free, or, of an emulated one,
    # an eighth of the machine's memory
    threads: int = 0  # torch threads per executor; 0: cores divided by GPUs
    poison: bool = False  # overwrite evicted bytes, so that a stale read cannot look right
    link: str = ""  # bandwidth of host-to-GPU copies per second, e.g. "8GB"; default: as fast as memory
    switch: str = ""  # bandwidth that GPUs 0 and 1, 2 and 3, ... share on their way to the host; default: no switch
    peer: str = ""  # bandwidth of GPU-to-GPU copies; default: none are made
    pool: str = "auto"  # "auto" | "regions" | "pages" | "buddy": how a GPU's memory is managed
    fast_path: bool = True  # C++ records operations, and runs plain ones, once it is built; false: Python
    templates: str = "on"  # "on" | "off" | "check": sequences of operations that come again are computed ahead of the
    # function; "check": each is also run as it comes, and compared, which costs several times as much
    graphs: str = "auto"  # "auto" | "on" | "off": parts of them are captured as CUDA graphs; auto: on real GPUs
    compile: bool = False  # graphs of `torch.compile` are compiled by Inductor, and run in executors as one operator
    operators: tuple[str, ...] = ()  # custom ones that executors run: "LIBRARY", or "NAMESPACE:MODULE"
    seat_idle_ms: int = 600_000  # a language model without requests keeps its seat so long, if nobody needs the room
    activations: str = ""  # what a CUDA GPU keeps outside the pool for activations; default: a quarter of it


WARM: Final = (
    "safetensors.torch",
    "tokenizers",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


class SandboxSection(_Section, frozen=True, kw_only=True):
    """``[sandbox]``: how instances are confined."""

    python: str = ""  # interpreter of the sandbox; default: this one
    uid: str = "auto"  # "auto" | "same": a uid of its own for each instance where the host allows
    uid_base: int = 61_000
    memory: str = "16GiB"  # of an instance, with its shared memory and files in memory where control groups count them
    scratch: str = "1GiB"  # what its $HOME, /tmp and /dev/shm hold together; it is memory
    open_files: int = 256
    processes: int = 64  # and threads, together
    cpus: float = 0  # how many an instance may use, where control groups limit it; 0: all, shared with the others
    cgroups: str = "auto"  # "auto" | "off": control groups where the node may make them, else limits of each process
    threads: int = 1
    network: bool = False  # whether --network is granted: the machine's own network, loopback included
    read: tuple[str, ...] = ()  # directories that functions may read, under their own names
    warm: tuple[str, ...] = WARM  # imported once, in the zygote, where installed

    def limit(self, name: str) -> str:
        """A limit that was met, and the setting to change."""
        texts = {
            "memory": f"memory limit of {self.memory}",
            "processes": f"limit of {self.processes} processes and threads",
            "open_files": f"limit of {self.open_files} open files",
            "scratch": f"limit of {self.scratch} in $HOME, /tmp and /dev/shm together",
        }
        return f"{texts[name]} ([sandbox] {name})"


class LimitsSection(_Section, frozen=True, kw_only=True):
    """``[limits]``: bounds that a hostile or broken client meets."""

    body: str = "16MiB"
    bodies: str = "256MiB"  # of all requests together, from their first byte until their answer
    connections: int = 1024  # open at once on the node's port
    header_ms: int = 10_000  # in which a request's header must have come
    body_ms: int = 10_000  # the same for its body, and a second more for each 64 KiB
    folder: str = "256GiB"  # of one function's files, with their weights
    folder_files: int = 20_000
    tenant_folders: str = ""  # of one tenant's functions and their versions, on a node of many; default: half the disk
    tenant_functions: int = 256  # of one tenant, on a node of many
    versions: int = 3  # earlier ones of each function that are kept, for `dormouse rollback`
    response: str = "16MiB"
    stream: str = "32MiB"
    queue: int = 4096  # requests waiting in the node
    log: str = "4MiB"  # per function, then rotated once
    host: str = ""  # host memory for models; default: half of the machine's
    quota: str = ""  # most that a deploy may ask as its quota; default: what its tenant may have of host memory
    disk: str = ""  # files for models in the state directory, "0" for none; default: all but a tenth of the disk
    loads: int = 2  # instances that replace others and load at the same time, and as many of new versions and extras
    load_timeout_ms: int = 3_600_000  # the most that a deploy may set, and that any load() lasts
    timeout_ms: int = 3_600_000  # the most that a deploy may set for requests
    extra_instances: int = 16  # of stateless functions, beyond the first of each; 0: none
    extra_idle_ms: int = 30_000  # after which one of these ends
    sessions: int = 64  # programs of `dormouse run` at once
    heartbeat_ms: int = 10_000  # after which a client that waits for an event stream hears a comment, and again
    compute_ms: int = 5_000  # how long a request computes on a GPU before others that wait may have its turn
    lease_ms: int = 5_000  # how long an executor may take to give a revoked lease back before it is killed
    yield_ms: int = (
        30_000  # how long a runtime may keep a turn, a seat or memory that it is to give back; then it is ended
    )
    idle_ms: int = 200  # after which `dormouse run` gives its lease back


class RecordSection(_Section, frozen=True, kw_only=True):
    """``[record]``: the scheduler's inputs and outputs, in a file for `dormouse replay`."""

    path: str = ""  # as seen from the state directory; default: none is written
    limit: str = "256MiB"  # after which nothing more is recorded


class TracingSection(_Section, frozen=True, kw_only=True):
    """``[tracing]``: requests as spans of OpenTelemetry."""

    endpoint: str = ""  # of a collector that takes OTLP over HTTP, e.g. "http://127.0.0.1:4318"; "": none are exported
    share: float = 1.0  # of the requests that are no part of a trace, how many begin one


class EnvironmentsSection(_Section, frozen=True, kw_only=True):
    """``[environments]``: libraries that functions have for themselves."""

    index: str = "https://pypi.org/simple"  # the package index, as pip names it; "": none, find_links alone
    find_links: tuple[str, ...] = ()  # as pip's: folders of wheels, or pages with links to such
    hosts: tuple[str, ...] = ()  # that builds may reach beside these: "files.example.org", or with a port
    builds: bool = False  # whether --allow-build is granted, which runs code of packages
    time_ms: int = 600_000  # for one to be built
    size: str = "4GiB"  # of one
    store: str = "16GiB"  # of all
    tenant_store: str = ""  # of those of one tenant; default: a quarter of `store` on a node of many, else all of it
    idle_ms: int = 60_000  # after which the zygote of functions that need one of their own ends

    @property
    def reached(self) -> tuple[str, ...]:
        """Places that builds may reach. Raises ValueError."""
        return places((self.index, *self.find_links), self.hosts)

    @property
    def local_paths(self) -> tuple[str, ...]:
        """Of this machine, which who builds must see."""
        named = [each.removeprefix("file://") for each in (self.index, *self.find_links)]
        return tuple(path for path in named if path.startswith("/"))


class JobsSection(_Section, frozen=True, kw_only=True):
    """``[jobs]``: requests that nobody waits for, and those that have an Idempotency-Key."""

    keep_ms: int = 3_600_000  # how long what has ended is kept
    wait_ms: int = 86_400_000  # how long one is tried again that cannot begin
    tenant_jobs: int = 10_000  # of one tenant: those that wait, run or are kept
    tenant_store: str = "256MiB"  # the same in bytes of bodies and answers
    store: str = "1GiB"  # of all tenants together


class TenantSection(_Section, frozen=True, kw_only=True):
    """``[tenants.NAME]``: one tenant's limits on the node. A missing key is no limit."""

    share: float | None = None  # of the GPUs' time, beside those of others; who is not named has a share of 1
    gpu_memory: str = ""  # of each GPU: what its models keep beyond it goes first, when others need the room
    host: str = ""  # of host memory for its models that is in no file; default: half of `limits.host`, if many share it
    requests_s: float | None = None  # requests per second, to all of its functions together
    tokens_s: float | None = None  # tokens per second, of prompts and answers, of all its language models together


class StartSection(_Section, frozen=True, kw_only=True):
    """Settings of one start, from the options of `dormouse up` and from what it has found. No node file has them."""

    without: tuple[str, ...] = ()  # functions that are not started
    forget_models: bool = False  # begin with no stored models, whatever is wrong with them
    cuda: bool = False  # executors drive GPUs, and may pin what the store keeps
    pages: bool = False  # language models are deployed: a pool that is "auto" is one of pages
    worlds: tuple[World, ...] = ()  # beside that of functions
    generation: int = 0  # how often `dormouse up --replace` has been done to the node


DEFAULT_POOL: Final = "regions"
"""Meaning of ``[gpu] pool = "auto"`` where no language model is deployed: the one strategy that needs nothing but plain
memory, and has no rounding to granules. The cost of mapping those on a GPU is not measured yet (docs/gpu.md).
"""


class NodeConfig(_Section, frozen=True, kw_only=True):
    """A whole node."""

    node: NodeSection = NodeSection()
    gpu: GpuSection = GpuSection()
    sandbox: SandboxSection = SandboxSection()
    limits: LimitsSection = LimitsSection()
    record: RecordSection = RecordSection()
    jobs: JobsSection = JobsSection()
    tracing: TracingSection = TracingSection()
    environments: EnvironmentsSection = EnvironmentsSection()
    tenants: dict[str, TenantSection] = {}
    start: StartSection = StartSection()
    schedule: policy.Policy = policy.DEFAULT  # ``[schedule]``: the settings of the scheduler, schemas/policy.py

    def placed(self, run: str) -> Self:
        """The same with this run directory, if it names none itself; ``run`` "": with the default one."""
        if self.node.run or not run:
            return self
        node = msgspec.structs.replace(self.node, run=os.path.abspath(run))
        return msgspec.structs.replace(self, node=node)

    @property
    def run_directory(self) -> Path:
        """Raises ConfigError when the default one is in another user's hands."""
        return Path(self.node.run) if self.node.run else default_run_directory(self.node.name)

    @property
    def state_directory(self) -> Path:
        if self.node.state:
            return Path(self.node.state).absolute()
        base = os.environ.get("XDG_STATE_HOME") or str(home_directory("[node] state") / ".local" / "state")
        return Path(base) / "dormouse" / self.node.name

    @property
    def pool(self) -> str:
        """The strategy by which executors manage their GPUs' memory."""
        if self.gpu.pool != "auto":
            return self.gpu.pool
        return "pages" if self.start.pages else DEFAULT_POOL

    def models_exposed(self, own_uids: bool) -> str:
        """Why language models of several tenants cannot be kept apart, and what to do; "" if they can. ``own_uids``:
        whether each instance, and so each runtime, has a uid of its own.
        """
        if self.gpu.pool not in ("auto", "pages"):  # "auto" is pages from the first language model on
            return (
                f"with a pool of {self.pool}, the process that computes one can read all of a GPU's pool: set "
                '[gpu] pool = "pages"'
            )
        if not own_uids:
            return (
                "the processes that compute them have no users of their own here, so one could open the memory of "
                'another: run the node as root, with [sandbox] uid = "auto"'
            )
        return ""

    @property
    def gpu_count(self) -> int:
        return self.gpu.count or min(2, os.cpu_count() or 1)

    @property
    def gpu_nbytes(self) -> int:
        return parse_nbytes(self.gpu.memory) if self.gpu.memory else machine_nbytes() // 8

    @property
    def gpu_threads(self) -> int:
        return self.gpu.threads or max(1, (os.cpu_count() or 1) // self.gpu_count)

    @property
    def host_nbytes(self) -> int:
        return parse_nbytes(self.limits.host) if self.limits.host else machine_nbytes() // 2

    @property
    def disk_nbytes(self) -> int | None:
        """Budget of the store's files; None: whatever leaves a tenth of the disk free."""
        return parse_nbytes(self.limits.disk) if self.limits.disk else None


def machine_nbytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
