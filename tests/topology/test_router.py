"""The real router process between a test-side supervisor, controller, zygote and instances, over real HTTP.

What an instance does is named by the first word of its function's source: see ``FakeInstance``.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import needs
import pytest

from dormouse.client_shim.instance import codec
from dormouse.core.config import LimitsSection, NodeConfig, NodeSection
from dormouse.core.folder import FunctionFolder
from dormouse.core.links.fds import Inbox, Listener, PacketSocket
from dormouse.core.links.link import Link
from dormouse.core.listening import LISTEN_FD, bind_tcp
from dormouse.core.node.adminclient import AdminClient
from dormouse.core.node.refusals import CallRefused
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.schemas import messages as m

DEVICE = m.DeviceInfo(name="fake", total_nbytes=1 << 30, capability=(8, 0), multiprocessors=4)
BODY_NBYTES = 1 << 20
WAIT_S = 90.0


class FakeInstance:
    """The instance's end of its router link."""

    def __init__(self, world: "World", fork: m.Fork) -> None:
        self.world = world
        self.fork = fork
        self.kind = Path(fork.folder, fork.entry).read_text().split()[0]
        self.running: int | None = None
        self.link: Link[m.RouterToInstance, m.InstanceToRouter] = Link(
            f"{fork.directory}/router", bind=False, incoming=m.RouterToInstance, on_message=self.heard
        )
        self.link.send(m.Importing(confinement="none"))
        match self.kind:
            case "broken":
                self.link.send(m.LoadFailed(code="load_failed", text='File "f.py", line 3\nValueError: no weights'))
            case "computes":
                self.link.send(m.NeedLease(version=1))
            case "stillborn":
                world.exit(fork.instance, 1)
            case _:
                self.link.send(m.Loaded(version=1, nbytes=10))

    def heard(self, message: m.RouterToInstance) -> None:
        self.world.saw(self.fork.function, message)
        match message:
            case m.Run():
                self.running = message.request
                self.run(message)
            case m.LeaseGranted(lease=lease):
                self.link.send(m.LeaseEnded(serial=lease.serial, version=2))
                self.link.send(m.Loaded(version=2, nbytes=10))
            case m.LeaseRefused(code=code, text=text) if self.running is not None:
                self.link.send(m.Raised(request=self.running, code=code, text=text))
            case m.LeaseRefused():
                pass
            case m.Exit():
                self.world.exit(self.fork.instance, 0)

    def run(self, message: m.Run) -> None:
        match self.kind:
            case "hang" | "stubborn":
                pass
            case "die":
                self.world.exit(self.fork.instance, -9)
            case "garbage":
                self.link.send_raw(b"\xc1 not msgpack")
            case "notjson":
                self.link.send(m.Returned(request=message.request, body=b"{\xff", nbytes=0))
            case "toomuch":
                self.link.send(m.Returned(request=message.request, body=None, nbytes=1 << 40))
            case "raise":
                self.link.send(m.Raised(request=message.request, code="function_raised", text="KeyError: 'x'"))
            case _:
                self.link.send(echoed(message))
                self.running = None

    def interrupted(self) -> None:
        if self.kind == "hang" and self.running is not None:
            answer = m.Raised(request=self.running, code="cancelled", text="")
            self.link.send(answer)
            self.running = None
            self.world.saw("interrupted", answer)


def echoed(run: m.Run) -> m.Returned | m.Raised:
    """As an instance answers; of a body in the arena, how long it is."""
    if run.body is None:
        return m.Returned(request=run.request, body=json.dumps(run.nbytes).encode(), nbytes=0)
    try:
        codec.decode(run.body)
    except codec.BadRequest as error:
        return m.Raised(request=run.request, code="bad_json", text=str(error))
    return m.Returned(request=run.request, body=run.body, nbytes=0)


class JsonConnection(http.client.HTTPConnection):
    """Says of every request what its body is."""

    def putrequest(self, *arguments: Any, **options: Any) -> None:
        super().putrequest(*arguments, **options)
        self.putheader("Content-Type", "application/json")


SESSIONS = 2


class World:
    """Everything around one router, in a thread with a loop; ``seen`` is all that was said to it."""

    def __init__(self, catalogue: list[m.FunctionSpec], **limits: Any) -> None:
        self.run = Path(tempfile.mkdtemp(prefix="dmr-", dir="/tmp"))
        self.config = NodeConfig(
            node=NodeSection(run=str(self.run / "run"), state=str(self.run / "state")),
            limits=LimitsSection(**{"body": str(BODY_NBYTES), "response": "1MiB", "stream": "1MiB"} | limits),
        )
        self.paths, self.state = RunPaths(self.config.run_directory), StatePaths(self.config.state_directory)
        self.paths.make()
        self.state.make()
        self.paths.node_json.write_bytes(msgspec.json.encode(self.config))
        for each in catalogue:
            folder = self.state.functions / each.name / each.snapshot
            folder.mkdir(parents=True)
            (folder / each.entry).write_text(each.snapshot)
        self.catalogue = catalogue
        self.grant = True  # answer every Acquire at once
        self.seen: list[tuple[str, Any]] = []
        self.instances: dict[str, FakeInstance] = {}
        self._condition = threading.Condition()
        self._serial = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.call(self._open)
        command = [sys.executable, "-m", "dormouse.router.main", "--run", str(self.paths.run), "--role", "router"]
        with bind_tcp("127.0.0.1", 0) as listening:
            self.port = listening.getsockname()[1]
            environment = os.environ | {LISTEN_FD: str(listening.fileno())}
            self.process = subprocess.Popen(
                [*command, "--epoch", "1"], stderr=subprocess.PIPE, env=environment, pass_fds=[listening.fileno()]
            )

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the loop's thread."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def _open(self) -> None:
        paths = self.paths
        self.supervisor: Link[m.ToSupervisor, m.FromSupervisor] = Link(
            paths.link("supervisor", "router", 1), bind=True, incoming=m.ToSupervisor, on_message=self._from_child
        )
        self.controller: Link[m.RouterToController, m.ControllerToRouter] = Link(
            paths.link("controller", "router", 1), bind=True, incoming=m.RouterToController, on_message=self._control
        )
        self.zygote: PacketSocket[m.ToZygote, m.FromZygote] | None = None
        self.zygote_listener: Listener[m.ToZygote, m.FromZygote] = Listener(
            paths.zygote(1), m.ToZygote, self._zygote_connected
        )
        self.inboxes = [Inbox(paths.inbox(role, 1), m.InboxPacket, self._packet(role)) for role in ("store", "gpu0")]
        self.controller.send(m.Catalogue(functions=self.catalogue))
        self.controller.send(m.Device(info=DEVICE))

    def _packet(self, role: str) -> Callable[[m.InboxPacket, list[int]], None]:
        def on_packet(message: m.InboxPacket, fds: list[int]) -> None:
            for fd in fds:
                os.close(fd)
            self.saw(role, message)

        return on_packet

    def saw(self, who: str, message: Any) -> None:
        with self._condition:
            self.seen.append((who, message))
            self._condition.notify_all()

    def wait(
        self, who: str, kind: type[Any], number: int = 1, wanted: Callable[[Any], bool] = lambda message: True
    ) -> Any:
        """The ``number``th message of ``kind`` that ``who`` has got, once it is there."""

        def found() -> list[Any]:
            said = [message for name, message in self.seen if name == who and isinstance(message, kind)]
            return [message for message in said if wanted(message)]

        with self._condition:
            assert self._condition.wait_for(lambda: len(found()) >= number, WAIT_S), (who, kind, self.seen)
            return found()[number - 1]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """For what the router does and does not announce."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited for {what}"
            time.sleep(0.02)

    def count(self, kind: type[Any]) -> int:
        with self._condition:
            return sum(isinstance(message, kind) for _, message in self.seen)

    def _from_child(self, message: m.ToSupervisor) -> None:
        if isinstance(message, m.Ready):
            self.supervisor.send(m.Peers(up={"router": 1, "controller": 1, "store": 1, "gpu0": 1, "zygote": 1}))
        if not isinstance(message, m.Heartbeat):
            self.saw("supervisor", message)

    def _control(self, message: m.RouterToController) -> None:
        self.saw("controller", message)
        match message:
            case m.Acquire(request=request) if self.grant:
                self.granted(request)
            case m.Deployed(spec=spec):
                self.controller.send(m.Kept(name=spec.name))
            case m.Removed(name=name):
                self.controller.send(m.Kept(name=name))
            case m.AskStatus(query=query):
                self.controller.send(m.Status(query=query, json=b'{"gpus":{"0":{"epoch":1}}}'))
            case _:
                pass

    def granted(self, request: int) -> None:
        self._serial += 1
        lease = m.Lease(gpu=0, epoch=1, serial=self._serial, secret=7)
        self.controller.send(m.Granted(request=request, lease=lease, wake_nbytes=0))

    def _zygote_connected(self, connection: PacketSocket[m.ToZygote, m.FromZygote]) -> None:
        self.zygote = connection
        connection.serve(self._zygote_packet, lambda: None)
        connection.send(m.ZygoteReady(confinement="same-uid", python="3", torch="2"))

    def _zygote_packet(self, message: m.ToZygote, fds: list[int]) -> None:
        assert self.zygote is not None
        match message:
            case m.Fork():
                os.write(fds[0], b"hello from the function\n")
                self.zygote.send(m.Forked(instance=message.instance, pid=1))
                self.instances[message.instance] = FakeInstance(self, message)
            case m.Signal(instance=name, signal=signal.SIGKILL):
                self.exit(name, -9)
            case m.Signal(instance=name):
                self.instances[name].interrupted()
        for fd in fds:
            os.close(fd)
        self.saw("zygote", message)

    def exit(self, name: str, status: int) -> None:
        def later() -> None:
            instance = self.instances.pop(name, None)
            if instance is not None and self.zygote is not None:
                instance.link.close()
                self.zygote.send(m.Exited(instance=name, pid=1, status=status))

        self._loop.call_soon(later)

    # --- clients

    @property
    def admin(self) -> AdminClient:
        return AdminClient(self.paths.run)

    def deploy(self, name: str, source: str, **settings: Any) -> dict[str, Any]:
        folder = self.run / "f" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        return self.admin.deploy(name, FunctionFolder(folder, f"{name}.py", False), settings)

    def connect(self) -> http.client.HTTPConnection:
        return JsonConnection("127.0.0.1", self.port, timeout=WAIT_S)

    def invoke(self, name: str, body: bytes = b"{}") -> tuple[int, Any]:
        return exchange(self.connect(), "POST", f"/functions/{name}/invoke", body)

    def invoke_later(self, name: str) -> Callable[[], tuple[int, Any]]:
        """Send now; the result waits for the answer."""
        connection = self.connect()
        connection.request("POST", f"/functions/{name}/invoke", b"{}")

        def result() -> tuple[int, Any]:
            with connection.getresponse() as response:
                answer = response.status, json.loads(response.read())
            connection.close()
            return answer

        return result

    def row(self, function: str) -> dict[str, Any]:
        return next(row for row in self.admin.functions() if row["name"] == function)

    def ready(self) -> "World":
        self.wait("supervisor", m.Ready)
        deadline_s = time.monotonic() + WAIT_S
        while (answer := exchange(self.connect(), "GET", "/readyz", None))[0] != 200:
            assert time.monotonic() < deadline_s, answer
        return self

    def close(self) -> None:
        """Stop the router and see that nothing is left."""
        if self.process.poll() is None:
            self.call(lambda: self.supervisor.send(m.Shutdown()))
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stderr is not None
            self.stderr = self.process.stderr.read().decode()
            self.process.stderr.close()
            self.call(self._close)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        left = [str(path.relative_to(self.run)) for path in (self.run / "run").rglob("*") if path.is_socket()]
        log = self.state.role_log("router")
        story = log.read_text() if log.exists() else ""
        shutil.rmtree(self.run)
        assert left == []
        assert "process_failed" not in story, story

    def _close(self) -> None:
        for instance in self.instances.values():
            instance.link.close()
        for thing in (self.supervisor, self.controller, self.zygote_listener, *self.inboxes, self.zygote):
            if thing is not None:
                thing.close()


def exchange(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
    try:
        connection.request(method, path, body)
        with connection.getresponse() as response:
            data = response.read()
    finally:
        connection.close()
    return response.status, json.loads(data) if response.getheader("content-type") == "application/json" else data


def spec(name: str, source: str, **settings: Any) -> m.FunctionSpec:
    """Deployed before: its snapshot is there, and named after its source."""
    return m.FunctionSpec(name=name, version=1, entry="f.py", snapshot=source, **settings)


FUNCTIONS = [
    spec("echo", "echo"),
    spec("computes", "computes"),
    spec("raise", "raise"),
    spec("die", "die"),
    spec("garbage", "garbage"),
    spec("notjson", "notjson"),
    spec("toomuch", "toomuch"),
    spec("hang", "hang"),
    spec("slow", "stubborn", timeout_ms=200),
    spec("stubborn", "stubborn"),
    spec("short", "hang", max_queue=1),
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(FUNCTIONS, sessions=SESSIONS)
    try:
        yield world.ready()
    finally:
        world.close()


def code(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def test_a_request_is_answered(world: World) -> None:
    assert world.invoke("echo", b'{"text": "hello"}') == (200, {"text": "hello"})


def test_a_large_body_goes_through_the_arena(world: World) -> None:
    body = json.dumps("x" * 200_000).encode()
    assert world.invoke("echo", body) == (200, len(body))


def test_an_answer_says_who_and_how_long(world: World) -> None:
    connection = world.connect()
    connection.request("POST", "/functions/echo/invoke", b"1", {"X-Request-Id": "mine-7"})
    with connection.getresponse() as response:
        assert response.read() == b"1"
        assert response.getheader("x-request-id") == "mine-7"
        assert [part.split(";")[0].strip() for part in str(response.getheader("server-timing")).split(",")] == [
            "queue",
            "wait",
            "run",
        ], "where its model was is not told by this controller"
    connection.close()


def test_connections_are_kept(world: World) -> None:
    connection = world.connect()
    for number in range(3):
        connection.request("POST", "/functions/echo/invoke", str(number).encode())
        with connection.getresponse() as response:
            assert response.read() == str(number).encode()
    connection.close()


def test_load_may_compute(world: World) -> None:
    assert world.invoke("computes") == (200, {})


def test_unknown_function(world: World) -> None:
    assert code(world.invoke("nobody")) == (404, "unknown_function")


def test_unknown_route(world: World) -> None:
    assert code(exchange(world.connect(), "GET", "/nothing", None)) == (404, "unknown_route")
    assert code(exchange(world.connect(), "GET", "/functions/echo/invoke", None)) == (405, "method_not_allowed")


def test_what_its_instance_cannot_read_is_the_clients_mistake(world: World) -> None:
    before = world.row("echo")
    for body in (b"{nope", b""):
        answer = world.invoke("echo", body)
        assert code(answer) == (400, "bad_json")
        assert re.fullmatch("the body is not JSON: .*; .*", answer[1]["error"]["message"])
    after = world.row("echo")
    assert (after["instance"], after["errors"]) == (before["instance"], before["errors"])
    assert after["outcomes"]["bad_json"] == before["outcomes"].get("bad_json", 0) + 2
    assert not any(isinstance(message, m.Missed) and message.function == "echo" for _, message in world.seen)


def test_what_an_instance_answers_is_passed_on_as_it_is(world: World) -> None:
    connection = world.connect()
    connection.request("POST", "/functions/notjson/invoke", b"1")
    with connection.getresponse() as response:
        assert (response.status, response.read()) == (200, b"{\xff")
    connection.close()
    assert world.admin.invoke("notjson", b"1") == b"{\xff"
    assert world.row("notjson")["errors"] == 0
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(world.paths.run)]
    said = subprocess.run([*command, "invoke", "notjson", "1"], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (1, "")  # a terminal obeys some bytes
    assert r"is not JSON" in said.stderr
    assert r"it begins b'{\xff'" in said.stderr


def test_too_large_is_refused_before_it_is_sent(world: World) -> None:
    connection = world.connect()
    connection.putrequest("POST", "/functions/echo/invoke")
    connection.putheader("Content-Length", str(BODY_NBYTES + 1))
    connection.endheaders()
    with connection.getresponse() as response:
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "body_too_large"
    connection.close()


def test_too_large_without_a_length(world: World) -> None:
    connection = world.connect()
    connection.putrequest("POST", "/functions/echo/invoke")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may come before all is sent
        for _ in range(BODY_NBYTES // 65536 + 1):
            connection.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    with connection.getresponse() as response:
        assert response.status == 413
    connection.close()


def test_what_the_function_raises(world: World) -> None:
    status, body = world.invoke("raise")
    assert (status, body["error"]["code"], body["error"]["message"]) == (500, "function_raised", "KeyError: 'x'")
    assert body["error"]["request_id"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("die", (502, "sandbox_died")),
        ("garbage", (502, "sandbox_died")),
        ("toomuch", (502, "sandbox_died")),
        ("slow", (504, "timed_out")),
    ],
)
def test_an_instance_that_fails_is_replaced(world: World, name: str, expected: tuple[int, str]) -> None:
    assert code(world.invoke(name)) == expected
    assert code(world.invoke(name)) == expected  # by the next instance


def test_a_client_that_leaves_interrupts_its_request(world: World) -> None:
    connection = world.connect()
    connection.request("POST", "/functions/hang/invoke", b"{}")
    world.wait("hang", m.Run)
    connection.close()
    second = world.connect()  # waits for the instance, which is still of use afterwards
    second.request("POST", "/functions/hang/invoke", b"{}")
    world.wait("interrupted", m.Raised)
    world.wait("hang", m.Run, 2)
    second.close()


def test_an_instance_that_ignores_the_interrupt_is_killed(world: World) -> None:
    connection = world.connect()
    connection.request("POST", "/functions/stubborn/invoke", b"{}")
    world.wait("stubborn", m.Run)
    connection.close()
    connection = world.connect()
    connection.request("POST", "/functions/stubborn/invoke", b"{}")
    world.wait("stubborn", m.Run, 2)
    connection.close()


def test_a_full_queue(world: World) -> None:
    first, second = world.invoke_later("short"), world.connect()
    world.wait("short", m.Run)
    second.request("POST", "/functions/short/invoke", b"{}")
    while world.row("short")["queued"] != 1:
        time.sleep(0.01)
    assert code(world.invoke("short")) == (429, "queue_full")
    second.close()
    while world.row("short")["queued"] != 0:  # else it would be next, and ask for a lease in another test
        time.sleep(0.01)
    run = world.wait("short", m.Run)
    there = list(world.instances.values())  # at once: instances that other tests have ended come and go meanwhile
    instance = next(i for i in there if i.kind == "hang" and i.fork.function == "short")
    world.call(lambda: instance.link.send(m.Returned(request=run.request, body=b"5", nbytes=0)))
    assert first() == (200, 5)


def test_a_lease_lost_before_the_request_was_handed_over(world: World) -> None:
    before = world.count(m.Acquire)
    world.grant = False
    answer = world.invoke_later("echo")
    acquires = world.wait("controller", m.Acquire, before + 1)
    world.call(lambda: world.controller.send(m.LeaseLost(request=acquires.request)))
    again = world.wait("controller", m.Acquire, before + 2)
    world.grant = True
    world.call(lambda: world.granted(again.request))
    assert answer() == (200, {})


def test_a_lease_lost_in_execution(world: World) -> None:
    runs = sum(isinstance(message, m.Run) for name, message in world.seen if name == "hang")
    answer = world.invoke_later("hang")
    run = world.wait("hang", m.Run, runs + 1)
    world.call(lambda: world.controller.send(m.LeaseLost(request=run.request)))
    assert code(answer()) == (503, "executor_lost")


def refusal(act: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(CallRefused) as caught:
        act()
    return caught.value.status, caught.value.code


def test_deploy_redeploy_and_remove(world: World) -> None:
    assert world.deploy("new", "echo") == {"name": "new", "version": 1}
    assert world.invoke("new", b"3") == (200, 3)
    with pytest.raises(CallRefused, match="ValueError: no weights") as caught:
        world.deploy("new", "broken")
    assert (caught.value.status, caught.value.code) == (422, "load_failed")
    assert world.invoke("new", b"4") == (200, 4)  # the old version goes on
    assert refusal(lambda: world.deploy("new", "stillborn")) == (422, "load_failed")
    assert world.deploy("new", "raise")["version"] == 2
    assert code(world.invoke("new")) == (500, "function_raised")
    world.admin.remove("new")
    assert code(world.invoke("new")) == (404, "unknown_function")
    assert refusal(lambda: world.admin.remove("new")) == (404, "unknown_function")
    world.until(lambda: not (world.state.functions / "new").exists(), "its snapshots to go")


def test_deploy_checks_what_it_is_given(world: World) -> None:
    assert refusal(lambda: world.deploy("../x", "")) == (400, "bad_request")
    wrong: list[dict[str, Any]] = [
        {"deadline": "soon"},
        {"percentile": 0.98},
        {"percentile": 101},
        # more than a message's integers hold: no process must try to send it
        {"deadline": f"{10**30}s"},
        {"quota": f"{10**30}"},
        {"max_queue": 1 << 62},
        {"stateless": True, "max_instances": 1 << 62},
    ]
    for settings in wrong:
        assert refusal(lambda settings=settings: world.deploy("x", "", **settings)) == (400, "bad_request")  # type: ignore[misc]


def test_logs(world: World) -> None:
    world.invoke("echo")
    assert b"hello from the function" in b"".join(world.admin.logs("echo", 5, follow=False))
    following = world.admin.logs("echo", 5, follow=True)
    assert b"hello from the function" in next(following)
    following.close()
    assert refusal(lambda: list(world.admin.logs("nobody", 5, follow=False))) == (404, "unknown_function")


def test_status(world: World) -> None:
    world.invoke("echo")
    status = world.admin.status()
    echo = status["functions"]["echo"]
    assert echo["state"] in ("idle", "busy")
    assert echo["outcomes"]["ok"] >= 1
    assert echo["p50_ms"] > 0
    assert status["gpus"] == {"0": {"epoch": 1}}
    assert exchange(world.connect(), "GET", "/healthz", None) == (200, {"status": "ok"})


def test_invoke_by_the_admin_socket(world: World) -> None:
    assert world.admin.invoke("echo", b"[1]") == b"[1]"
    large = json.dumps("x" * (BODY_NBYTES - 2)).encode()
    assert world.admin.invoke("echo", large) == str(len(large)).encode()  # through the arena
    assert refusal(lambda: world.admin.invoke("echo", large + b" ")) == (413, "body_too_large")
    assert refusal(lambda: world.admin.invoke("echo", b"{")) == (400, "bad_json")
    assert refusal(lambda: world.admin.invoke("nobody", b"1")) == (404, "unknown_function")
    assert refusal(lambda: world.admin.invoke("raise", b"1")) == (500, "function_raised")


def test_d1_nobody_administrates_over_tcp(world: World) -> None:
    secret = world.run / "secret.py"
    secret.write_text("echo")
    before = world.admin.functions()
    theft = json.dumps({"name": "theft", "path": str(secret), "source": "echo"}).encode()
    assert code(exchange(world.connect(), "POST", "/admin/functions", theft)) == (401, "unauthorized")
    for method, path in (
        ("GET", "/admin/functions"),
        ("DELETE", "/admin/functions/echo"),
        ("GET", "/admin/functions/echo/logs"),
        ("GET", "/admin/status"),
    ):
        assert code(exchange(world.connect(), method, path, None)) == (401, "unauthorized")
    assert [row["name"] for row in world.admin.functions()] == [row["name"] for row in before]


@needs.ROOT
def test_d1_a_stranger_may_not_administrate(world: World) -> None:
    """Of another uid: the socket is there, and says no before it reads anything."""
    os.chmod(world.run, 0o711)
    code_ = f"""
import os, sys
from pathlib import Path
from dormouse.core.node.adminclient import AdminClient
from dormouse.core.node.refusals import CallRefused
from dormouse.schemas import admin as a
from dormouse.core.links.fds import PacketSocket
os.setgroups([]); os.setresgid(12345, 12345, 12345); os.setresuid(12345, 12345, 12345)
client = AdminClient(Path({str(world.paths.run)!r}))
for act in (client.functions, client.status, lambda: client.remove("echo"), lambda: client.invoke("echo", b"1")):
    try:
        act()
    except CallRefused as error:
        print(error.status, error.code, "[node] admins" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code_], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout.splitlines(), done.returncode) == (["403 forbidden True"] * 4, 0), done.stderr
    noted = [json.loads(line) for line in world.state.audit.read_text().splitlines()]
    noted = [(line["who"], line["uid"], line["from"], line["outcome"]) for line in noted if line["act"] == "connect"]
    assert noted == [("12345", 12345, "unix", "forbidden")] * 4
    assert world.invoke("echo", b"1") == (200, 1)


def test_the_store_and_the_executors_are_told_whose_model_it_is(world: World) -> None:
    world.invoke("echo")
    fork = next(said for who, said in world.seen if who == "zygote" and isinstance(said, m.Fork))
    for role in ("store", "gpu0"):
        attach = world.wait(role, m.AttachInstance, wanted=lambda said: said.instance == fork.instance)
        assert (attach.function, attach.function_version, attach.tenant) == (fork.function, 1, "default")


def attached(world: World) -> tuple[PacketSocket[m.FromAttach, m.AttachSession], m.FromAttach]:
    """As `dormouse run` does; and what it is told."""
    attach: PacketSocket[m.FromAttach, m.AttachSession] = PacketSocket.connect(world.paths.attach, m.FromAttach)
    attach.send(m.AttachSession(name="script", pid=os.getpid()))
    packet = attach.recv()
    assert packet is not None
    for fd in packet[1]:
        os.close(fd)
    return attach, packet[0]


def test_more_programs_than_there_are_sessions_for(world: World) -> None:
    linked = [attached(world) for _ in range(SESSIONS + 1)]
    last, refused = linked.pop()
    text = (
        "2 programs of `dormouse run` are linked to it, and limits.sessions allows 2; end one (`dormouse status` lists"
    )
    assert isinstance(refused, m.AttachRefused)
    assert refused.text == text + " them), or raise it in the node file"
    assert last.recv() is None
    last.close()
    for attach, told in linked:
        assert isinstance(told, m.Attached)
        attach.close()
        gone = m.InstanceGone(instance=told.instance)
        world.wait("controller", m.InstanceGone, wanted=gone.__eq__)


def test_a_session(world: World) -> None:
    attach, told = attached(world)
    assert isinstance(told, m.Attached)
    heard: list[Any] = []
    links: list[Link[m.RouterToInstance, m.InstanceToRouter]] = []

    def connect() -> None:
        def on_message(message: m.RouterToInstance) -> None:
            heard.append(message)
            world.saw("session", message)

        link: Link[m.RouterToInstance, m.InstanceToRouter] = Link(
            f"{told.directory}/router", bind=False, incoming=m.RouterToInstance, on_message=on_message
        )
        link.send(m.NeedLease(version=0))
        links.append(link)

    world.call(connect)
    lease = world.wait("session", m.LeaseGranted).lease
    own = world.wait("store", m.AttachInstance, wanted=lambda said: said.instance == told.instance)
    assert (own.function, own.function_version) == ("", 0)  # nothing of it is kept
    world.call(lambda: links[0].send(m.LeaseEnded(serial=lease.serial, version=1)))
    world.call(links[0].close)
    attach.close()
    world.wait("controller", m.InstanceGone, wanted=lambda said: said.instance == told.instance)
    world.row("echo")  # the router has done by then what else it had to do
    assert not Path(told.directory).exists()
