"""One-line advice on the errors that authors of functions meet first, for the log and for the client. Pure.

An error caused by the sandbox does not say so: outside of it, the file is there and the network works.
"""

import errno
import os
import re
import socket
from collections.abc import Iterator
from typing import Final

_NETWORK: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_NO_NETWORK: Final = re.compile(
    r"network is unreachable|temporary failure in name resolution|name or service not known|nameresolutionerror|"
    r"failed to resolve|no address associated with hostname|nodename nor servname|dns error",
    re.IGNORECASE,
)
_HUB: Final = re.compile(
    r"couldn't connect to 'https?://huggingface\.co|check your internet connection|offline mode is enabled|"
    r"cannot find the requested files in the (?:local|disk) cache|outgoing traffic has been disabled|"
    r"is not a local folder and is not a valid model identifier|huggingface\.co",
    re.IGNORECASE,
)
_COMPILER: Final = re.compile(
    r"failed to find c compiler|unable to find a compatible .*compiler|no (?:c|c\+\+) compiler|invalidcxxcompiler|"
    r"error: command '(?:gcc|g\+\+|cc|clang|x86_64-linux-gnu-gcc)'|"
    r"could not find (?:gcc|g\+\+|a compiler)|ninja is required",
    re.IGNORECASE,
)
_NO_DRIVER: Final = re.compile(
    r"no cuda gpus are available|found no nvidia driver|cuda driver version is insufficient|cannot find.*libcuda|"
    r"libcuda\.so|nvml shared library not found|no cuda-capable device",
    re.IGNORECASE,
)
_COMPILERS: Final = frozenset({"gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ninja", "make", "cmake"})

NETWORK: Final = (
    "functions have no network: call other functions with dormouse.call (deploy with --call NAME); for all else deploy "
    "with --network, if [sandbox] network of the node allows it"
)
HUB: Final = (
    "functions have no network: download it once as the node's user, or put its folder beside the function's file "
    "(docs/hugging-face.md)"
)
MODULE: Final = "a requirements.txt beside the file brings libraries (docs/dependencies.md)"
OUTSIDE: Final = (
    "of the machine's files, functions see their own folder, /usr, and what [sandbox] read of the node names: put it "
    "beside the function's file, or its folder into [sandbox] read"
)
WRITES: Final = "a function can write in $HOME, /tmp, /var/tmp and /dev/shm alone: have caches and results there"
COMPILER: Final = (
    "functions see no compiler but one that the machine has in /usr: install it there, or bring what is built by "
    "requirements.txt"
)
PROGRAM: Final = (
    "functions see no program but those that the machine has in /usr: install it there, or use a library that "
    "requirements.txt brings"
)
DRIVER: Final = 'no driver of a GPU is in a function: torch\'s operations on "cuda" alone reach one'
SEMAPHORE: Final = "multiprocessing has no semaphores here: use threads, or several instances (--stateless)"


def hint(error: BaseException, network: bool) -> str:
    """One line; "" if there is nothing to say. ``network``: the function has one."""
    told = list(_told(error))
    if isinstance(told[0], ModuleNotFoundError):
        return MODULE if re.match(r"No module named '\w", _text(told[0])) else ""
    everything = [*told, *_led(error)]
    if not network:
        if any(_HUB.search(_text(each)) or type(each).__module__.startswith("huggingface_hub") for each in everything):
            return HUB
        if any(_of_network(each) for each in everything):
            return NETWORK
    return next((said for each in told if (said := _of_one(each))), "")


def _of_one(error: BaseException) -> str:
    text = _text(error)
    if _COMPILER.search(text):
        return COMPILER
    if _NO_DRIVER.search(text):
        return DRIVER
    if isinstance(error, OSError) and error.errno == errno.ENOSYS and "sem" in text.lower():
        return SEMAPHORE
    return _of_file(error) if isinstance(error, OSError) else ""


def _of_file(error: OSError) -> str:
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and name:
        return WRITES if error.errno == errno.EROFS or not _reads(error) else OUTSIDE
    if not isinstance(error, FileNotFoundError | NotADirectoryError) or not name:
        return ""
    if _starts_program(error):
        return COMPILER if os.path.basename(name) in _COMPILERS else PROGRAM
    return OUTSIDE if os.path.isabs(name) and not name.startswith((os.getcwd() + "/", "/tmp/", "/dev/")) else ""


def _reads(error: OSError) -> bool:
    """Whether the refused file is there, and can be seen, but not read."""
    return os.path.exists(error.filename) and not os.access(error.filename, os.R_OK)


def _starts_program(error: OSError) -> bool:
    trace, names = error.__traceback__, []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return bool(names) and os.path.basename(names[-1]) in ("subprocess.py", "popen_spawn_posix.py")


def _of_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _NETWORK):
        return True
    return bool(_NO_NETWORK.search(_text(error)))


def _told(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen and len(seen) < 20:
        seen.add(id(each))
        yield each
        each = each.__cause__


def _led(error: BaseException) -> Iterator[BaseException]:
    """The exception that was being handled when it was raised, and those that libraries carry in their own."""
    seen: set[int] = set()
    left: list[object] = [error]
    while left and len(seen) < 40:
        each = left.pop()
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args[:4]]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:4000]
    except Exception:  # user code
        return ""
