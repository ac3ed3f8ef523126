"""Messages from the router to a zygote."""

from dormouse.schemas.messages.shared import Arena, DeviceInfo, EmbeddingSettings, LlmSettings, Message


class BuildOrder(Message, frozen=True, kw_only=True):
    """Of an environment. ``index`` is that of pip, as are ``find_links``; ``sources``: what has no wheel is built. With
    a ``way_out``, a Unix socket comes in the arena's place: what the build listens on is sent there.
    """

    index: str
    find_links: list[str] = []
    sources: bool = False
    way_out: bool = False
    variables: dict[str, str] = {}


class Fork(Message, frozen=True, kw_only=True, tag=1):
    """Router to zygote, with descriptors [log, arena], and [variables] with ``variables``: start an instance.

    ``folder`` is the snapshot, and ``entry`` the file in it to run, or a model's with ``llm`` or ``embedding``.
    ``limits`` are resource limits by their name without RLIMIT_ ("AS", "NOFILE", "NPROC", "CPU").
    """

    instance: str
    function: str
    directory: str
    uid: int
    folder: str
    entry: str
    arena: Arena
    device: DeviceInfo
    gpus: int
    limits: dict[str, int]
    llm: LlmSettings | None = None
    embedding: EmbeddingSettings | None = None
    concurrency: int = 1
    batch: int = 0
    environment: str = ""  # where the function's own libraries are
    network: bool = False
    build: BuildOrder | None = None  # nothing is served: ``entry`` is a file of requirements, to ``environment``
    variables: bool = False  # a sealed file of the instance's alone: a JSON object of environment variables
    check: str = ""  # JSON: a request that it answers before it counts as loaded


class Signal(Message, frozen=True, kw_only=True, tag=2):
    """Router to zygote: send this signal number to an instance's process group, if it still lives."""

    instance: str
    signal: int


ToZygote = Fork | Signal
