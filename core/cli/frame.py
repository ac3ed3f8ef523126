"""Shared parts of the command line's modules: the node that a command is about, `--json`, and exit statuses."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dormouse.core.errortext import hints, traced
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.schemas.errors import DormouseError

if TYPE_CHECKING:
    from dormouse.core.node.adminclient import AdminClient

FAILED, USAGE, NOT_FOUND, REFUSED = 1, 2, 3, 5  # and UNREACHABLE
INTERRUPTED: Final = 130

Command = TypeVar("Command", bound=Callable[..., Any])

_wanted: list[str] = []
"""Has "json" once a command has been told so: failures are JSON, too, wherever they come from."""


def _remember(context: click.Context, option: click.Parameter, given: bool) -> bool:
    if given:
        _wanted.append("json")
    return given


def json_option(help: str) -> Callable[[Command], Command]:
    return click.option("--json", "json_", is_flag=True, is_eager=True, callback=_remember, help=help)


as_json = json_option("Print JSON, also of what fails.")


def begin() -> None:
    """Another command, in the same process."""
    from dormouse.core.output import shown

    _wanted.clear()
    shown.clear()


def json_wanted(slip: click.UsageError | None = None) -> bool:
    """Whether this command prints JSON; of one that could not be read, whether it was told to."""
    if slip is None or slip.ctx is None:
        return bool(_wanted)
    return "--json" in sys.argv and any(option.name == "json_" for option in slip.ctx.command.params)


def show_failure(code: str, text: str, hint: str | None = None) -> None:
    """On the standard output, as the node says it over HTTP. ``hint``: what can be done, if the text does not say it as
    the node's own do.
    """
    from dormouse.core.output import show_json, shown

    if not shown:
        show_json({"error": failure(code, text, hint)})


def failure(code: str, text: str, hint: str | None = None) -> dict[str, str | None]:
    """As JSON has it, once: a command that prints this itself says no more of it."""
    begin()
    said = text.partition("; ")[2].partition("\n")[0] if hint is None else hint
    return {"code": code, "message": text, "hint": said or None}


def advice(error: CallRefused) -> str | None:
    """The hint of an error whose text is not the node's: a function's words, and its code, may have semicolons."""
    text = str(error)
    return "; ".join(hints(text)) if error.of_function or traced(text) else None


def of_error(error: CallRefused | Unreachable | DormouseError | KeyboardInterrupt) -> dict[str, str | None]:
    """Why the answer is not whole, for JSON that has what came of it."""
    match error:
        case CallRefused():
            return failure(error.code, str(error), advice(error))
        case Unreachable():
            return failure("unreachable", str(error))
        case DormouseError():
            return failure("failed", str(error))
    return failure("interrupted", "interrupted")


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Says at Ctrl-C what the node does without this command."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what) from None


ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
"""Sent by service managers and `kill`, and by a terminal that is closed."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Such a signal is like Ctrl-C, once: what a command takes back at its end, it takes back then, too. One that is
    ignored, as below `nohup`, stays so.
    """
    caught = [number for number in ENDS if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for again in caught:  # the end is not to be interrupted
            signal.signal(again, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def ended_as_it_likes() -> None:
    """A program that runs in this process has the signals as every program has them."""
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def run_directory(run: str | None, node: str | None) -> Path:
    """The directory of the chosen node's sockets."""
    from dormouse.core.config import NodeConfig, NodeSection

    if run is not None:
        return Path(run)
    return NodeConfig(node=NodeSection(name=node or "default")).run_directory


class CommandContext:
    """The node that a command is about."""

    def __init__(self, run: str | None, node: str | None, run_is_written: bool = False) -> None:
        self.run = run
        self.node = node
        self.run_is_written = run_is_written  # in the command, and not in the environment

    @property
    def directory(self) -> Path:
        return run_directory(self.run, self.node)

    @property
    def client(self) -> "AdminClient":
        from dormouse.core.node.adminclient import PATIENCE_S, AdminClient

        return AdminClient(self.directory, PATIENCE_S)


pass_context = click.make_pass_decorator(CommandContext)
