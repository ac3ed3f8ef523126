"""Files that instances see: an allow-list of paths of this machine, gathered once, in the zygote.

Owns the list; mounts.py makes a root of it. A function's own folder is added for each fork.
"""

import os
import pwd
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dormouse import core, schemas
from dormouse.core.sandbox import mounts

HOME: Final = "/home/dormouse"
FUNCTION: Final = "/function"
"""The path at which an instance sees its snapshot."""

ENVIRONMENT: Final = "/environment"
"""The path at which it sees the libraries that are its function's own."""

USER: Final = "dormouse"
SCRATCH: Final = ("/tmp", "/var/tmp", "/dev/shm", HOME)

_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_SYSTEM: Final = (
    "/usr",
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),  # links into /usr on most systems
    *("/nix/store", "/gnu/store"),  # what others have instead of /usr
    "/etc/alternatives",  # links by which libraries of the same use are chosen
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/fonts",
    "/etc/mime.types",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",  # not /etc/ssl: it has a folder of private keys
    "/etc/ssl/openssl.cnf",
    "/etc/ca-certificates",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/pki/ca-trust/extracted",
    "/etc/crypto-policies",
    "/sys/devices/system/cpu",  # by which libraries count cores
    "/sys/devices/system/node",
)
_FILES: Final = {
    "/etc/group": "root:x:0:\n{user}:x:{uid}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/etc/passwd": "root:x:0:0::/:/bin/sh\n{user}:x:{uid}:{uid}::{home}:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
}
_NETWORK_FILES: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
"""Files by which names are looked up; as the machine has them where there is a network."""

_LINKS: Final = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}


@dataclass(frozen=True, kw_only=True)
class View:
    """The files that every instance sees, and the directories that stay hidden even where a window would show them.
    Real paths.
    """

    covers: tuple[mounts.Cover, ...] = ()
    windows: tuple[mounts.BoundPath, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)  # environment variables that point into windows

    def root(
        self, uid: int, windows: list[mounts.BoundPath], scratch_nbytes: int, own_proc: bool, network: bool = False
    ) -> mounts.Root:
        """The root of one instance, with its own windows."""
        names = {"user": USER, "uid": uid, "home": HOME}
        passwd = {path: text.format(**names) for path, text in _FILES.items()}
        if uid == 0:
            passwd["/etc/passwd"] = passwd["/etc/passwd"].split("\n", 1)[1]
        if network:
            passwd |= {path: found for path in _NETWORK_FILES if (found := _text(path))}
        return mounts.Root(
            steps=tuple(mounts.plan(self.covers, [*self.windows, *windows])),
            links=self.links,
            files=passwd,
            home=HOME,
            scratch_nbytes=scratch_nbytes,
            own_proc=own_proc,
        )


def gather(run: str, state: str | None, read: Iterable[str] = (), modules: Iterable[str] = ()) -> View:
    """The host's part, what the node's owner lets functions ``read``, and where those ``modules`` of a world lie that
    have been imported. Paths that are not there are left out.
    """
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface"), "hub"
    )
    torch_home = os.environ.get("TORCH_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "torch")
    caches = {"HF_HUB_CACHE": os.path.realpath(cache), "TORCH_HOME": os.path.realpath(torch_home)}
    caches = {name: path for name, path in caches.items() if os.path.isdir(path)}
    wanted = [
        *_SYSTEM,
        *(sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, sys.executable, os.path.dirname(sys.executable)),
        # An editable install finds these without sys.path.
        *(path for package in (core, schemas) for path in package.__path__),
        *(path for name in modules for path in _places(name)),
        *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
        *caches.values(),
        *read,
    ]
    wanted = [os.path.abspath(path) for path in wanted if path and os.path.exists(path)]
    real = {os.path.realpath(path) for path in wanted} - {"/"}
    hidden = {os.path.realpath(path) for path in (run, state, *_homes()) if path} - {"/"}
    return View(
        covers=(
            mounts.Cover(path="/"),
            *(mounts.Cover(path=path) for path in sorted(hidden)),
            *(mounts.Cover(path=path, scratch=True) for path in SCRATCH),
        ),
        windows=(
            *(mounts.BoundPath(path=f"/dev/{name}", device=True) for name in _DEVICES),
            *(mounts.BoundPath(path=path) for path in sorted(real)),
        ),
        links={link: to for path in wanted for link, to in mounts.links_on(path).items()} | _LINKS,
        caches=caches,
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _places(name: str) -> Iterator[str]:
    """The paths of a module and of the packages in which it is."""
    while name:
        module = sys.modules.get(name)
        yield from (getattr(module, "__file__", None) or "", *getattr(module, "__path__", ()))
        name = name.rpartition(".")[0]


def _homes() -> set[str]:
    """The home directories of the node's user, who may have no entry in passwd."""
    try:
        entry = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        entry = "/"
    return {os.path.realpath(path) for path in (os.path.expanduser("~"), entry) if path.startswith("/")}
