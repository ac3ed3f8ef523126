"""What the rooms of the command line share: which node a command is about, `--json`, and exit statuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from dormouse.core.node.adminclient import AdminClient

FAILED, USAGE, NOT_FOUND, UNREACHABLE, REFUSED = 1, 2, 3, 4, 5
INTERRUPTED: Final = 130

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Says at Ctrl-C what the node does without this command."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what) from None


def run_directory(run: str | None, node: str | None) -> Path:
    """Where the chosen node has its sockets."""
    from dormouse.core.config import NodeConfig, NodeSection

    if run is not None:
        return Path(run)
    return NodeConfig(node=NodeSection(name=node or "default")).run_directory


class CommandContext:
    """Which node a command is about."""

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
