"""Protocol of a node's admin socket, ``RUN/admin``: one act per connection, in packets with descriptors.

A caller receives Welcome or Refused before it sends anything. After that:

::

    Deploy -> Taken, then any number of (Files -> Taken), then (Finish -> answer)
    any other act -> answer
    answer: any number of Said, then Done; or Refused, at any time and at last

A path of the caller's machine is never sent: files travel as descriptors that the caller has opened itself, with the
names that they have below the function's folder. Imports nothing of ours: the command line pays for it.
"""

from typing import Final, Literal

import msgspec

from dormouse.schemas.options import Settings as Settings
from dormouse.schemas.options import Value

Scope = Literal["invoke", "deploy", "admin", "metrics"]
"""Of an API key."""

LOG: Final = "text/x-log"

PROTOCOL: Final = 16
"""Another number: the two sides would misread each other. To be raised with every change of the declarations below."""

MAX_FILES: Final = 32
"""Descriptors of one Files: the node never holds more of a caller's, and a caller may have few to spare."""

MAX_NAME_NBYTES: Final = 1024
"""Of a file below its folder; 32 of them and more fit one packet."""

PIECE_NBYTES: Final = 48 << 10
"""Of an answer in one Said."""


class Packet(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of all of these."""


# --- who administers -> node


class Deploy(Packet, frozen=True, kw_only=True, tag=1):
    """``entry`` is the name of the file that has ``load`` and ``handle``, in the folder. ``logs``: what the function
    prints meanwhile is said, too, of the kind LOG.
    """

    name: str
    entry: str
    options: dict[str, Value | list[str] | dict[str, str]] = {}  # those of options.Settings that were said
    file: str = ""  # what dormouse.toml beside the function says
    reset: list[str] = []  # what of before is not kept: options, env.NAME, secret.NAME, or all
    logs: bool = False
    note: str = ""  # for people
    check: str = ""  # JSON: a request that the new version answers before it is served; "": none
    traffic: int | None = None  # it is served beside what has the name, and gets so many per cent; None: it replaces it


class Files(Packet, frozen=True, kw_only=True, tag=2):
    """Some files of the folder, with as many descriptors in the same order: regular files, opened for reading only."""

    names: list[str]


class Finish(Packet, frozen=True, kw_only=True, tag=3):
    """All files were said: deploy them."""


class Invoke(Packet, frozen=True, kw_only=True, tag=4):
    """One request. Comes with one descriptor: a file that has the request's body. ``kind``: its content type, "" for
    JSON. ``detach``: as a job, which is the answer.
    """

    name: str
    kind: str = ""
    detach: bool = False


class Remove(Packet, frozen=True, kw_only=True, tag=5):
    name: str


class Functions(Packet, frozen=True, kw_only=True, tag=6):
    """The functions that are deployed."""


class Status(Packet, frozen=True, kw_only=True, tag=7):
    pass


class Logs(Packet, frozen=True, kw_only=True, tag=8):
    """The last lines, of those that were printed since then, in seconds of the Unix clock; ``follow``: and what comes,
    until the caller leaves. ``marks``: with those that say when and by whom it was printed (core/logrecords.py).
    """

    name: str
    lines: int = 200
    follow: bool = False
    since_s: float = 0.0
    marks: bool = False


class Wish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key as it is asked for. ``tenant`` None: all for the scope ``admin``, else ``default``."""

    scopes: tuple[Scope, ...] = ("invoke",)
    functions: tuple[str, ...] = ("*",)  # patterns as a shell's
    tenant: str | None = None
    rate_s: float = 0.0  # requests per second; 0: no limit
    burst: int = 0  # 0: as many as in a second
    note: str = ""


class Keys(Packet, frozen=True, kw_only=True, tag=9):
    """The API keys that there are."""


class CreateKey(Packet, frozen=True, kw_only=True, tag=10):
    wish: Wish


class RevokeKey(Packet, frozen=True, kw_only=True, tag=11):
    id: str


class Restart(Packet, frozen=True, kw_only=True, tag=12):
    """New instances of a function, which ends its quarantine."""

    name: str


class Policy(Packet, frozen=True, kw_only=True, tag=13):
    """The scheduler's settings, after these were changed; by their names in ``[schedule]``."""

    changes: dict[str, str | int | float | bool] = {}


class Usage(Packet, frozen=True, kw_only=True, tag=14):
    """The use of functions since then, in seconds of the Unix clock; with a name, of that one alone."""

    since_s: float
    name: str = ""


class RecentRequests(Packet, frozen=True, kw_only=True, tag=15):
    """The last requests of a function, or of all; of one kind, or of any."""

    name: str = ""
    kind: Literal["", "slow", "failed", "cold"] = ""
    most: int = 50


class Versions(Packet, frozen=True, kw_only=True, tag=16):
    """The versions of a function: the one served, and earlier ones."""

    name: str


class Rollback(Packet, frozen=True, kw_only=True, tag=17):
    """Deploy an earlier version again, as a new one; 0: the one before."""

    name: str
    version: int = 0


class Pin(Packet, frozen=True, kw_only=True, tag=18):
    """A function's model is the last to leave a GPU, or not any more."""

    name: str
    pinned: bool = True


class Traffic(Packet, frozen=True, kw_only=True, tag=29):
    """The versions of a function that are served, and the per cent of its requests that each of them gets. The
    remaining share is that of the version that has the name.
    """

    name: str
    shares: dict[int, int]


class MoveModel(Packet, frozen=True, kw_only=True, tag=28):
    """Bring a function's model to a GPU, or have it leave GPUs ("host"), and host memory too ("disk")."""

    name: str
    to: Literal["gpu", "host", "disk"]


class ListJobs(Packet, frozen=True, kw_only=True, tag=19):
    """Of a function, or of all."""

    name: str = ""


class AskJob(Packet, frozen=True, kw_only=True, tag=20):
    """The state of a job, at the latest after so long; at once if it has ended."""

    id: str
    wait_s: int = 0


class JobResult(Packet, frozen=True, kw_only=True, tag=21):
    """The answer of a job that has ended."""

    id: str


class CancelJob(Packet, frozen=True, kw_only=True, tag=22):
    """One that waits or runs; with ``forget``, one that has ended."""

    id: str
    forget: bool = False


class Schema(Packet, frozen=True, kw_only=True, tag=31):
    """The schema of a function's requests and answers."""

    name: str


class Drain(Packet, frozen=True, kw_only=True, tag=23):
    """Take no new requests, and answer once nothing runs any more; ``undo``: take them again."""

    undo: bool = False


class DrainGpu(Packet, frozen=True, kw_only=True, tag=30):
    """Begin nothing more on this GPU, and give it up when what runs there is over; or (``undo``) have it serve again.
    With ``waits`` it is answered when it is given up, or was undone.
    """

    gpu: int
    undo: bool = False
    waits: bool = False


class Secrets(Packet, frozen=True, kw_only=True, tag=24):
    """The secrets of a tenant or of all that the caller sees: their names, and no value."""

    tenant: str = ""


class SetSecret(Packet, frozen=True, kw_only=True, tag=25):
    """A function gets the new value when it is restarted."""

    tenant: str
    name: str
    value: str


class OpenDashboard(Packet, frozen=True, kw_only=True, tag=27):
    """A link to the dashboard, good once and soon, with which a browser needs no key. ``end``: none, but the end of all
    sessions that such links have begun.
    """

    end: bool = False


class RemoveSecret(Packet, frozen=True, kw_only=True, tag=26):
    tenant: str
    name: str


Act = (
    Deploy
    | Invoke
    | Remove
    | Functions
    | Status
    | Logs
    | Keys
    | CreateKey
    | RevokeKey
    | Restart
    | Policy
    | Usage
    | RecentRequests
    | Versions
    | Rollback
    | Pin
    | Traffic
    | MoveModel
    | ListJobs
    | AskJob
    | JobResult
    | CancelJob
    | Schema
    | Drain
    | DrainGpu
    | Secrets
    | SetSecret
    | RemoveSecret
    | OpenDashboard
)
"""Acts that a caller may ask for; permission is decided for each."""

ToNode = Act | Files | Finish


# --- node -> who administers


class Welcome(Packet, frozen=True, kw_only=True, tag=1):
    """The protocol of the node."""

    protocol: int


class Taken(Packet, frozen=True, kw_only=True, tag=2):
    """Go on."""


class Said(Packet, frozen=True, kw_only=True, tag=3):
    """A piece of the answer: JSON, or a log. One that is streamed, or not JSON, has a ``kind``, its content type."""

    data: bytes
    kind: str = ""


class Done(Packet, frozen=True, kw_only=True, tag=4):
    pass


class Refused(Packet, frozen=True, kw_only=True, tag=5):
    """``status`` and ``code`` as over HTTP. ``of_function``: that is a function's answer, or a job's, and the node has
    refused nothing.
    """

    status: int
    code: str
    text: str
    of_function: bool = False


FromNode = Welcome | Taken | Said | Done | Refused
