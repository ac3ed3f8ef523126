"""Paths in a node's run and state directories. Names only; docs/design/processes.md draws the tree.

core/directories.py makes the run directory, and removes only what has a name of this grammar.
"""

import os
import re
import stat
from pathlib import Path
from typing import Final

from dormouse.core.sandbox.world import ZYGOTE
from dormouse.schemas.errors import ConfigError

BLOBS: Final = ".blobs"
"""Beside the functions' folders: their large files, by content. No function's name begins with a dot."""

VERSIONS: Final = ".versions"
"""Beside a function's snapshots: which there are."""

STORE_SOCKET: Final = "store"
FILES_SOCKET: Final = "files"
"""The store's endpoints in an instance's directory: its link, and where the instance offers open files."""

RUN_FOLDERS: Final = {"t": 0o700, "i": 0o711, "root": 0o700}
"""Folders that a node makes in its run directory, and their modes."""

RUN_NAMES: Final = (*RUN_FOLDERS, "admin")

_ROLE: Final = r"(supervisor|router|controller|store|metrics|traces|gpu[0-9]+)"
_WORLD: Final = r"[a-z][a-z0-9]*"
INNER_NAMES: Final = {
    "t": re.compile(
        r"(node|next)\.(json|new)|replace~?|supervisor\.pid(\.new)?|version|attach|drained|gpus-drained(\.new)?|ready|ready\.new|switch[0-9]+"
        rf"|warming(-{_WORLD})?\+?(\.new)?|zygote(\.{_WORLD})?\.[0-9]+"
        rf"|{_ROLE}-{_ROLE}\.[0-9]+|{_ROLE}\.fds\.[0-9]+"
    ),
    "i": re.compile(r"[0-9]+-[0-9]+"),  # an instance's directory, in which it may make what it likes
}

_LONGEST: Final = "/t/supervisor-controller.99999"
MAX_RUN_NBYTES: Final = 107 - len(_LONGEST)
"""Of a run directory's path: a socket's may have 107 bytes."""


def default_run_directory(name: str) -> Path:
    """Short, the same for the same user and node, and where no other user can be before us. Raises ConfigError."""
    uid = os.geteuid()
    if uid == 0:
        return Path("/run/dormouse") / name
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and os.path.isdir(runtime) and os.stat(runtime).st_uid == uid:
        return Path(runtime) / "dormouse" / name
    own = Path("/tmp") / f"dormouse-{uid}"
    try:
        found = own.lstat()
    except FileNotFoundError:
        return own / name
    if found.st_uid != uid or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{own} was made by another user; set XDG_RUNTIME_DIR, or [node] run and DORMOUSE_RUN")
    return own / name


def home_directory(instead: str) -> Path:
    """The home directory of this user, who may have no entry in passwd. Raises ConfigError, which says to set
    ``instead``.
    """
    home = os.path.expanduser("~")
    if not home.startswith("/"):
        raise ConfigError(f"uid {os.getuid()} has no home directory (no HOME, no entry in passwd); set {instead}")
    return Path(home)


def _of_generation(name: str, generation: int) -> str:
    """A node that takes over from one that runs has names of its own for what both write."""
    return f"{name}+" if generation % 2 else name


class RunPaths:
    """Paths under a node's run directory."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.trusted = self.run / "t"
        self.instances = self.run / "i"
        self.node_json = self.trusted / "node.json"
        self.pid = self.trusted / "supervisor.pid"
        self.version = self.trusted / "version"
        self.next_json = self.trusted / "next.json"  # the same of a node that is to take over
        self.replace = str(self.trusted / "replace")  # where the supervisor is told to go over to one
        self.drained = self.trusted / "drained"  # is there while no new requests are taken
        self.drained_gpus = self.trusted / "gpus-drained"  # their numbers, as JSON
        self.sandbox_root = self.run / "root"  # empty: over it each instance mounts its own root
        self.attach = str(self.trusted / "attach")
        self.admin = str(self.run / "admin")  # the router's, for the command line; it asks the kernel who calls

    def link(self, binder: str, connecter: str, epoch: int) -> str:
        """A link between node processes; ``epoch`` is that of the process that is restarted alone (an executor), else
        the connecter's.
        """
        return str(self.trusted / f"{binder}-{connecter}.{epoch}")

    def inbox(self, role: str, epoch: int) -> str:
        return str(self.trusted / f"{role}.fds.{epoch}")

    def zygote(self, epoch: int, role: str = ZYGOTE) -> str:
        """The path at which a zygote listens; by default that of functions."""
        return str(self.trusted / f"{role}.{epoch}")

    def warming(self, role: str, generation: int) -> Path:
        """The file that says how far a zygote's imports have come; of a node that takes over it is another than that of
        the node that runs, as its control groups are.
        """
        name = f"warming{role.removeprefix(ZYGOTE).replace('.', '-')}"
        return self.trusted / _of_generation(name, generation)

    def groups(self, role: str, generation: int = 0) -> str:
        """The name of a zygote's control groups. Each zygote has groups of its own, and empties them when it starts."""
        return _of_generation(str(self.run if role == ZYGOTE else self.run / role), generation)

    def instance(self, instance: str) -> str:
        return str(self.instances / instance)

    def make(self) -> None:
        """Create the directories with their modes, independent of the umask; a supervisor's are made with more care."""
        self.run.mkdir(parents=True, exist_ok=True)
        os.chmod(self.run, 0o711)
        for name, mode in RUN_FOLDERS.items():
            path = self.run / name
            path.mkdir(exist_ok=True)
            os.chmod(path, mode)


class StatePaths:
    """Paths under a node's state directory."""

    def __init__(self, state: str | Path) -> None:
        self.state = Path(state)
        self.version = self.state / "version"
        self.before = self.state / "before"  # of a migration, until the node that made it serves
        self.catalogue = self.state / "catalogue.sqlite3"
        self.keys = self.state / "keys.json"
        self.secrets = self.state / "secrets.json"
        self.secrets_key = self.state / "secrets.key"  # or where [node] secrets_key says
        self.environments = self.state / "environments"
        self.functions = self.state / "functions"
        self.blobs = self.functions / BLOBS
        self.logs = self.state / "logs"
        self.settings = self.state / "settings.json"  # that the node was last started with
        self.language_models = self.state / "language-models"  # is there while any are deployed; else empty
        self.usage = self.state / "usage.sqlite3"
        self.jobs = self.state / "jobs.sqlite3"
        self.store = self.state / "store"
        self.store_key = self.store / "key"
        self.store_index = self.store / "index.sqlite3"
        self.store_segments = self.store / "segments"

    def function_log(self, name: str) -> Path:
        return self.logs / f"fn-{name}.log"

    @property
    def audit(self) -> Path:
        return self.logs / "audit.log"

    def role_log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def make(self) -> None:
        for path in (self.state, self.functions, self.logs):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
