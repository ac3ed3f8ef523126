"""`dormouse backup` and `restore`: a node's state in one file."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dormouse.core.cli.frame import CommandContext, as_json, pass_context
from dormouse.core.node.refusals import Unreachable
from dormouse.core.output import show_json

if TYPE_CHECKING:
    from dormouse.core.config import NodeConfig

of_file = click.option("--config", metavar="NODE.toml", help="The file of a node that does not run.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--no-models", is_flag=True, help="Leave out what functions have loaded: it is loaded anew.")
@of_file
@as_json
@pass_context
def backup(context: CommandContext, file: Path, no_models: bool, config: str | None, json_: bool) -> None:
    """Write all that a node keeps into FILE, while it runs.

    Functions and their earlier versions, libraries, keys, secrets and the key that opens them, jobs, usage, logs, and
    models. Who reads FILE can be the node: keep it as you keep a password.
    """
    from dormouse.core.node import backup as backup_
    from dormouse.core.paths import StatePaths
    from dormouse.core.quantities import size

    node = _config(context, config)
    said = backup_.back_up(StatePaths(node.state_directory), file.absolute(), not no_models)
    if json_:
        show_json(said)
        return
    click.echo(f"{file} has {said['functions']} functions, {size(said['nbytes'])}")
    if node.node.secrets_key:
        click.echo(f"the key of secrets is not in it: {node.node.secrets_key}", err=True)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--state", metavar="DIR", type=click.Path(path_type=Path), help="Into this directory.")
@of_file
@as_json
@pass_context
def restore(context: CommandContext, file: Path, state: Path | None, config: str | None, json_: bool) -> None:
    """Make a state directory of what `dormouse backup` has written, for a node that is to start.

    It is [node] state of NODE.toml, or DIR; it must be empty, or not there. What is of an older version is brought to
    this one's by the node's start.
    """
    from dormouse.core.node import backup as backup_
    from dormouse.core.node import nodeprocess
    from dormouse.core.paths import StatePaths

    if (state is None) == (config is None):
        raise click.UsageError("name the directory, by --state DIR or by --config NODE.toml")
    directory = nodeprocess.config_of(config, None).state_directory if state is None else state.absolute()
    said = backup_.restore(file, StatePaths(directory))
    if json_:
        show_json(said)
        return
    click.echo(f"{said['state']} has {said['functions']} functions; start a node on it with [node] state")


def _config(context: CommandContext, file: str | None) -> "NodeConfig":
    """Of the node that runs, or that is started with a file. Raises Unreachable, ConfigError."""
    from dormouse.core.node import nodeprocess
    from dormouse.core.startup import read_node_config

    if file is not None:
        return nodeprocess.config_of(file, None)
    try:
        return read_node_config(str(context.directory))
    except FileNotFoundError:
        text = f"no node runs in {context.directory}; of one that does not run, give its file: --config NODE.toml"
        raise Unreachable(text) from None
    except PermissionError:
        text = f"{context.directory} is not yours to read: run this as the node's user, or as root"
        raise click.UsageError(text) from None
