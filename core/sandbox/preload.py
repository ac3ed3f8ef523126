"""Importing a world, once, in its zygote, so that its children find it done. Runs no operation.

The modules that the world needs must be there. Whatever one of its libraries does at its import, the zygote starts:
without it. As a program, ``CONFIG FILE``: import the functions' world as their zygote would, for `dormouse doctor`.
"""

import faulthandler
import importlib
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from dormouse.core.config import NodeConfig
from dormouse.core.sandbox import linux
from dormouse.core.sandbox.warming import LONGEST_S, START_ANEW, STUCK_S, Warming
from dormouse.core.sandbox.world import FUNCTIONS, ZYGOTE, World
from dormouse.core.sandbox.worlds import worlds
from dormouse.core.torchbuild import mismatches
from dormouse.schemas.errors import ProcessFailed

ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # for what might initialise CUDA at its import
}
"""Of who imports what is to be forked: libraries that start threads at their import then start none."""

_THREADS_S: Final = 1.0  # for threads that an import started to end
_MAX_REASON: Final = 500


def import_world(world: World, warming: Warming) -> Callable[..., Any]:
    """Import all and prepare it; returns what runs in the children. Raises ProcessFailed, which names what is needed
    and is not there. If the import of a library fails, the process ends.
    """
    linux.limit_malloc_arenas(2)
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in world.modules:
        _needed(world, name)
    for name in world.libraries:
        if name not in warming.left_out and _installed(name):
            _import(name, warming)
    warming.end()
    if world.prepare:
        _function(world, world.prepare)()
    return _function(world, world.entry)


def _needed(world: World, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            traceback.print_exc()
        other = "set [sandbox] python to" if world.name == FUNCTIONS else "have that world name"
        raise ProcessFailed(
            f"the world {world.name!r} needs {name}, which {sys.executable} cannot import "
            f"({type(error).__name__}: {error}); install it there, or {other} another interpreter"
        ) from error


def _function(world: World, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found = getattr(_needed(world, module), name, None)
    if not callable(found):
        raise ProcessFailed(f"the world {world.name!r} needs {path}; define this function in {module}")
    return found  # type: ignore[no-any-return]


def _installed(name: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    return False


def _import(name: str, warming: Warming) -> None:
    """A thread ends a process that hangs, one in C where it keeps the interpreter's lock; a crash ends it anyway. All
    find their name noted.
    """
    warming.begin(name)
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(done,), daemon=True)
    watch.start()
    failure: BaseException | None = None
    try:
        importlib.import_module(name)
    except BaseException as error:  # SystemExit too: nothing that a library raises may stop a node
        failure = error
    finally:
        done.set()
        watch.join()
        faulthandler.cancel_dump_traceback_later()
    if failure is not None:
        _start_anew(name, _reason(failure), warming)
    end_s = time.monotonic() + _THREADS_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > end_s:
            _start_anew(name, "its import leaves a thread running, which no fork would have", warming)
        time.sleep(0.01)


def _watch(done: threading.Event) -> None:
    began_s, queued_s = time.monotonic(), _queued_s()
    while not done.wait(LONGEST_S / 40):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)  # from now on: nobody keeps the lock
        if time.monotonic() - began_s - (_queued_s() - queued_s) >= LONGEST_S:
            faulthandler.dump_traceback()
            os._exit(1)


def _queued_s() -> float:
    """The time that the main thread has waited for a processor: an import on a machine that is busy does not hang."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _start_anew(name: str, reason: str, warming: Warming) -> NoReturn:
    warming.leave_out(name, reason)
    print(f"dormouse: {name} is left out of what is imported once: {reason}", file=sys.stderr, flush=True)
    os._exit(START_ANEW)


def _reason(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]
    return "; ".join([text, *mismatches()])


def main() -> int:
    """Print the libraries that are built for another GPU than torch."""
    config = msgspec.json.decode(sys.argv[1], type=NodeConfig)
    try:
        import_world(worlds(config)[ZYGOTE], Warming.read(Path(sys.argv[2])))
    except ProcessFailed as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.writelines(f"\n{text}" for text in mismatches())
    return 0


if __name__ == "__main__":
    sys.exit(main())
