"""`dormouse dev` and `dormouse top`, which a person leaves running in a terminal until Ctrl-C; `dormouse dashboard`."""

import html
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dormouse.core.cli.deploy import keep, not_deployed, of_functions, read_options, show_and_keep, show_changes
from dormouse.core.cli.frame import CommandContext, pass_context
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import clear
from dormouse.schemas.errors import DormouseError

if TYPE_CHECKING:
    from dormouse.core.node.adminclient import AdminClient

LOOK_S: Final = 0.3
"""Between two looks at the folder: shorter than it takes to change windows."""


LINK_S: Final = 60.0
"""Validity of a link to the dashboard: nobody knows how soon a browser has its page."""

SCREENS: Final = {"DISPLAY", "WAYLAND_DISPLAY"}
"""Variables of which one is set where a browser has a screen."""


@click.command()
@click.argument("file", type=click.Path(exists=True), metavar="FILE.py|FOLDER")
@click.option("--name", help="Deploy it under this name.  [default: the file's, with -dev]")
@of_functions
@pass_context
def dev(context: CommandContext, /, file: str, name: str | None, **given: Any) -> None:
    """Deploy a function, again whenever its files change, show what it prints, and remove it at Ctrl-C
    or when it is told to end otherwise (`kill`, a terminal that is closed).

    The files that --requirements and --env-file name count, too. A version that does not load is not deployed: the one
    before goes on.
    """
    from dormouse.core import folder
    from dormouse.core.cli import functionfile

    path = Path(file).absolute()
    called = name or f"{path.stem}-dev"
    client = context.client
    read_options(given)  # what is wrong with them now, is a slip
    if any(row["name"] == called for row in client.functions()):
        raise CallRefused(409, "name_taken", f"{called!r} is deployed; remove it, or give another --name")
    seen, complaint, following, printed = None, "", False, bytearray()
    try:
        while True:
            try:
                found = functionfile.find(path)
                wanted = read_options(given)
                if (state := (folder.state(found), wanted)) != seen:
                    printed = bytearray()
                    show = partial(keep if following else show_and_keep, printed)  # what is followed is shown already
                    answer = client.deploy(called, found, wanted, show, reset=["all"])
                    click.echo(f"{called} version {answer['version']} is deployed", err=True)
                    show_changes(answer, err=True)
                    if not following:
                        threading.Thread(target=_follow, args=(client, called), daemon=True).start()
                    seen, complaint, following = state, "", True
            except (folder.NoFunction, OSError, CallRefused, click.BadParameter) as error:
                seen = state if isinstance(error, CallRefused) else None  # an editor may be writing it
                told = not_deployed(client, called, error, bytes(printed)) if isinstance(error, CallRefused) else error
                if complaint != (complaint := str(told)):
                    click.echo(f"! {complaint}", err=True)
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        with suppress(CallRefused):  # nothing was deployed
            client.remove(called)
            click.echo(f"\n{called} is removed", err=True)


def _follow(client: "AdminClient", name: str) -> None:
    """Until the function is removed."""
    try:
        for piece in client.logs(name, 0, True):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    except (CallRefused, Unreachable, DormouseError, OSError):
        pass


@click.command()
@click.option("--every", type=click.FloatRange(0.2, 60.0), default=1.0, show_default=True, help="Seconds.")
@pass_context
def top(context: CommandContext, every: float) -> None:
    """Show `dormouse status`, and go on showing it until Ctrl-C."""
    from dormouse.core.cli import statusview

    if not sys.stdout.isatty():
        raise click.UsageError("this is for a terminal; `dormouse status` prints once")
    client = context.client
    while True:
        value = client.status()
        clear()
        statusview.screen(value, shutil.get_terminal_size().lines)
        time.sleep(every)


@click.command()
@click.option("--print", "only_print", is_flag=True, help="Do not open a browser.")
@click.option("--end", is_flag=True, help="End all sessions that such links have begun.")
@pass_context
def dashboard(context: CommandContext, only_print: bool, end: bool) -> None:
    """Print a link to the dashboard, and open it where there is a screen.

    The link is good once, and for a minute. The browser tab that opens it needs no key: it may do what a key of the
    scope admin may, for twelve hours, until `--end`, or until the node's router ends.
    """
    if end:
        click.echo(f"sessions ended: {context.client.end_dashboards()}")
        return
    link = context.client.dashboard()
    click.echo(link)
    if not only_print and sys.stdout.isatty() and SCREENS & os.environ.keys():
        click.echo("the browser opens it; this command ends in a minute (or Ctrl-C), when the link is good no more")
        open_link(link, LINK_S)


def open_link(link: str, wait_s: float) -> None:
    """In the browser, by a file that its user alone can read: everybody can read a process's arguments, and whoever
    opens the link first has the session. The file is there as long as the link is good.
    """
    import tempfile
    import webbrowser

    with tempfile.TemporaryDirectory(prefix="dormouse-") as folder:  # its mode is 0700
        page = Path(folder) / "dashboard.html"
        page.touch(0o600)
        page.write_text(f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={html.escape(link)}">\n')
        webbrowser.open(page.as_uri())
        with suppress(KeyboardInterrupt):
            time.sleep(wait_s)
