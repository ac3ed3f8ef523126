"""`dormouse run`: any Python program, linked to a running node."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from guides import Reader, commands

from benchmarks.nodes.testnode import TestNode, running_node

PROGRAM = """
    import sys, threading, time, torch
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = model(x)
        model.to("cuda")
        got = model(x.cuda()).cpu()
        assert torch.allclose(got, expected, atol=1e-5)
        time.sleep(float(sys.argv[1]))  # longer than idle_ms: the lease is given back, what lives is written back
        assert torch.allclose(model(x.cuda()).cpu(), expected, atol=1e-5)
    print("right", *sys.argv[1:])
    sys.exit(7)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "256MiB"\npoison = true\n') as running:
        yield running


def run(node: TestNode, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "run", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=dict(os.environ))


def test_a_program_computes_on_the_nodes_gpu(node: TestNode) -> None:
    script = node.directory / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    outcome = run(node, str(script), "0.6", "--flag")
    assert outcome.returncode == 7, outcome.stderr
    assert outcome.stdout.split() == ["right", "0.6", "--flag"]
    node.wait(
        lambda: node.status()["waiting"] == 0 and node.status()["gpus"]["0"]["busy_with"] is None, 60, "an idle GPU"
    )


def test_an_idle_program_does_not_keep_the_only_gpu(node: TestNode) -> None:
    source = "import torch\ndef load(): pass\ndef handle(s, r): return torch.ones(3, device='cuda').tolist()\n"
    node.deployed("one", source)
    script = node.directory / "idle.py"
    program = """
        import torch
        x = torch.ones(2, device="cuda") + 1
        print(x.tolist(), flush=True)
        input()
        print((x + 1).tolist())
    """
    script.write_text(textwrap.dedent(program))
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "run", str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[2.0, 2.0]\n"
        assert node.result("one", {}) == [1.0, 1.0, 1.0]
        (row,) = node.status()["sessions"]
        assert (row["program"], row["pid"], row["tenant"]) == (str(script), process.pid, "default")
        assert row["memory_nbytes"] > 0
        output, _ = process.communicate("\n", timeout=60)
        assert output == "[3.0, 3.0]\n"
        assert process.returncode == 0
    node.wait(lambda: node.status()["sessions"] == [], 60, "the end of the session")
    names = {"one", f"run:run-{process.pid}"}
    node.wait(lambda: node.status()["gpus"]["0"]["busy"]["functions"].keys() >= names, 60, "what both have computed")


def test_an_interactive_session(node: TestNode) -> None:
    outcome = run(node, "-i", stdin="import torch\nprint(torch.arange(3).cuda().sum().item())\n")
    assert "3" in outcome.stdout.split(), outcome
    assert outcome.returncode == 0


def test_gradients_are_enabled_as_in_a_plain_program(node: TestNode) -> None:
    program = """
        import threading, torch
        model, x = torch.nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
        def compute(): print(model(x).requires_grad, torch.no_grad()(model)(x).requires_grad, flush=True)
        compute()
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        model(x).sum().cpu().backward()
    """
    script = node.directory / "gradients.py"
    script.write_text(textwrap.dedent(program))
    outcome = run(node, str(script))
    assert outcome.stdout.split() == ["True", "False"] * 2, outcome
    assert "backward() is not available on Dormouse" in outcome.stderr
    assert outcome.returncode == 1


def test_an_error_in_the_program_is_the_programs(node: TestNode) -> None:
    script = node.directory / "bad.py"
    script.write_text("import torch\nx = torch.ones(2, device='cuda')\nx[torch.tensor([5]).cuda()].tolist()\n")
    outcome = run(node, str(script))
    assert outcome.returncode == 1
    assert "IndexError" in outcome.stderr
    assert "bad.py" in outcome.stderr


def test_without_a_node_the_error_says_what_to_do() -> None:
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", "/tmp/dm-no-such-node", "run", "x.py"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 4
    assert "dormouse up" in outcome.stderr


def test_a_program_that_goes_on_whatever_fails_is_run_again_on_the_node_that_took_over() -> None:
    """As a server does, to which each error is one request's."""
    program = """
        import os, time, torch
        x = torch.ones(8, device="cuda")
        print("computing", x.sum().item(), os.getpid(), flush=True)
        while True:
            try:
                (x + 1).sum().item()
            except RuntimeError as error:
                print(error, flush=True)
            time.sleep(0.05)
    """
    with running_node('[gpu]\ncount = 1\nmemory = "128MiB"\n') as node:
        script = node.directory / "server.py"
        script.write_text(textwrap.dedent(program))
        command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "run"]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "--restart", str(script)], stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            try:
                _, _, first = process.stdout.readline().split()
                node.replace()
                failed, line = set(), process.stdout.readline()
                while line and not line.startswith("computing"):
                    failed.add(line.strip())
                    line = process.stdout.readline()
                assert line.split()[:2] == ["computing", "8.0"]
                assert line.split()[2] != first
                (said,) = failed
                assert "the node was replaced (`dormouse up --replace`); run the program again" in said
            finally:
                process.terminate()
            _, stderr = process.communicate(timeout=60)
        assert "this program is interrupted" in stderr, stderr
        assert "is run again in 1 s" in stderr, stderr
        assert process.returncode == 128 + 15, stderr


SERVICE = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    import torch
    model = torch.nn.Linear(4, 2).to("cuda")

    class Score(BaseHTTPRequestHandler):
        def do_POST(self):
            x = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with torch.no_grad():
                body = json.dumps(model(torch.tensor(x, dtype=torch.float32, device="cuda")).tolist()).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = HTTPServer(("127.0.0.1", 0), Score)
    print(server.server_port, flush=True)
    server.serve_forever()
"""


def test_the_guide_to_services_that_one_has(node: TestNode) -> None:
    """Its commands, with a service that needs no library beside torch."""
    serve, ask, status = commands("docs/moving.md")
    (node.directory / "app.py").write_text(textwrap.dedent(SERVICE))
    reader = Reader(node.directory, node.directory / "shell", node)
    words = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), *shlex.split(serve)[1:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=node.directory) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            answer = json.loads(reader.types(ask.replace(":8080", f":{port}")))
            assert [type(each) for each in answer] == [float, float]
            assert "app.py" in reader.types(status)
        finally:
            process.terminate()
