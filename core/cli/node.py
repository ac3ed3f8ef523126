"""`dormouse up`, `down`, `status` and `doctor`: the node as a whole."""

import json
import shutil
import sys
from contextlib import suppress
from typing import Final

import click

from dormouse.core.cli.completion import function_argument
from dormouse.core.cli.frame import FAILED, CommandContext, as_json, going_on, pass_context
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.output import show_json
from dormouse.schemas.errors import ConfigError, DormouseError

ALL_LINES: Final = 1 << 30
"""Of what is no terminal."""

ASK_S: Final = 2.0
"""For what runs on a node that is to be stopped."""


@click.command()
@click.argument("file", required=False, metavar="[NODE.toml]")
@click.option("--detach/--foreground", default=True, help="Leave it running in the background (default), or stay.")
@click.option("--without", multiple=True, metavar="NAME", help="Do not start this function (may be repeated).")
@click.option("--forget-models", is_flag=True, help="Begin without the stored models: functions load theirs afresh.")
@click.option("--replace", is_flag=True, help="Take over from the running node, without losing a request.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 600),
    metavar="SECONDS",
    help="With --replace: how long requests that run may take to end.  [default: 30]",
)
@as_json
@pass_context
def up(
    context: CommandContext,
    file: str | None,
    detach: bool,
    without: tuple[str, ...],
    forget_models: bool,
    replace: bool,
    wait: float | None,
    json_: bool,
) -> None:
    """Start a node and wait until it is ready.

    `dormouse restart NAME` starts a function that was left out. With --replace, this version and this node file take
    the place of the node that runs: requests that come meanwhile wait, and are answered. If the new one does not
    start, the old one goes on. Ctrl-C ends this command alone: the node goes over all the same.

    The node's run directory is that of the node file ([node] run). If that names none, it is that of --run or of
    DORMOUSE_RUN, where the other commands look, too.
    """
    from dormouse.core import torchbuild
    from dormouse.core.cli import doctor
    from dormouse.core.node import nodeprocess
    from dormouse.core.node.adminclient import PATIENCE_S, AdminClient
    from dormouse.core.problems import strangers

    config = nodeprocess.config_of(file, context.node, context.run)
    if context.run_is_written and context.directory.absolute() != config.run_directory.absolute():
        raise ConfigError(
            f"--run names {context.directory}, but this node's is {config.run_directory} ([node] run of its file); "
            "leave one of the two out"
        )
    options = [word for name in without for word in ("--without", name)]
    if forget_models:
        options.append("--forget-models")
    if replace and (forget_models or not detach):
        raise click.UsageError("--replace goes neither with --forget-models nor with --foreground")
    if wait is not None and not replace:
        raise click.UsageError("--wait is how long requests may take with --replace: add that, or leave --wait out")
    if not detach:
        nodeprocess.foreground(file, context.node, context.run, options)
    try:
        if replace:
            with going_on("the node goes over all the same"):
                ready = nodeprocess.replace(
                    file,
                    context.node,
                    context.run,
                    options,
                    30.0 if wait is None else wait,
                    lambda text: click.echo(text, err=True),
                )
        else:
            ready = nodeprocess.start(file, context.node, context.run, options)
    except DormouseError as error:
        if replace or "--forget-models" not in str(error) or not sys.stdin.isatty():
            raise
        click.confirm(f"{error}\nGive the stored models up, and start?", abort=True, err=True)
        ready = nodeprocess.start(file, context.node, context.run, [*options, "--forget-models"])
    status_ = AdminClient(config.run_directory, PATIENCE_S).status()
    node = status_["node"]
    builds = torchbuild.builds(config)
    if json_:
        said = {name: build.version for name, build in builds.items()}
        show_json({**ready, **{key: node[key] for key in ("host", "port", "address", "run")}, "torch": said})
        return
    click.echo(f"node {node['name']!r} is ready at {node['address']} (pid {ready['pid']})")
    if builds["node"] == builds["sandbox"]:
        click.echo(str(builds["node"]))
    else:
        click.echo(f"{builds['node']} in executors, {builds['sandbox']} in functions")
    for library, reason in ready.get("left_out", {}).items():
        click.echo(f"left out of what is imported once, for all functions: {library}: {reason}", err=True)
    for role, reason in ready["down"].items():
        click.echo(f"{role} does not start, and is tried again: {reason}", err=True)
    for text in (*strangers(status_), *doctor.too_large(config)):
        click.echo(text, err=True)
    if context.directory.absolute() != config.run_directory.absolute():
        click.echo(f"other commands find it with:  export DORMOUSE_RUN={node['run']}")


@click.command()
@as_json
@pass_context
def down(context: CommandContext, json_: bool) -> None:
    """Stop the node; what is deployed stays deployed."""
    from dormouse.core.node import nodeprocess
    from dormouse.core.node.adminclient import AdminClient

    running = 0
    with suppress(DormouseError, CallRefused):  # a node that does not answer is stopped all the same
        running = sum(row.get("running", 0) for row in AdminClient(context.directory, call_s=ASK_S).functions())
    if not nodeprocess.stop(context.directory):
        raise Unreachable(f"no node runs in {context.directory}")
    if json_:
        show_json({"stopped": True, "running": running})
        return
    click.echo("stopped")
    if running:
        ran = f"{running} requests" if running > 1 else "a request"
        click.echo(f"{ran} that ran there got no answer; `dormouse drain` waits for those that run", err=True)


@click.command()
@click.option("--undo", is_flag=True, help="Take new requests again.")
@as_json
@pass_context
def drain(context: CommandContext, undo: bool, json_: bool) -> None:
    """Take no new requests, and wait until those that run have ended.

    New ones are answered 503 with the code `draining`, and /readyz says so, until `dormouse drain --undo` or `down`.
    Jobs that wait are kept for afterwards. Ctrl-C ends the waiting, and not the drain.
    """
    with going_on("the drain goes on; `dormouse drain --undo` ends it"):
        drained = context.client.drain(undo)
    if json_:
        show_json({"drained": drained})
    elif undo:
        click.echo("new requests are taken again")
    else:
        click.echo("drained: nothing runs" if drained else "the drain was undone meanwhile")


@click.command()
@function_argument(required=False)
@click.option("--all", "all_", is_flag=True, help="All tables, of all functions.")
@click.option("--check", is_flag=True, help="Say only what is wrong; the exit status is 1 if anything is, else 0.")
@as_json
@pass_context
def status(context: CommandContext, name: str | None, all_: bool, check: bool, json_: bool) -> None:
    """Show what is wrong, and then the node, its GPUs and its functions, on one screen; or all about one function.
    Where nobody looks at a terminal, all functions are shown.

    Of a GPU, with --all: who has a turn there, that is, may compute; how many requests have a seat, that is, their
    memory, and who of them has no turn because it gave the GPU nothing; bytes of weights, of KV, lost to rounding, of
    activations, free, and the largest free run; fragmentation is the share of the free bytes outside that run. Of a
    model: its bytes on each GPU, in host memory and in files, what of it other functions share, and where its last
    wake copied from. Of a function: how it does by its deadline, and for whom and by what rule its model was
    evicted last. Of a language model: the time to its first token and of each further one (p50, p99), what the
    first was spent on, and its tokens; of each process that computes it: sequences that it runs, that wait, that
    were preempted, and its KV memory in blocks. Of requests that wait for a GPU: why.

    What is wrong is marked with "!". With --check, that alone is printed, one a line, or with --json as
    {"problems": [...]}; the exit status is 0 if nothing is wrong, 1 if something is, and 4 if no node answers. A
    function is late if of at least 20 answers within 60 s too few were in time; it fails if its last 5 requests
    failed, or half of those within 60 s, and at least 5. A new version of it begins anew. What somebody wants is not
    wrong: a drain, and processes that were replaced on purpose.

    \b
    Keys of --json (sizes in bytes; null: none or not known):
      node       name address host port run state confinement peers
                 down (why, by process that does not start)
                 ended (by process that died: times ago_s)
                 left (likewise, by process that was replaced on purpose)
                 instances requests_open missing draining
                 disk_free_nbytes (where the state directory is)
                 without_key (who of this machine invokes without one:
                 anybody, until the first key, nobody)
      gpus.N     epoch name pool reason total_nbytes capacity_nbytes
                 weights_nbytes kv_nbytes (of language models,
                 when a lease last began or ended)
                 lost_nbytes activation_nbytes free_nbytes
                 context_nbytes (of a runtime's process, on a real GPU)
                 contexts_nbytes (of all there) beside_nbytes (for them)
                 largest_free_nbytes fragmentation moved_nbytes segments
                 busy_with (who has a turn; of several, who ends first)
                 turns: function idle (gives the GPU nothing for now)
                 seats (functions with a lease there, in order of their
                 beginning) resident host_bps (bytes per second from host
                 memory, measured where it differs from what is
                 configured) switch_with (GPUs on its switch) peer_bps.N
                 (from GPU N; none: not counted on) last_preload (before
                 anybody asked: function ago_s nbytes copied_nbytes
                 outcome reason) trouble (what it goes on without)
                 state (serves, drains, drained: `dormouse gpu drain`)
                 busy: seconds share functions (the share of its time of
                 those who had most) others (how many more)
      functions.NAME
                 all that `ls --json` has (instances: state by name;
                 max_instances: how many there may be at once; writes:
                 requests of a stateless function that changed its model,
                 after which there is one instance), and
                 jobs (by state: queued begun succeeded failed cancelled)
                 nbytes peak_activation_nbytes resident_on gpu_nbytes.N
                 host_nbytes file_nbytes shared_nbytes
                 shared_with (at most 20 of shared_count)
                 leases wakes preloads evictions gpu_us gpus.N (leases by
                 GPU)
                 copied_nbytes copied_peer_nbytes copied_file_nbytes
                 repaired (results copied into another layout than the
                            GPU gave them)
                 replayed (parts of sequences that the GPU was given at
                            once, as CUDA graphs)
                 last_wake: gpu copied_nbytes host_nbytes peer_nbytes
                            file_nbytes wake_us
                 last_eviction: gpu ago_s nbytes for (whose request needed
                            the room) rule
                 pinned
                 recent (of its version): counted in_time (share of its last
                            answers) failed_in_a_row window: seconds counted
                            in_time failed (in so many seconds)
                 service:   counted in_time (share of its last requests)
                            deadline_ms percentile complies rrc (how many in
                            time until it complies) rate_s run_ms wake_ms
                            (expected, from the host) heavy (wake against run)
                 llm (of a language model, by its last answers): p50 and p99
                            of ttft_ms (to the first token) and of its parts
                            queue_ms runtime_ms wake_ms prefill_ms and
                            of tpot_ms (of each further token) wanted_ttft_ms
                            wanted_tpot_ms counted in_time complies
                            prompt_tokens made_tokens reused_tokens
                            sampling (of its files, where a request says
                            nothing; unfollowed: their fields that answers do
                            not keep to)
                 runtimes (processes that compute it): gpu pid running
                            waiting preempted (sequences) kv_blocks
                            kv_blocks_used kv_blocks_idle (hold beginnings
                            of prompts) kv_nbytes kv_share (of the pool)
                            reused_nbytes (of KV that was there)
                            gathered (sequences that waited for others, by
                            why they began)
      sessions   programs of `dormouse run`: session program pid tenant
                 since_ms memory_nbytes cpu_s processes
      store      answered host_nbytes host_budget_nbytes file_nbytes
                 file_budget_nbytes segments slabs trouble
      waiting    requests that wait for a GPU
      waits      oldest: function instance waited_ms left_ms (until its
                 deadline) kind reason; others: how many more by kind
      tenants.NAME (of the node file, and of functions)
                 functions over_share (it waits for others) share gpu_memory
                 requests_s tokens_s (what the node file says)
    """
    from dormouse.core.cli import statusview

    value = context.client.status()
    if name is not None and name not in value["functions"]:
        raise CallRefused(404, "unknown_function", f"there is no function {name!r}; `dormouse ls` says which there are")
    if check:
        _check(statusview.found(value, name), json_)
    elif json_:
        show_json(value if name is None else value["functions"][name])
    elif name is not None:
        statusview.one(value, name)
    elif all_:
        statusview.show(value)
    else:
        statusview.screen(value, shutil.get_terminal_size((100, ALL_LINES)).lines)


def _check(problems: list[str], json_: bool) -> None:
    if json_:
        show_json({"problems": problems})
    for text in () if json_ else problems or ["nothing is wrong"]:
        click.echo(text)
    if problems:
        sys.exit(FAILED)


@click.command()
@click.argument("changes", nargs=-1, metavar="[SETTING=VALUE]...")
@as_json
@pass_context
def policy(context: CommandContext, changes: tuple[str, ...], json_: bool) -> None:
    """Show the scheduler's settings, or change some while the node runs.

    They are shown as [schedule] of a node file has them. What is changed holds for requests that wait already, and
    until the node is stopped.
    """
    wanted: dict[str, str | int | float | bool] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise click.UsageError(f"{change!r} is no change; write SETTING=VALUE, for example order=edf")
        wanted[name.strip()] = _value(value.strip())
    settings = context.client.policy(wanted)
    if json_:
        show_json(settings)
        return
    for name, value in settings.items():
        click.echo(f"{name} = {json.dumps(value)}")


def _value(text: str) -> str | int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    with suppress(ValueError):
        number = float(text)
        return int(text) if number.is_integer() and abs(number) < 1 << 60 and "." not in text else number
    return text


@click.command()
@click.option("--config", metavar="NODE.toml", help="Examine for this node file.")
@as_json
@pass_context
def doctor(context: CommandContext, config: str | None, json_: bool) -> None:
    """Say what a node would use here and what is missing.

    Of the node that the other commands speak to, if it runs: with the settings that it was started with. --config
    examines for another node file.
    """
    from dormouse.core.cli import doctor as doctor_
    from dormouse.core.node import nodeprocess

    node = nodeprocess.config_of(config, context.node, context.run)
    running = nodeprocess.running_pid(node.run_directory) is not None
    if running and config is None:
        node = doctor_.of_running(node.run_directory) or node
    findings = doctor_.examine(node, running)
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
