"""One node that others could reach: real TLS, real keys, raw requests as a browser or an attacker would send them."""

import contextlib
import gzip
import http.client
import json
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from guides import Reader, commands
from language_models import make_folder
from msgspec import structs

from benchmarks.nodes.testnode import HttpAnswer, TestNode, kept_running
from dormouse.core.cli import doctor
from dormouse.core.folder import FunctionFolder
from dormouse.core.nodefile import load_config
from dormouse.router.admin import logtails
from dormouse.schemas.admin import Wish

CERTIFICATE = Path(__file__).parents[1] / "certificate"
PAGE = "https://app.example"
NODE = f"""
host = "0.0.0.0"
tenants = "many"
hosts = ["node.example"]
cors = ["{PAGE}"]
tls_cert = "{{directory}}/cert.pem"
tls_key = "{{directory}}/key.pem"
"""
CONNECTIONS = 40
ECHO = """
def load():
    print("loading")

def handle(state, request):
    return request
"""


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`dormouse` in a process of its own."""
    words = [sys.executable, "-P", "-m", "dormouse.core.cli.main", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ))


class RemoteNode(TestNode):
    """Reached over TLS, by a name of its certificate."""

    __test__ = False
    first = ""

    def start(self, *options: str) -> None:
        """Before there is a key, the node must not start: see that, then make the first."""
        refused = command("up", str(self.file))
        assert refused.returncode == 5, refused.stderr
        assert "keys create" in refused.stderr
        assert not self.run.exists()
        self.first = str(self.keys("create", "--scope", "admin", "--note", "the first")["key"])
        super().start(*options)

    def connect(self, timeout_s: float = 120.0) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cafile=str(CERTIFICATE / "cert.pem"))
        return http.client.HTTPSConnection("localhost", self.port, timeout=timeout_s, context=context)

    def keys(self, *words: str) -> Any:
        done = command("--run", str(self.run), "keys", *words, "--config", str(self.file), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def key(self, **wish: Any) -> str:
        return str(self.admin.create_key(Wish(**wish))["key"])

    def ask(self, method: str, path: str, key: str = "", body: Any = None, **headers: str) -> HttpAnswer:
        sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["Authorization"] = f"Bearer {key}"
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            text = response.read().decode()
            found = {name.lower(): value for name, value in response.getheaders()}
        return HttpAnswer(response.status, json.loads(text) if "json" in found.get("content-type", "") else text, found)

    def call(self, name: str, key: str = "", **headers: str) -> tuple[int, Any]:
        """Invoke; the answer, or the error's code."""
        answer = self.ask("POST", f"/functions/{name}/invoke", key, {"x": 1}, **headers)
        return answer.status, answer.code or answer.body

    def raw(self, request: bytes) -> bytes:
        """What comes back to exactly these bytes, until the node closes."""
        context = ssl.create_default_context(cafile=str(CERTIFICATE / "cert.pem"))
        with (
            socket.create_connection(("127.0.0.1", self.port), 60) as tcp,
            context.wrap_socket(tcp, server_hostname="localhost") as sock,
        ):
            sock.sendall(request)
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
            return answer

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "logs" / "audit.log").read_text().splitlines()]


@pytest.fixture(scope="module")
def node() -> Iterator[RemoteNode]:
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        os.chmod(directory, 0o755)
        for name in ("cert.pem", "key.pem"):
            shutil.copy(CERTIFICATE / name, directory)
        config = f'[gpu]\ncount = 1\nmemory = "64MiB"\n[limits]\nheader_ms = 6000\nconnections = {CONNECTIONS}\n'
        with kept_running(RemoteNode(Path(directory), config, node=NODE.format(directory=directory))) as running:
            yield running


OK = (200, {"x": 1})
UNKNOWN = (404, "unknown_function")


@pytest.fixture(scope="module", autouse=True)
def functions(node: RemoteNode) -> None:
    node.deployed("ours", ECHO)
    node.deployed("theirs", ECHO, tenant="other")


def test_d10_over_tls_with_a_key_and_not_without(node: RemoteNode) -> None:
    key = node.key()
    assert node.call("ours", key) == OK
    assert node.call("ours") == (401, "unauthorized")
    assert node.call("ours", key[:-1] + ("0" if key[-1] != "0" else "1")) == (401, "unauthorized")
    assert node.ask("GET", "/healthz").body == {"status": "ok"}
    assert node.ask("GET", "/readyz").status == 200
    assert node.ask("POST", "/functions/ours/invoke").headers["www-authenticate"] == 'Bearer realm="dormouse"'


@needs.CURL
def test_the_guide(node: RemoteNode, tmp_path: Path) -> None:
    """The name of its node means this machine, as an entry in /etc/hosts would have it."""
    create, ls, call, revoke = commands("docs/remote-access.md")
    node.deployed("chat-1", ECHO)
    (tmp_path / ".curlrc").write_text(
        f'resolve = "node.example:{node.port}:127.0.0.1"\ncacert = "{CERTIFICATE / "cert.pem"}"\n'
    )
    reader = Reader(tmp_path, tmp_path / "shell", node, HOME=str(tmp_path))
    key = reader.types(f'{create}; echo "$KEY"').strip()
    assert key.startswith("dm_")
    (row,) = [row for row in json.loads(reader.types(f"{ls} --json")) if row["note"] == "the web shop"]
    assert row["id"] in reader.types(ls)
    assert json.loads(reader.types(call)) == {"text": "hello"}
    assert node.call("ours", key) == UNKNOWN
    assert "ID" in revoke
    reader.types(revoke.replace("ID", row["id"]))
    assert json.loads(reader.types(call))["error"]["code"] == "unauthorized"
    node.remove("chat-1")
    pack, deploy = commands("docs/deploying.md")  # in CI
    (tmp_path / "mood").mkdir()
    (tmp_path / "mood" / "mood.py").write_text("def handle(state, request):\n    return request\n")
    (tmp_path / "mood" / "dormouse.toml").write_text('deadline = "70ms"\n')
    told = {"DORMOUSE_KEY": node.key(scopes=("deploy",)), "NODE": f"https://node.example:{node.port}"}
    ci = Reader(tmp_path, tmp_path / "ci", node, HOME=str(tmp_path), **told)
    ci.has("git", "echo 1a2b3c")
    ci.types(pack)
    assert json.loads(ci.types(deploy)) == {"name": "mood", "version": 1}
    assert json.loads(ci.types(deploy)) == {"name": "mood", "version": 2, "changes": [], "kept": []}
    (row, _) = node.admin.versions("mood")
    assert (row["note"], row["deadline_ms"]) == ("1a2b3c", 70)
    node.remove("mood")


def test_nobody_reads_along(node: RemoteNode) -> None:
    """The port speaks TLS and nothing else."""
    with socket.create_connection(("127.0.0.1", node.port), 60) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1" not in plain.recv(65536)


def closed(sock: socket.socket) -> bool:
    """Waits for the end: whether there was nothing before it."""
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def test_who_does_not_finish_the_handshake_shuts_nobody_out_and_is_closed(node: RemoteNode) -> None:
    with contextlib.ExitStack() as stack:

        def silent() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", node.port), 60))

        begun = [silent() for _ in range(2 * CONNECTIONS)]
        key = node.key()
        assert [node.call("ours", key) for _ in range(10)] == [OK] * 10
        for sock in begun:  # uvicorn alone would wait for 60 s
            assert closed(sock)
    assert node.call("ours", node.key()) == OK


@pytest.mark.parametrize("tries", range(3))
def test_who_is_refused_while_it_sends_a_body_hears_why(node: RemoteNode, tries: int) -> None:
    for headers, told in (({}, 401), ({"Authorization": f"Bearer {node.key(scopes=('metrics',))}"}, 403)):
        with contextlib.closing(node.connect()) as connection:
            connection.request("POST", "/functions/ours/invoke", bytes(12 << 20), headers)
            with connection.getresponse() as response:
                assert (response.status, b"request_id" in response.read()) == (told, True)


def test_a_packed_archive_is_refused_by_name_and_a_packed_secret_is_not(node: RemoteNode) -> None:
    packed = gzip.compress(b"secret value")
    for coding in ("gzip", "br"):
        with contextlib.closing(node.connect()) as connection:
            asked = {"Authorization": f"Bearer {node.first}", "Content-Encoding": coding}
            connection.request("POST", "/admin/functions?name=packed", packed, asked)
            with connection.getresponse() as response:
                assert (response.status, json.loads(response.read())["error"]["code"]) == (415, "content_encoding")
            connection.request("PUT", "/admin/secrets/PACKED", packed, asked)
            with connection.getresponse() as response:
                response.read()
                assert response.status == (200 if coding == "gzip" else 415)
    assert [row["name"] for row in node.admin.secrets()] == ["PACKED"]
    node.admin.remove_secret("", "PACKED")


def test_another_protocol_that_is_asked_for_is_not_taken_and_the_body_is_whole(node: RemoteNode) -> None:
    asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    body = b'{"x": 1}'
    heads = b"POST /functions/ours/invoke HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n%b" % (
        node.key().encode(),
        b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body),
    )
    answer = node.raw(heads + asks + b"\r\n" + body + heads + b"Connection: close\r\n\r\n" + body)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'{"x":1}') == 2


def test_answers_that_nobody_reads_leave_a_place_for_a_key(node: RemoteNode) -> None:
    """Without a key, what there is to have is held as long as it lasts; and somebody comes who has one."""
    with contextlib.ExitStack() as stack:
        context = ssl.create_default_context(cafile=str(CERTIFICATE / "cert.pem"))
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", node.port))
            secret = stack.enter_context(context.wrap_socket(sock, server_hostname="localhost"))
            secret.sendall(b"GET /dashboard/functions.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
        key = node.key()
        assert [node.call("ours", key) for _ in range(10)] == [OK] * 10


def test_a_tenant_s_requests_that_do_not_end_leave_as_many_places_to_others(node: RemoteNode) -> None:
    """Whatever keys it has."""
    context = ssl.create_default_context(cafile=str(CERTIFICATE / "cert.pem"))
    keys = [node.key(tenant="other") for _ in range(2)]
    with contextlib.ExitStack() as stack:
        answers = []
        for number in range(CONNECTIONS):
            tcp = stack.enter_context(socket.create_connection(("127.0.0.1", node.port), 60))
            sock = stack.enter_context(context.wrap_socket(tcp, server_hostname="localhost"))
            head = f"Host: localhost\r\nAuthorization: Bearer {keys[number % 2]}\r\nContent-Length: 9\r\n"
            sock.sendall(f"POST /functions/theirs/invoke HTTP/1.1\r\n{head}Expect: 100-continue\r\n\r\n".encode())
            answers.append(sock.recv(65536).decode())
        assert [answer.split()[1] for answer in answers] == ["100"] * (CONNECTIONS // 2) + ["503"] * (CONNECTIONS // 2)
        error = json.loads(answers[-1].partition("\r\n\r\n")[2])["error"]
        assert (error["code"], error["message"]) == (
            "too_many_connections",
            "of the node's 40 connections (limits.connections), all that tenant 'other' may have are taken; "
            "end some of those requests or streams, or send this again later",
        )
        assert (node.call("theirs", node.first)[0], node.call("theirs", keys[0])[1]) == (200, "too_many_connections")
        key = node.key()
        assert [node.call("ours", key) for _ in range(10)] == [OK] * 10


def test_a_new_certificate_is_served_and_a_broken_one_is_not(node: RemoteNode) -> None:
    directory = node.file.parent

    def put(certificate: bytes, key: str) -> None:
        """Whole files, one after the other, as a renewal leaves them."""
        for name, content in (("key.pem", (CERTIFICATE / key).read_bytes()), ("cert.pem", certificate)):
            (directory / "new").write_bytes(content)
            os.replace(directory / "new", directory / name)

    def served(certificate: str) -> bool:
        context = ssl.create_default_context(cafile=str(CERTIFICATE / certificate))
        with socket.create_connection(("127.0.0.1", node.port), 60) as tcp:
            try:
                context.wrap_socket(tcp, server_hostname="localhost").close()
            except ssl.SSLCertVerificationError:
                return False
        return True

    log = node.state / "logs" / "router.log"
    assert (served("cert.pem"), served("other-cert.pem")) == (True, False)
    put(b"no certificate", "key.pem")
    node.wait(lambda: "certificate_refused" in log.read_text(), 60, "the broken one to be looked at")
    assert "cannot be used together" in log.read_text()
    assert served("cert.pem")
    put((CERTIFICATE / "other-cert.pem").read_bytes(), "other-key.pem")
    node.wait(lambda: served("other-cert.pem"), 60, "the new certificate")
    assert not served("cert.pem")
    put((CERTIFICATE / "cert.pem").read_bytes(), "key.pem")
    node.wait(lambda: served("cert.pem"), 60, "the first one")
    assert log.read_text().count("certificate_read") == 2


def test_the_node_says_how_it_is_reached(node: RemoteNode) -> None:
    assert node.status()["node"]["address"] == f"https://0.0.0.0:{node.port}"
    (found,) = [each for each in doctor.examine(load_config(node.file), True) if each.name == "exposure"]
    assert (found.state, found.found) == ("ok", "others than this machine, by TLS; every request needs a key")
    plain = load_config(node.file)
    plain = structs.replace(plain, node=structs.replace(plain.node, tls_cert="", tls_key=""))
    assert doctor._exposure(plain).state == "fail"


def test_the_audit_log(node: RemoteNode) -> None:
    deployer = node.key(scopes=("deploy",), tenant="third")
    name = deployer.split("_")[1]
    node.deployed("brief", ECHO, tenant="third")
    assert node.ask("DELETE", "/admin/functions/ours", deployer).code == "unknown_function"
    assert node.ask("DELETE", "/admin/functions/brief", deployer).body == {"removed": "brief"}
    node.admin.revoke_key(name)
    created, deployed, refused, removed, revoked = node.audit()[-5:]
    assert len(deployed.pop("content")) == 64
    assert (deployed.pop("version"), deployed.pop("options")) == (1, {"tenant": "third"})
    uid, user = os.getuid(), pwd.getpwuid(os.getuid()).pw_name
    for line, act, what in (
        (created, "keys create", name),
        (deployed, "deploy", "brief"),
        (revoked, "keys revoke", name),
    ):
        at = line.pop("at")
        assert at.endswith("Z")
        assert line == {"who": user, "uid": uid, "from": "unix", "act": act, "name": what, "outcome": "ok"}
    for line, what, outcome in ((refused, "ours", "unknown_function"), (removed, "brief", "ok")):
        assert (line["who"], line["tenant"], line["act"]) == (f"key {name}", "third", "rm")
        assert line["from"].startswith("127.0.0.1:")
        assert (line["name"], line["outcome"]) == (what, outcome)
    assert (node.state / "logs" / "audit.log").stat().st_mode & 0o777 == 0o600


def test_d1_over_tcp_nobody_administrates_without_a_key_for_it(node: RemoteNode) -> None:
    invoke = node.key(scopes=("invoke",))
    for method, path in (
        ("GET", "/admin/functions"),
        ("DELETE", "/admin/functions/ours"),
        ("GET", "/admin/functions/ours/logs"),
        ("GET", "/admin/status"),
    ):
        assert node.ask(method, path).code == "unauthorized", path
        assert node.ask(method, path, invoke).code == "scope_missing", path
    assert node.call("ours", invoke) == OK
    refused = [line for line in node.audit() if line["act"] == "rm" and line["name"] == "ours"]
    assert [line["outcome"] for line in refused[-2:]] == ["unauthorized", "scope_missing"]
    assert refused[-1]["who"] == f"key {invoke.split('_')[1]}"
    assert refused[-1]["from"].startswith("127.0.0.1:")


def test_a_revoked_key_ends_at_once(node: RemoteNode) -> None:
    key = node.key()
    name = key.split("_")[1]
    with contextlib.closing(node.connect()) as connection:  # also on a connection that is open

        def status() -> int:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", "/functions/ours/invoke", "1", headers)
            response = connection.getresponse()
            response.read()
            return response.status

        assert status() == 200
        assert node.keys("revoke", name)["revoked"] is not None
        assert status() == 401
    assert [row["id"] for row in node.keys("ls") if row["revoked"] is None and row["id"] == name] == []
    assert command("--run", str(node.run), "keys", "revoke", "nobody").returncode == 3


def test_a_key_is_shown_once_and_kept_as_a_hash(node: RemoteNode) -> None:
    key = node.key(note="mine")
    secret = key.split("_")[2]
    (row,) = [row for row in node.admin.list_keys() if row["note"] == "mine"]
    assert "key" not in row
    assert "digest" not in row
    for file in node.state.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file
    assert (node.state / "keys.json").stat().st_mode & 0o777 == 0o600


def test_a_log_is_followed_over_http_until_its_reader_leaves(node: RemoteNode) -> None:
    headers = {"Authorization": f"Bearer {node.key(scopes=('invoke', 'deploy'))}"}
    with contextlib.closing(node.connect()) as connection:
        connection.request("GET", "/admin/functions/ours/logs?tail=1&follow=1", headers=headers)
        response = connection.getresponse()
        assert len(response.read1().splitlines()) == 1
        node.admin.restart("ours")
        seen = b""
        while b"loading" not in seen:
            seen += response.read1()
    node.admin.restart("ours")  # what it prints is nobody's
    assert node.call("ours", headers["Authorization"].split()[1]) == OK
    assert "request_raised" not in (node.state / "logs" / "router.log").read_text()


def test_d1_a_tenant_sees_and_removes_its_own_only(node: RemoteNode) -> None:
    ours = node.key(scopes=("invoke", "deploy"))
    theirs = node.key(scopes=("admin",), tenant="other")
    assert node.call("ours", ours) == OK
    assert node.call("theirs", theirs) == OK
    for name, key, nobody in (("theirs", ours, "nobody"), ("ours", theirs, "nobody")):
        for method, path in (
            ("POST", "/functions/{}/invoke"),
            ("DELETE", "/admin/functions/{}"),
            ("GET", "/admin/functions/{}/logs"),
        ):
            hidden, absent = (node.ask(method, path.format(each), key, 1) for each in (name, nobody))
            assert (hidden.status, hidden.code) == UNKNOWN
            assert hidden.message.replace(name, nobody) == absent.message
            assert set(hidden.headers) == set(absent.headers)
    assert [row["name"] for row in node.ask("GET", "/admin/functions", ours).body["functions"]] == ["ours"]
    assert "loading" in node.ask("GET", "/admin/functions/ours/logs", ours).body
    status = node.ask("GET", "/admin/status", theirs)
    assert list(status.body["functions"]) == ["theirs"]
    assert "ours" not in str(status.body)
    everybodys = node.ask("GET", "/admin/status", node.first)
    assert list(everybodys.body["functions"]) == ["ours", "theirs"]
    assert [row["name"] for row in node.admin.functions()] == ["ours", "theirs"]


def test_a_tenant_follows_so_many_logs_and_others_the_rest(node: RemoteNode) -> None:
    """Whatever keys it has."""
    keys = [node.key(scopes=("deploy",), tenant="other") for _ in range(2)]
    with contextlib.ExitStack() as stack:

        def follow(name: str, key: str) -> http.client.HTTPResponse:
            connection = stack.enter_context(contextlib.closing(node.connect()))
            headers = {"Authorization": f"Bearer {key}"}
            connection.request("GET", f"/admin/functions/{name}/logs?tail=0&follow=1", headers=headers)
            return connection.getresponse()

        assert [follow("theirs", keys[number % 2]).status for number in range(logtails.OF_ONE)] == [200] * 16
        refused = follow("theirs", keys[0])
        error = json.loads(refused.read())["error"]
        assert (refused.status, error["code"]) == (503, "too_many_followers")
        assert error["message"].startswith("tenant 'other' follows 16 logs, and no more may be followed now; stop ")
        assert node.ask("GET", "/admin/functions/theirs/logs?tail=1", keys[0]).body == "loading\n"
        assert follow("ours", node.key(scopes=("deploy",))).status == 200
        assert follow("theirs", node.first).status == 200


def test_a_key_for_some_functions(node: RemoteNode) -> None:
    assert node.call("ours", node.key(functions=("our*",))) == OK
    assert node.call("ours", node.key(functions=("oursome",))) == UNKNOWN


BAD_HTTP = 'dormouse_refused_total{code="bad_http"} '


def test_a_rate(node: RemoteNode) -> None:
    key = node.key(rate_s=0.001, burst=2)
    assert [node.call("ours", key) for _ in range(2)] == [OK, OK]
    answer = node.ask("POST", "/functions/ours/invoke", key, {})
    assert (answer.status, answer.code) == (429, "rate_limited")
    assert 900 <= int(answer.headers["retry-after"]) <= 1000
    last = node.admin.requests("ours", "failed", 1)
    assert [(row["outcome"], row["id"]) for row in last] == [("rate_limited", answer.headers["x-request-id"])]
    assert node.ask("POST", "/functions/theirs/invoke", key, {}).code == "rate_limited"
    assert node.admin.requests("theirs", "failed", 1) == [], "it may not ask that one"

    def malformed() -> float:
        text = node.ask("GET", "/metrics", node.first).body
        return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(BAD_HTTP))

    before = malformed()
    assert b'"bad_http"' in node.raw(b"nonsense\r\n\r\n")
    assert malformed() == before + 1


@pytest.mark.parametrize("host", [b"evil.example", b"localhost.evil.example:8700", b""])
def test_d10_a_rebound_name_is_refused(node: RemoteNode, host: bytes) -> None:
    key = node.first.encode()
    request = b"GET /admin/functions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n" % (host, key)
    answer = node.raw(request)
    assert answer.startswith(b"HTTP/1.1 421 ")
    assert b"unknown_host" in answer
    assert b"ours" not in answer


def test_its_names(node: RemoteNode) -> None:
    key = node.first.encode()
    for host in (b"node.example", b"127.0.0.1:1", b"10.1.2.3"):
        request = b"GET /admin/functions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n"
        assert node.raw(request % (host, key)).startswith(b"HTTP/1.1 200 "), host


def test_d10_pages(node: RemoteNode) -> None:
    key = node.key()
    assert node.call("ours", key, Origin="https://evil.example") == (403, "foreign_origin")
    assert node.call("ours", key, Sec_Fetch_Site="cross-site") == (403, "foreign_origin")
    assert node.call("ours", key, Origin=PAGE, Sec_Fetch_Site="cross-site") == OK
    answer = node.ask("POST", "/functions/ours/invoke", key, 1, Origin=PAGE)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert node.ask("GET", "/admin/functions", node.first, Origin=PAGE).code == "forbidden"
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    preflight = node.ask("OPTIONS", "/functions/ours/invoke", **asked)
    assert (preflight.status, preflight.body) == (204, "")
    assert preflight.headers["access-control-allow-methods"] == "POST"
    refused = node.ask("OPTIONS", "/functions/ours/invoke", **(asked | {"Origin": "https://evil.example"}))
    assert refused.status == 403
    assert "access-control-allow-origin" not in refused.headers


def test_d1_a_folder_from_another_machine(node: RemoteNode, tmp_path: Path) -> None:
    """As an archive, with a key that may deploy; the key's tenant is the function's."""
    (tmp_path / "word.txt").write_text("far")
    (tmp_path / "function.py").write_text("def load(): return open('word.txt').read()\ndef handle(s, r): return s\n")
    data = subprocess.check_output(["tar", "-C", str(tmp_path), "-c", "."])

    def send(key: str, query: str, body: bytes = data) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-tar"}
        with contextlib.closing(node.connect()) as connection:
            connection.request("POST", f"/admin/functions?{query}", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        return response.status, answer.get("error", {}).get("code") or answer

    key = node.key(scopes=("deploy", "invoke"), tenant="third")
    assert send(node.key(), "name=far") == (403, "scope_missing")
    assert send(key, "name=far&deadline=80ms&idempotent=true") == (200, {"name": "far", "version": 1})
    assert node.call("far", key) == (200, "far")
    row = next(row for row in node.admin.functions() if row["name"] == "far")
    assert (row["tenant"], row["deadline_ms"], row["idempotent"]) == ("third", 80, True)
    assert send(key, "name=far&path=/etc/passwd") == (400, "bad_request")
    assert send(key, "deadline=80ms") == (400, "bad_request")
    assert send(key, "name=far", b"{}") == (400, "bad_archive")
    assert send(key, "name=far&entry=../function.py") == (400, "bad_name")
    assert node.call("far", key) == (200, "far")
    assert [line["outcome"] for line in node.audit() if line["act"] == "deploy"][-1] == "bad_name"
    make_folder(tmp_path / "model")
    model = subprocess.check_output(["tar", "-C", str(tmp_path / "model"), "-c", "."])
    assert send(key, "name=chat&llm=true&dtype=float32", model) == (200, {"name": "chat", "version": 1})
    assert send(key, "name=chat&llm=true&entry=function.py", data) == (400, "bad_request")
    assert node.remove("chat").status == 200
    assert node.remove("far").status == 200


FAILS = """
def load():
    print("mine alone")
    raise ValueError
def handle(state, request): ...
"""


def test_what_a_deploy_that_came_to_nothing_has_printed_is_not_for_who_has_the_name_next(node: RemoteNode) -> None:
    keys = [node.key(scopes=("deploy",), tenant=tenant) for tenant in ("other", "default")]

    def logs() -> list[Any]:
        answers = [node.ask("GET", "/admin/functions/fresh/logs", key) for key in keys]
        return [
            answer.code or answer.body.count("mine alone") + 10 * answer.body.count("loading") for answer in answers
        ]

    assert node.deploy("fresh", FAILS, tenant="other").status == 422
    assert b"mine alone" in b"".join(node.admin.logs("fresh", 9, follow=False))
    folder, shown = node.folder("fresh"), list[bytes]()
    (folder / "fresh.py").write_text(ECHO)
    node.admin.deploy("fresh", FunctionFolder(folder, "fresh.py", False), {}, shown.append)
    assert b"loading" in b"".join(shown), "also who follows it from before it loads"
    theirs, ours = (node.ask("GET", "/admin/functions/fresh/logs", key) for key in keys)
    assert theirs.code == "unknown_function"
    assert (ours.body.count("mine alone"), ours.body.count("loading")) == (0, 1)
    node.remove("fresh")
