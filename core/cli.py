"""The `dormouse` command. Thin: every command is one or two calls to a node, printed.

Exit status: 0 ok, 1 failed, 2 usage, 3 not found, 4 no node answers, 5 refused or over a limit, 130 interrupted. rich
and everything heavy is imported inside the command that needs it, so that `--help` is fast.
"""

import errno
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from click.core import ParameterSource

from dormouse.core.adminclient import AdminClient, Refused, Unreachable
from dormouse.core.output import show_json, table

FAILED, USAGE, NOT_FOUND, UNREACHABLE, REFUSED = 1, 2, 3, 4, 5
INTERRUPTED: Final = 130

FUNCTION_COLUMNS: Final = [
    "name", "version", "state", "tenant", "deadline_ms", "percentile", "requests", "errors", "p50_ms", "error",
]  # fmt: skip

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def run_directory(run: str | None, node: str | None) -> Path:
    """Where the chosen node has its sockets."""
    from dormouse.core.config import NodeConfig, NodeSection

    if run is not None:
        return Path(run)
    return NodeConfig(node=NodeSection(name=node or "default")).run_directory


class Context:
    """Which node a command is about."""

    def __init__(self, run: str | None, node: str | None) -> None:
        self.run = run
        self.node = node

    @property
    def directory(self) -> Path:
        return run_directory(self.run, self.node)

    @property
    def client(self) -> AdminClient:
        return AdminClient(self.directory)


pass_context = click.make_pass_decorator(Context)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", envvar="DORMOUSE_RUN", metavar="DIR", help="The node's run directory (or DORMOUSE_RUN).")
@click.option("--node", metavar="NAME", help="The node's name, if it has the default run directory.")
@click.version_option(package_name="dormouse")
@click.pass_context
def cli(context: click.Context, run: str | None, node: str | None) -> None:
    """More PyTorch models on a machine than its GPUs can hold."""
    if node is not None and run is not None:
        if context.get_parameter_source("run") is not ParameterSource.ENVIRONMENT:
            raise click.UsageError("give --run or --node, not both: each names a node")
        run = None  # what was written beats what the shell happens to have
    context.obj = Context(run, node)


# --- the node


@cli.command()
@click.argument("file", required=False, metavar="[NODE.toml]")
@click.option("--detach/--foreground", default=True, help="Leave it running in the background (default), or stay.")
@click.option("--without", multiple=True, metavar="NAME", help="Do not start this function (may be repeated).")
@click.option("--forget-models", is_flag=True, help="Begin without the stored models: functions load theirs afresh.")
@as_json
@pass_context
def up(
    context: Context, file: str | None, detach: bool, without: tuple[str, ...], forget_models: bool, json_: bool
) -> None:
    """Start a node and wait until it is ready.

    `dormouse restart NAME` starts a function that was left out.
    """
    from dormouse.core import nodeprocess
    from dormouse.schemas.errors import DormouseError

    options = [word for name in without for word in ("--without", name)]
    if forget_models:
        options.append("--forget-models")
    if not detach:
        nodeprocess.foreground(file, context.node, options)
    try:
        ready = nodeprocess.start(file, context.node, options)
    except DormouseError as error:
        if "--forget-models" not in str(error) or not sys.stdin.isatty():
            raise
        click.confirm(f"{error}\nGive the stored models up, and start?", abort=True, err=True)
        ready = nodeprocess.start(file, context.node, [*options, "--forget-models"])
    config = nodeprocess.config_of(file, context.node)
    node = AdminClient(config.run_directory).status()["node"]
    if json_:
        show_json({**ready, "host": node["host"], "port": node["port"], "address": node["address"], "run": node["run"]})
        return
    click.echo(f"node {node['name']!r} is ready at {node['address']} (pid {ready['pid']})")
    for library, reason in ready.get("left_out", {}).items():
        click.echo(f"left out of what is imported once, for all functions: {library}: {reason}", err=True)
    if config.node.run:
        click.echo(f"other commands find it with:  export DORMOUSE_RUN={node['run']}")


@cli.command()
@as_json
@pass_context
def down(context: Context, json_: bool) -> None:
    """Stop the node; what is deployed stays deployed."""
    from dormouse.core import nodeprocess

    if not nodeprocess.stop(context.directory):
        raise Unreachable(f"no node runs in {context.directory}")
    if json_:
        show_json({"stopped": True})
    else:
        click.echo("stopped")


@cli.command()
@as_json
@pass_context
def status(context: Context, json_: bool) -> None:
    """Show the node, its GPUs, its functions and where their models are.

    Of a GPU: bytes of weights, lost to rounding, of activations, free, and the largest free run; fragmentation is the
    share of the free bytes outside that run. Of a model: its bytes on each GPU, in host memory and in files, what of it
    other functions share, and where its last wake copied from. Of a function: how it does by its deadline, and for
    whom and by what rule its model was evicted last. Of requests that wait for a GPU: why.

    \b
    Keys of --json (sizes in bytes; null: none or not known):
      node       name address host port run state confinement peers
                 instances requests_open missing
      gpus.N     epoch name pool reason total_nbytes capacity_nbytes
                 weights_nbytes lost_nbytes activation_nbytes free_nbytes
                 largest_free_nbytes fragmentation moved_nbytes segments
                 busy_with resident host_bps (bytes per second from host
                 memory, measured where it differs from what is
                 configured) switch_with (GPUs on its switch) peer_bps.N
                 (from GPU N; none: not counted on)
      functions.NAME
                 all that `ls --json` has (instances: state by name;
                 max_instances: how many there may be at once; writes:
                 requests of a stateless function that changed its model,
                 after which there is one instance), and
                 nbytes peak_activation_nbytes resident_on gpu_nbytes.N
                 host_nbytes file_nbytes shared_nbytes shared_with
                 leases wakes evictions gpu_us gpus.N (leases by GPU)
                 copied_nbytes copied_peer_nbytes copied_file_nbytes
                 last_wake: gpu copied_nbytes host_nbytes peer_nbytes
                            file_nbytes wake_us
                 last_eviction: gpu ago_s nbytes for (whose request needed
                            the room) rule
                 service:   counted in_time (share of its last requests)
                            deadline_ms percentile complies rrc (how many in
                            time until it complies) rate_s run_ms wake_ms
                            (expected, from the host) heavy (wake against run)
      store      answered host_nbytes host_budget_nbytes file_nbytes
                 file_budget_nbytes segments slabs trouble
      waiting    requests that wait for a GPU
      waits      oldest: function instance waited_ms left_ms (until its
                 deadline) kind reason; others: how many more by kind
    """
    value = context.client.status()
    if json_:
        show_json(value)
        return
    from dormouse.core import statusview

    statusview.show(value)


@cli.command()
@click.option("--config", metavar="NODE.toml", help="Examine for this node file.")
@as_json
@pass_context
def doctor(context: Context, config: str | None, json_: bool) -> None:
    """Say what a node would use here and what is missing."""
    from dormouse.core import doctor as doctor_
    from dormouse.core import nodeprocess

    node = nodeprocess.config_of(config, context.node)
    findings = doctor_.examine(node, nodeprocess.running_pid(node.run_directory) is not None)
    if json_:
        click.echo(doctor_.as_json(findings))
    else:
        for finding in findings:
            mark = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[finding.state]
            click.echo(f"{mark}  {finding.name:16} {finding.found}")
            if finding.advice:
                click.echo(f"{'':22} -> {finding.advice}")
    if any(finding.state == "fail" for finding in findings):
        sys.exit(FAILED)


# --- functions


@cli.command()
@click.argument("name")
@click.argument("file", type=click.Path(exists=True), metavar="FILE.py|FOLDER")
@click.option("--deadline", default="1s", show_default=True, help="Wanted latency, e.g. 80ms.")
@click.option("--percentile", default=98.0, show_default=True, help="Per cent of requests that shall meet it.")
@click.option("--timeout", default="60s", show_default=True, help="After which a request fails and is stopped.")
@click.option("--load-timeout", default="5m", show_default=True, help="After which load() fails.")
@click.option("--tenant", default="default", show_default=True, help="Whose function it is.")
@click.option("--max-queue", default=256, show_default=True, help="Requests that may wait.")
@click.option("--quota", default="1GiB", show_default=True, help="How much the model may grow after load().")
@click.option("--idempotent", is_flag=True, help="A request may be run again when a GPU's process dies under it.")
@click.option("--stateless", is_flag=True, help="No request changes what later ones see: several may run at once.")
@click.option("--max-instances", default=0, help="How many of a stateless function at once.  [default: one per GPU]")
@as_json
@pass_context
def deploy(context: Context, /, name: str, file: str, json_: bool, **settings: Any) -> None:
    """Deploy a Python function under NAME, and wait until it has loaded.

    FILE.py travels with the folder that it lies in, FOLDER with its function.py or the only file that defines handle:
    what functions see is a copy, as it is now. Left out are hidden files and directories (.env, .git), __pycache__,
    virtual environments, and what .dormouseignore in the folder names, written like a .gitignore; the line !.env in it
    takes .env along.
    """
    from dormouse.core import folder

    try:
        found = folder.find(Path(file).absolute())
        if found.alone:
            click.echo(f"{found.entry} goes alone: {found.folder} is not its own folder", err=True)
        if hidden := folder.left_out(found):
            more = f" and {len(hidden) - 5} more" if len(hidden) > 5 else ""
            click.echo(
                f"left out, being hidden: {', '.join(hidden[:5])}{more}; to take one along, write a line such as "
                f"!{os.path.basename(hidden[0])} into {found.folder / folder.IGNORE}",
                err=True,
            )
        answer = context.client.deploy(name, found, settings)
    except folder.NoFunction as error:
        raise click.BadParameter(str(error), param_hint="FILE.py|FOLDER") from error
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise click.BadParameter(f"cannot be read: {why}", param_hint="FILE.py|FOLDER") from error
    if json_:
        show_json(answer)
    else:
        click.echo(f"{answer['name']} version {answer['version']} is deployed")


@cli.command()
@as_json
@pass_context
def ls(context: Context, json_: bool) -> None:
    """List the functions."""
    rows = context.client.functions()
    if json_:
        show_json(rows)
    elif rows:
        table(rows, FUNCTION_COLUMNS)
    else:
        click.echo("no function is deployed; begin with:  dormouse deploy NAME FILE.py", err=True)


@cli.command()
@click.argument("name")
@click.argument("request", default="null", metavar="[JSON|@FILE|-]")
@click.option("--json", "json_", is_flag=True, help="Print JSON: the function, its answer and the milliseconds.")
@pass_context
def invoke(context: Context, name: str, request: str, json_: bool) -> None:
    """Send a request to a function and print its answer (which is JSON)."""
    if request == "-":
        body = sys.stdin.buffer.read()
    elif request.startswith("@"):
        try:
            body = Path(request[1:]).read_bytes()
        except OSError as error:
            raise click.BadParameter(f"{request[1:]}: {error.strerror}", param_hint="@FILE") from error
    else:
        body = request.encode()
    began = time.perf_counter()
    answer = context.client.invoke(name, body)
    if json_:
        ms = round((time.perf_counter() - began) * 1000, 3)
        show_json({"function": name, "answer": json.loads(answer), "ms": ms})
    else:
        click.echo(answer)


@cli.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is printed.")
@click.option("-n", "--lines", default=100, show_default=True, help="Lines to begin with.")
@as_json
@pass_context
def logs(context: Context, name: str, follow: bool, lines: int, json_: bool) -> None:
    """Print what a function's instances have printed."""
    pieces = context.client.logs(name, lines, follow)
    if json_ and not follow:
        show_json({"name": name, "lines": b"".join(pieces).decode(errors="replace").splitlines()})
        return
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


@cli.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--config", metavar="NODE.toml", help="Of a node that does not run: the file that it is started with.")
@as_json
@pass_context
def rm(context: Context, names: tuple[str, ...], yes: bool, config: str | None, json_: bool) -> None:
    """Remove functions, their models and their logs.

    Needs no running node, so that one that cannot start can be helped.
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked here; add -y to remove without a question")
        click.confirm(f"Remove {', '.join(names)}?", abort=True, err=True)
    removed: list[str] = []
    failed: dict[str, Refused] = {}
    for name in names:
        try:
            _remove(context, name, config)
        except Refused as error:
            failed[name] = error
        else:
            removed.append(name)
            if not json_:
                click.echo(f"{name} is removed")
    if json_:
        show_json({"removed": removed, "failed": {name: str(error) for name, error in failed.items()}})
    for refused in failed.values():
        raise refused


def _remove(context: Context, name: str, file: str | None) -> None:
    """By the node, or from its state directory if it does not run. Raises Refused, Unreachable, DormouseError."""
    from dormouse.core import nodeprocess

    client = AdminClient(nodeprocess.config_of(file, None).run_directory) if file else context.client
    try:
        client.remove(name)
    except Unreachable as error:
        if context.run is not None and file is None:
            raise Unreachable(
                f"{error}; to remove functions without a node, give its file: --config NODE.toml"
            ) from None
        config = nodeprocess.config_of(file, None if file else context.node)
        offline = importlib.import_module("dormouse.controller.offline")
        if not offline.remove(config.state_directory, [name]):
            text = f"no node runs, and there is no function {name!r} in {config.state_directory}"
            raise Refused(404, "unknown_function", text) from None


@cli.command()
@click.argument("name")
@as_json
@pass_context
def restart(context: Context, name: str, json_: bool) -> None:
    """Replace a function's instances; ends a quarantine, too.

    A function of whose commands a GPU's process has died twice within ten minutes is in quarantine: it is not started,
    and its requests get 503 `quarantined`. `dormouse ls` and its log say why.
    """
    context.client.restart(name)
    if json_:
        show_json({"restarted": name})
    else:
        click.echo(f"{name} restarts")


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT.py [ARGS]...]")
@pass_context
def run(context: Context, arguments: tuple[str, ...]) -> None:
    """Run a Python program whose `cuda` is the node's pool.

    Without SCRIPT.py, an interpreter.
    """
    if not (context.directory / "t" / "attach").exists():
        raise Unreachable(f"no node runs in {context.directory}; start one with `dormouse up`")
    session = importlib.import_module("dormouse.client_shim.session")
    sys.exit(session.main(list(arguments), str(context.directory)))


# --- API keys


@cli.group()
def keys() -> None:
    """Make and revoke API keys: who sends `Authorization: Bearer KEY` may do over HTTP what the key is for.

    Without a node that runs, these commands work on the state directory of the node file.
    """


node_file = click.option("--config", metavar="NODE.toml", help="The node's file, if it does not run.")


@keys.command("create")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["invoke", "deploy", "admin"]),
    help="invoke: send requests. deploy: deploy, list and remove functions and read their logs. admin: all that, and "
    "status. Several may be given.  [default: invoke]",
)
@click.option("--function", "functions", multiple=True, metavar="NAME|PATTERN", help="Only these, e.g. 'chat-*'.")
@click.option("--tenant", help="Whose functions it sees and deploys.  [default: default; with admin, everybody's]")
@click.option("--rate", "rate_s", type=float, default=0.0, metavar="PER_S", help="Requests per second, at most.")
@click.option("--burst", type=int, default=0, help="How many of them at once.  [default: as many as in a second]")
@click.option("--note", default="", help="For people: whose it is.")
@node_file
@as_json
@pass_context
def keys_create(context: Context, /, config: str | None, json_: bool, **wish: Any) -> None:
    """Make a key and print it. It is shown this once: the node keeps only a hash."""
    from dormouse.core import keyscommand

    made = keyscommand.create(keyscommand.Target(context.run, context.node, config), wish)
    if json_:
        show_json(made)
    else:
        click.echo(made["key"])
        click.echo(f"keep it: it is not shown again; `dormouse keys revoke {made['id']}` ends it", err=True)


@keys.command("ls")
@node_file
@as_json
@pass_context
def keys_ls(context: Context, config: str | None, json_: bool) -> None:
    """List the keys, also revoked ones."""
    from dormouse.core import keyscommand

    rows = keyscommand.ls(keyscommand.Target(context.run, context.node, config))
    if json_:
        show_json(rows)
    else:
        table(rows, ["id", "scopes", "functions", "tenant", "rate_s", "made", "revoked", "note"])


@keys.command("revoke")
@click.argument("name", metavar="ID")
@node_file
@as_json
@pass_context
def keys_revoke(context: Context, name: str, config: str | None, json_: bool) -> None:
    """End a key at once: requests with it are refused from now on."""
    from dormouse.core import keyscommand

    revoked = keyscommand.revoke(keyscommand.Target(context.run, context.node, config), name)
    if json_:
        show_json(revoked)
    else:
        click.echo(f"{revoked['id']} is revoked")


# --- without a node


def _capacity(_context: click.Context, _option: click.Parameter, found: str | None) -> str | None:
    """An option whose value may be left out takes the word after it, even if that is the scenario."""
    if found not in (None, "gpus", "functions"):
        raise click.BadParameter(f"{found!r} is neither gpus nor functions; write one of them, or this option last")
    return found


@cli.command()
@click.argument("file", metavar="SCENARIO.toml")
@click.option("--policy", metavar="NAME,...", help="Compare named policies instead of the scenario's own.")
@click.option("--seed", type=click.IntRange(min=0), help="Instead of the scenario's.")
@click.option("--functions", metavar="N,...", help="Other numbers of functions than the scenario's, in turn.")
@click.option(
    "--find-capacity",
    "find",
    is_flag=False,
    flag_value="gpus",
    metavar="[gpus|functions]",
    callback=_capacity,
    help="How many GPUs are enough (the default), or for how many functions the GPUs are.",
)
@click.option("--target", type=float, metavar="SHARE", help="Of functions that must comply for that; default 1.")
@click.option("--limit", type=int, metavar="N", help="The most that is tried for that; default 64 or 10000.")
@click.option("--plot", metavar="DIR", help="Write figures (PNG) into it; needs matplotlib.")
@as_json
def simulate(file: str, json_: bool, **options: Any) -> None:
    """Run the scheduler on GPUs, models and requests that SCENARIO.toml describes. Needs no node and no GPU.

    \b
    Policies:
      scenario       [policy] of the file, which is what runs without --policy
      default        what a node runs
      fifo edf feasible
                     the same with another order of requests
      torpor torpor-fifo torpor-random torpor-lru torpor-block
                     the paper's, and without one of its parts each
      simple-swap nonswap native infless-ka infless-oracle sllm
                     what papers compare with
    Keys of --json, in which the table has its columns:
      functions requests
                     that were asked; one more to warm each function is not counted
      compliant      share of functions of whose requests enough met the deadline
      p50_ms p98_ms  latency
      late           share of requests that missed their deadline or had no answer
      wakes_per_request
                     share of requests that had to copy some of their model
      gpu_busy       share of the time that GPUs were leased
      host_gbps      10^9 bytes per second copied from the host, all GPUs together

    With --functions, these for each number; with --find-capacity, for each number that was tried, and the answer; if
    no number is enough, the exit status is 2. --plot writes latency.png, load.png (GPUs) and, where there are several
    numbers, compliance.png; with --functions, the first two once for each.

    docs/simulator.md describes SCENARIO.toml.
    """
    importlib.import_module("dormouse.controller.simulator.main").main(file, json_=json_, **options)


@cli.command()
@click.argument("file", metavar="RECORDING")
@as_json
def replay(file: str, json_: bool) -> None:
    """Feed a controller's recording to the scheduler again and compare what it decides.

    A node records with `[record] path = "FILE"` in its node file. Prints the number of events and actions, and
    "identical" or the first difference with both sides; then the exit status is 1.

    \b
    Keys of --json:
      dormouse       version that recorded
      identical      whether all actions are the same
      events actions seconds
                     whole events, their actions, time between first and last
      cut_nbytes     of a last frame that was not written to its end
      difference     null, or: number at_s event recorded replayed
    """
    importlib.import_module("dormouse.controller.replay").main(file, json_)


def leave(status_: int, message: str) -> NoReturn:
    click.echo(f"dormouse: {message}", err=True)
    sys.exit(status_)


def print_no_more() -> None:
    """Else Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The console script: errors become one line and an exit status."""
    from dormouse.schemas.errors import ConfigError, DormouseError, Unsafe

    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        leave(INTERRUPTED, "interrupted")
    except click.ClickException as error:
        error.show()
        sys.exit(USAGE)
    except Unreachable as error:
        leave(UNREACHABLE, str(error))
    except Refused as error:
        by_status = {404: NOT_FOUND, 400: REFUSED, 403: REFUSED, 409: REFUSED, 413: REFUSED, 429: REFUSED}
        leave(by_status.get(error.status, FAILED), f"{error.code}: {error}")
    except Unsafe as error:
        leave(REFUSED, " ".join(str(error).splitlines()))
    except ConfigError as error:
        leave(USAGE, " ".join(str(error).splitlines()))  # names from files may contain anything
    except DormouseError as error:
        leave(FAILED, str(error))
    except BrokenPipeError:
        print_no_more()
        sys.exit(FAILED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print_no_more()
        leave(FAILED, f"cannot print: {error.strerror}; make room, or print elsewhere")


if __name__ == "__main__":
    main()
