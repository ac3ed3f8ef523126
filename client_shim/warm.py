"""What the zygote imports, so that a function's own imports find it done.

Chosen by measurement: what the first lines of functions import; what else is a setting, by default the modules of
`transformers` that every model needs. A model's own module (``transformers.models.bert``) takes 5 to 50 ms and is left
to the instance that wants it. Whatever a library of the setting does at its import, the node starts: without it.
"""

import faulthandler
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from dormouse.client_shim import linux
from dormouse.core.warming import LONGEST_S, ONE_THREAD, START_ANEW, STUCK_S, Warming

ALWAYS: Final = (
    "copy",
    "dataclasses",
    "functools",
    "json",
    "math",
    "numpy",
    "orjson",
    "torch",
    "torch.nn.functional",
    "torch.nn.utils.parametrize",
    "dormouse.client_shim.runner",
)

COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec", "xformers")
"""Libraries with compiled parts that fit one build of torch."""

_THREADS_S: Final = 1.0  # for threads that an import started to end
_MAX_REASON: Final = 500


def import_everything(if_installed: Iterable[str], warming: Warming) -> None:
    """Import, and prepare the shim; runs no operation. Raises ImportError only for what Dormouse itself needs.

    ``if_installed`` is ``[sandbox] warm`` of the node's configuration. If one of these fails, the process ends.
    """
    linux.limit_malloc_arenas(2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported, and what might initialise CUDA with it
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ALWAYS:
        importlib.import_module(name)
    from dormouse.client_shim import install

    for name in if_installed:
        if name not in warming.left_out and _installed(name):
            _import(name, warming)
    warming.end()
    install.prepare()


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
    """How long the main thread has waited for a processor: an import on a machine that is busy does not hang."""
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


def mismatches() -> list[str]:
    """Companions of torch that were built for another kind of GPU than torch, which they often cannot be imported
    beside.
    """
    import torch

    found = []
    for name in COMPANIONS:
        spec = importlib.util.find_spec(name)
        version = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
        if version is None or not version.exists():
            continue
        cuda = re.search(r"^cuda(?:: [^=]*)? = '([^']+)'", version.read_text(errors="replace").replace('"', "'"), re.M)
        built = cuda[1] if cuda else None
        if built != torch.version.cuda:
            theirs, ours = (f"CUDA {kind}" if kind else "the CPU" for kind in (built, torch.version.cuda))
            found.append(
                f"{name} {importlib.metadata.version(name)} is built for {theirs} and torch {torch.__version__} for "
                f"{ours}: install both from one index (https://pytorch.org/get-started)"
            )
    return found


def main() -> int:
    """``FILE NAME...``: import as a zygote would, for `dormouse doctor`, and print the mismatches."""
    os.environ.update(ONE_THREAD)
    import_everything(sys.argv[2:], Warming.read(Path(sys.argv[1])))
    sys.stdout.writelines(f"\n{text}" for text in mismatches())
    return 0


if __name__ == "__main__":
    sys.exit(main())
