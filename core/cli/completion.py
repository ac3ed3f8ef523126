"""`dormouse completion`: the shell completes commands, options, and the names of functions that the node has."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from dormouse.core.cli.frame import run_directory

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

WAIT_S: Final = 1.0
"""A shell is blocked meanwhile."""

HOW: Final = {
    "bash": "source <(dormouse completion bash)        # in ~/.bashrc",
    "zsh": "source <(dormouse completion zsh)         # in ~/.zshrc, after compinit",
    "fish": "dormouse completion fish | source         # in ~/.config/fish/config.fish",
}


def function_names(context: click.Context, _: click.Parameter, beginning: str) -> "list[CompletionItem]":
    """Those that begin so; none if the node does not say, whatever the reason: nobody reads an error there."""
    from click.shell_completion import CompletionItem

    from dormouse.core.node.adminclient import AdminClient
    from dormouse.core.node.refusals import CallRefused, Unreachable
    from dormouse.schemas.errors import DormouseError

    chosen = context.find_root().params
    node: str | None = chosen.get("node")
    run: str | None = None if node else chosen.get("run")
    taken = {name for words in context.params.values() if isinstance(words, tuple) for name in words}
    try:
        rows = AdminClient(run_directory(run, node), call_s=WAIT_S).functions()
    except (CallRefused, Unreachable, DormouseError, OSError):
        return []
    return [
        CompletionItem(row["name"], help=row["state"])
        for row in rows
        if row["name"].startswith(beginning) and row["name"] not in taken
    ]


def function_argument(name: str = "name", **attributes: Any) -> Callable[[Any], Any]:
    """A function's name, which the shell completes."""
    return click.argument(name, shell_complete=function_names, **attributes)


@click.command(epilog="\b\n" + "\n".join(f"  {line}" for line in HOW.values()))
@click.argument("shell", type=click.Choice([*HOW]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what lets SHELL complete this command, and names of functions."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three"
    click.echo(kind(context.find_root().command, {}, "dormouse", "_DORMOUSE_COMPLETE").source())
