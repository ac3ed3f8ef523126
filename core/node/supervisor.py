"""The node supervisor: ``python -m dormouse.core.node.supervisor [NODE.toml | --node NAME] [--run DIR] [--without NAME]
[--forget-models] [--plain]``.

Takes the directories and the listening socket of a node, as the first or from the node that it replaces, and removes
the run directory when it exits. The life of the node is in supervision.py.
"""

import argparse
import errno
import os
import socket
import sys

import msgspec
import orjson
import uvloop

from dormouse.core import exposure, log, wayback
from dormouse.core.config import NodeConfig, StartSection
from dormouse.core.directories import RunDirectory, expect_apart, lock, open_directory
from dormouse.core.gpus import counted
from dormouse.core.links.zmq_link import close_context
from dormouse.core.listening import bind_tcp, expect_same_address
from dormouse.core.migrations import expect_replaceable, migrate
from dormouse.core.node.notify import ServiceManager
from dormouse.core.node.predecessor import Predecessor
from dormouse.core.node.supervision import Supervisor
from dormouse.core.nodefile import load_config, named_config
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.startup import keep_node_config
from dormouse.schemas import succession as s
from dormouse.schemas.errors import ConfigError, PeerLost, ProcessFailed, Unsafe


async def serve(config: NodeConfig, service: ServiceManager | None = None) -> None:
    """Run a node until it is told to stop. Raises ConfigError, ProcessFailed."""
    service = service or ServiceManager()
    paths, state = RunPaths(config.run_directory), StatePaths(config.state_directory)
    expect_apart(paths.run, state.state)
    state_fd = open_directory(state.state, "state directory", 0o700, links=True)
    assert state_fd is not None
    try:
        directory = RunDirectory.claim(paths.run)
        supervisor = None
        try:
            lock(state_fd, state.state, "state directory")
            wayback.go(state)
            migrate(state)
            directory.empty()
            directory.make()
            state.make()
            config = _of_this_start(config, state, 0)
            log.configure("supervisor", state.role_log("supervisor"))
            with bind_tcp(config.node.host, config.node.port) as listening:
                supervisor = Supervisor(config, directory, listening, service, state_fd)
                await supervisor.run()
        finally:
            if supervisor is None or supervisor.owns:
                directory.remove()
            directory.close()
    finally:
        os.close(state_fd)


def _of_this_start(config: NodeConfig, state: StatePaths, generation: int) -> NodeConfig:
    pages = state.language_models.exists()
    start = msgspec.structs.replace(config.start, pages=pages, generation=generation)
    return msgspec.structs.replace(config, start=start)


async def succeed(config: NodeConfig, service: ServiceManager, fd: int) -> None:
    """Take over from the node at the other end of ``fd``, and run. Raises ConfigError, ProcessFailed; then that goes
    on.
    """
    paths, state = RunPaths(config.run_directory), StatePaths(config.state_directory)
    predecessor = Predecessor.meet(fd)
    given, estate = predecessor.given, predecessor.estate
    directory, state_fd = RunDirectory(paths.run, given.pop("run")), given.pop("state")
    supervisor = None
    try:
        with socket.socket(fileno=given.pop("listening")) as listening:
            if (estate.run, estate.state) != (str(paths.run), str(state.state)):
                raise ConfigError(
                    f"the running node has the directories {estate.run} and {estate.state}, this one {paths.run} and "
                    f"{state.state}: one that replaces it has the same ([node] run and state)"
                )
            expect_same_address(listening, config.node.host, config.node.port)
            expect_replaceable(state, estate.goes_back)
            config = _of_this_start(config, state, estate.generation + 1)
            keep_node_config(config, next_=True)
            log.configure("supervisor", state.role_log("supervisor"))
            supervisor = Supervisor(config, directory, listening, service, state_fd, predecessor)
            await supervisor.run()
    except (ConfigError, ProcessFailed, OSError) as error:
        predecessor.say(s.HeirFailed(text=why(error, config)))
        raise
    finally:
        if supervisor is not None and supervisor.owns:
            directory.remove()
        predecessor.close()
        directory.close()
        os.close(state_fd)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 1 the node failed, 2 the configuration cannot be used, 5 it would be unsafe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?")
    parser.add_argument("--node", metavar="NAME")
    parser.add_argument("--run", default="", metavar="DIR")  # where the file names none
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--forget-models", action="store_true")
    parser.add_argument("--plain", action="store_true", help="say for people why it ends")
    parser.add_argument("--succeed", type=int, metavar="FD")
    arguments = parser.parse_args(argv)
    service = ServiceManager.take(arguments.plain)
    try:
        if arguments.node is not None:
            config = named_config(arguments.node)
        else:
            config = load_config(arguments.file) if arguments.file else NodeConfig()
        config = config.placed(arguments.run)
        start = StartSection(without=tuple(arguments.without), forget_models=arguments.forget_models)
        config = counted(msgspec.structs.replace(config, start=start))
        exposure.check(config)
        uvloop.run(serve(config, service) if arguments.succeed is None else succeed(config, service, arguments.succeed))
        return 0
    except ConfigError as error:
        _say("config", str(error), arguments.plain)
        return 5 if isinstance(error, Unsafe) else 2
    except (ProcessFailed, PeerLost, OSError) as error:  # a full disk, say
        _say("failed", why(error, config), arguments.plain)
        return 1
    finally:
        service.close()
        close_context()


def why(error: Exception, config: NodeConfig) -> str:
    """In words, with what can be done."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return str(error)
    run, state = config.run_directory, config.state_directory
    return f"{error}; free space, and inodes, of run directory {run} or state directory {state}"


def _say(kind: str, message: str, plain: bool) -> None:
    said = f"dormouse: {message}" if plain else orjson.dumps({"error": kind, "message": message}).decode()
    sys.stderr.write(said + "\n")


if __name__ == "__main__":
    sys.exit(main())
