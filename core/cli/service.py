"""`dormouse install-service`: the node as a service of systemd, root's or a user's own."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click

from dormouse.core.cli.frame import CommandContext, pass_context
from dormouse.schemas.errors import ConfigError

# The times are those of the supervisor (START_S, SILENCE_S, STOP_S), with room. `OOMPolicy=continue`: an instance that
# the kernel ends for its memory is the node's business. `KillMode=mixed`: the supervisor alone hears SIGTERM, and ends
# the others in their order. 2 and 5 are what cannot be used, and what would be unsafe: again, it would be the same.
UNIT: Final = """\
# Made by `dormouse install-service`.
[Unit]
Description=Dormouse node {name}
After=network-online.target nvidia-persistenced.service
Wants=network-online.target
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
{account}ExecStart={command}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 5
TimeoutStartSec=3min
TimeoutStopSec=45
WatchdogSec=30
KillMode=mixed
OOMPolicy=continue
Delegate=yes
LimitNOFILE=65536
{limits}
[Install]
WantedBy={target}
"""

ROOT_LIMITS: Final = "LimitMEMLOCK=infinity\nTasksMax=infinity\n"
"""A user's manager cannot raise its own. Pinned memory for copies to GPUs is locked memory."""


@click.command("install-service")
@click.argument("file", required=False, metavar="[NODE.toml]")
@click.option("--write", is_flag=True, help="Write it where systemd looks for it; without it, it is only printed.")
@pass_context
def install_service(context: CommandContext, file: str | None, write: bool) -> None:
    """Print a systemd unit that runs this node, and write it with --write.

    As root it is a service of the machine, and otherwise one of this user. The node is that which `dormouse up` with
    the same arguments starts, with what is deployed there.
    """
    from dormouse.core.node.nodeprocess import config_of

    config = config_of(file, context.node, context.run)
    name = config.node.name
    if file is None and name != "default":
        raise click.UsageError(
            f"--node names a node that has no file; write one with [node] name = {name!r}, and give that"
        )
    root = os.geteuid() == 0
    node_file = [os.path.abspath(file)] if file else []
    # A service has no environment of a shell.
    placed = ["--run", config.node.run] if config != config_of(file, context.node) else []
    text = unit(name, [_command(), *placed, "up", "--foreground", *node_file], root=root)
    path = unit_path(name, root=root)
    click.echo(f"# {path}\n{text}", nl=False)
    if (trouble := examined(text, path.name, root=root)) is not None:
        click.echo(f"systemd-analyze says:\n{trouble}", err=True)
    if not write:
        click.echo("\nNothing is written; --write writes it.", err=True)
        return
    if path.exists() and path.read_text() != text:
        backup = path.with_suffix(".service.old")
        path.replace(backup)
        click.echo(f"what was there is now {backup}", err=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; print it without --write, and place it yourself") from error
    user = "" if root else " --user"
    click.echo(f"written. Next:\n  systemctl{user} daemon-reload\n  systemctl{user} enable --now {path.name}", err=True)
    if not root:
        click.echo("  loginctl enable-linger     # else it ends when you log out", err=True)


def unit(name: str, command: list[str], *, root: bool) -> str:
    """The text of a unit file."""
    return UNIT.format(
        name=name,
        # A service of the machine has no HOME without it, where the state directory is.
        account="User=root\n" if root else "",
        command=" ".join(map(_quoted, command)),
        limits=ROOT_LIMITS if root else "",
        target="multi-user.target" if root else "default.target",
    )


def unit_path(name: str, *, root: bool) -> Path:
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "systemd" / "user"
    folder = Path("/etc/systemd/system") if root else own
    return folder / ("dormouse.service" if name == "default" else f"dormouse-{name}.service")


def examined(text: str, name: str, *, root: bool) -> str | None:
    """Complaints of `systemd-analyze verify`; None: there are none, or it is not installed."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text)
        command = [analyze, "verify", "--recursive-errors=no", *([] if root else ["--user"]), str(path)]
        environment = {
            "XDG_RUNTIME_DIR": folder,
            **os.environ,
        }  # a user's manager wants one, and looks for nothing there
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
        except subprocess.TimeoutExpired:
            return None
    return done.stderr.strip() or done.stdout.strip() if done.returncode else None


def _command() -> str:
    """The `dormouse` beside this Python: systemd has another PATH."""
    beside = Path(sys.executable).with_name("dormouse")
    found = str(beside) if beside.exists() else shutil.which("dormouse")
    if found is None:
        raise ConfigError(f"there is no `dormouse` beside {sys.executable}; install the package there")
    return found


def _quoted(word: str) -> str:
    """As systemd.service(5) reads words of a command: % and $ begin something else there."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$").replace("\n", "\\n")
    return f'"{escaped}"' if not word or any(each.isspace() or each in "\"'\\;" for each in word) else escaped
