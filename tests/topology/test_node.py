"""A whole node, used as a person uses it: the commands with their exit statuses, and models in a sandbox in which no
kernel computes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import architectures
import httpx2
import pytest
import torch
from guides import Reader, blocks, commands
from msgspec.structs import asdict
from wheels import PackageIndex

from benchmarks.nodes.ports import reserved_port
from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.adminclient import AdminClient
from dormouse.schemas.policy import DEFAULT

COLD = True  # as users start a node
COUNTER = """
import torch

def load():
    print("loading")
    return torch.zeros(1, device="cuda")

def handle(count, request):
    count += request["by"]
    return {"count": count.item()}
"""


KEEPER = """
from pathlib import Path
import torch

def load():
    return torch.zeros(1, device="cuda")

def handle(model, until):
    while until and not Path(until).exists():
        model.sum().item()  # it has the GPU, and keeps its turn for `turn_ms`, however busy the machine is
"""


def command(run: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`dormouse` in a process of its own."""
    words = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(run), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=dict(os.environ))


def said(run: Path, *arguments: str, status: int = 0) -> Any:
    """What a command prints with --json."""
    done = command(run, *arguments, "--json")
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as held:
        yield int(held.getsockname()[1])


def test_the_commands_from_up_to_down(tmp_path: Path, port: int) -> None:
    run = tmp_path / "run"
    node = tmp_path / "node.toml"
    node.write_text(
        f'[node]\nrun = "{run}"\nstate = "{tmp_path}/state"\nport = {port}\n[gpu]\ncount = 1\nmemory = "64MiB"\n'
        f'[schedule]\norder = "fifo"\nturn_ms = 60000\n[limits]\ncompute_ms = 600000\n'
        f'[sandbox]\nread = ["{tmp_path}"]\n'
        f'[environments]\nindex = "{packages(tmp_path / "index").url}"\n'
    )
    function = tmp_path / "counter" / "counter.py"
    function.parent.mkdir()
    function.write_text(COUNTER)
    tmp_path.chmod(0o755)

    assert command(run, "ls").returncode == 4
    up = said(run, "up", str(node))
    try:
        assert up["run"] == str(run)
        assert command(run, "up", str(node)).returncode != 0, "a node is started once"
        examined = said(run, "doctor", "--config", str(node))
        assert examined["ok"]
        bare = subprocess.run(  # who has no node file at hand, and the node has a port of its own
            [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(run), "doctor", "--json"],
            capture_output=True,
            text=True,
        )
        (of_port,) = [row["found"] for row in json.loads(bare.stdout)["findings"] if row["name"] == "port"]
        assert of_port == f"127.0.0.1:{port} (the node has it)"
        assert [row["state"] for row in examined["findings"] if row["name"].startswith("librar")] == ["ok"]
        assert said(run, "deploy", "counter", str(function)) == {"name": "counter", "version": 1}
        assert [row["name"] for row in said(run, "ls")] == ["counter"]
        assert said(run, "invoke", "counter", '{"by": 2}')["answer"] == {"count": 2.0}
        assert command(run, "invoke", "counter", '{"by": 3}').stdout == '{"count":5.0}\n'
        assert command(run, "invoke", "counter", "{").returncode != 0
        deep = command(run, "invoke", "counter", "[" * 5000)
        assert (deep.returncode, "nested too deeply" in deep.stderr, "Traceback" in deep.stderr) == (5, True, False)
        assert command(run, "invoke", "nobody").returncode == 3
        assert said(run, "status")["functions"]["counter"]["requests"] >= 2
        (tmp_path / "keeper").mkdir()
        status_says_why_a_request_waits(run, tmp_path / "keeper" / "function.py")
        the_policy_is_shown_and_changed(run, tmp_path / "state" / "logs" / "audit.log")
        assert "loading" in said(run, "logs", "counter")["lines"]
        a_function_is_deployed_as_often_as_its_file_is_saved(run, function)
        a_terminal_shows_the_status_again_and_again(run)
        refused = command(run, "deploy", "other", str(function), "--tenant", "somebody-else")
        assert (refused.returncode, "tenants" in refused.stderr) == (5, True), refused.stderr
        assert said(run, "rm", "nobody", "counter", "-y", status=3)["removed"] == ["counter"]
        assert said(run, "ls") == []
        reader = Reader(tmp_path, tmp_path / "shell", DORMOUSE_RUN=str(run))
        the_guide_to_libraries(reader)
        the_guide_to_services_drains_and_replaces(reader)
    finally:
        assert said(run, "down") == {"stopped": True, "running": 0}
    assert not run.exists()


def packages(folder: Path) -> PackageIndex:
    """What docs/dependencies.md shows, without the code."""
    made = PackageIndex(folder)
    for name, version in (("emoji", "2.15.0"), ("huggingface-hub", "0.36.0"), ("tokenizers", "0.22.1")):
        made.wheel(name, version, {f"{name.replace('-', '_')}/__init__.py": f"__version__ = {version!r}\n"})
    needs = ("huggingface-hub==0.36.0", "tokenizers==0.22.1")
    made.wheel("transformers", "4.57.6", {"transformers/__init__.py": "__version__ = '4.57.6'\n"}, requires=needs)
    return made


def the_guide_to_libraries(reader: Reader) -> None:
    (shown,) = blocks("docs/dependencies.md", "console")
    _, cat, deploy = re.split(r"^\$ ", shown, flags=re.MULTILINE)
    cat, requirements = cat.split("\n", 1)
    deploy, printed = deploy.split("\n", 1)
    mood = reader.folder / "mood"
    mood.mkdir()
    (mood / "requirements.txt").write_text(requirements)
    (mood / "mood.py").write_text(
        "import emoji, transformers\ndef handle(state, request): return [emoji.__version__, transformers.__version__]\n"
    )
    assert reader.types(cat) == requirements
    lines = reader.types(f"{deploy} 2>&1").splitlines()
    expected = [line for line in printed.splitlines() if line != "..."]
    assert [line for line in lines if line in expected] == expected
    assert json.loads(reader.types("dormouse invoke mood")) == ["2.15.0", "4.57.6"]


def the_guide_to_services_drains_and_replaces(reader: Reader) -> None:
    _, _, _, _, replace, drain, undo, *_ = commands("docs/service.md")
    reader.types(drain)
    status, _, why = reader.tries("dormouse invoke mood")
    assert (status, "this node is drained" in why) == (1, True), why
    reader.types(undo)
    before = reader.types("dormouse invoke mood")
    (pid,) = re.findall(r"\d+", (reader.folder / "run" / "t" / "supervisor.pid").read_text())
    reader.types(replace)
    assert (reader.folder / "run" / "t" / "supervisor.pid").read_text().strip() != pid
    assert reader.types("dormouse invoke mood") == before


def a_function_is_deployed_as_often_as_its_file_is_saved(run: Path, function: Path) -> None:
    words = [sys.executable, "-u", "-m", "dormouse.core.cli.main", "--run", str(run), "dev", str(function)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as dev:
        try:
            assert dev.stdout is not None
            said = iter(dev.stdout.readline, "")
            assert "counter-dev version 1 is deployed\n" in said
            assert said_invoked(run) == {"count": 1.0}
            function.write_text(COUNTER.replace('print("loading"', 'print("loading anew"'))
            assert "counter-dev version 2 is deployed\n" in said
            function.write_text(COUNTER + "(")
            assert any(line.startswith("! load_failed") or "never closed" in line for line in said)
            assert said_invoked(run) == {"count": 1.0}, "the one before goes on"
            function.write_text(COUNTER)
            assert "counter-dev version 3 is deployed\n" in said
            assert command(run, "dev", str(function)).returncode == 5, "the name is taken"
        finally:
            dev.send_signal(signal.SIGTERM)
        assert "counter-dev is removed\n" in said
    assert dev.returncode == 0
    assert command(run, "invoke", "counter-dev").returncode == 3


def said_invoked(run: Path) -> Any:
    return said(run, "invoke", "counter-dev", '{"by": 1}')["answer"]


def a_terminal_shows_the_status_again_and_again(run: Path) -> None:
    assert command(run, "top").returncode == 2, "this is no terminal"
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "dormouse.core.cli.main", "--run", str(run), "top", "--every", "0.2"]
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as top:
        try:
            shown = b""
            while shown.count(b"node 'default' at") < 3:
                shown += os.read(ours, 65536)
        finally:
            top.send_signal(signal.SIGINT)
            os.close(theirs)
    os.close(ours)
    assert top.returncode == 130


def the_policy_is_shown_and_changed(run: Path, audit: Path) -> None:
    own = said(run, "policy")
    assert own == {**asdict(DEFAULT), "order": "fifo", "turn_ms": 60_000}
    for words, status, complaint in (
        (["order"], 2, "'order' is no change; write SETTING=VALUE, for example order=edf"),
        (["speed=2"], 5, "there is no setting 'speed'; write one of order, placement, "),
        (["order=edf", "turns=2"], 5, "turns cannot be changed while the node runs: write it into [schedule] of the"),
        (["order=edf", "window=one"], 5, "window cannot be changed while the node runs"),
        (["passed_over_ms=1e99"], 5, "Expected `int`, got `float`"),
        (["passed_over_ms=99999999999999999999"], 5, "Expected `int`, got `float`"),
        (["await_resident=maybe"], 5, "Expected `bool`, got `str`"),
    ):
        refused = command(run, "policy", *words)
        assert (refused.returncode, complaint in refused.stderr) == (status, True), refused.stderr
    assert said(run, "policy") == own, "of a list with a bad one, none is changed"
    changed = {**own, "order": "edf", "passed_over_share": 0.5, "await_resident": False}
    changes = ["order=edf", "passed_over_share=0.5", "await_resident=false"]
    assert said(run, "policy", *changes) == changed
    shown = command(run, "policy").stdout
    assert tomllib.loads(shown) == changed, "it can be put into a node file"
    acts = [json.loads(line) for line in audit.read_text().splitlines()]
    ours = [(act["name"], act["outcome"]) for act in acts if act["act"] == "policy"]
    assert ours[-2:] == [('await_resident="maybe"', "bad_request"), (" ".join(changes).replace("edf", '"edf"'), "ok")]


def test_who_stops_a_node_reads_that_something_ran(tmp_path: Path, port: int) -> None:
    """And so does who waits for it. The node in the foreground says when it is ready, and that it stops."""
    node, run, function = tmp_path / "node.toml", tmp_path / "run", tmp_path / "f" / "function.py"
    node.write_text(
        f'[node]\nrun = "{run}"\nstate = "{tmp_path}/state"\nport = {port}\n[gpu]\ncount = 1\nmemory = "64MiB"\n'
    )
    function.parent.mkdir()
    function.write_text("import time\ndef handle(_, request):\n    time.sleep(request)\n")
    words = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "up", str(node), "--foreground"]
    with (
        subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as foreground,
        ThreadPoolExecutor() as pool,
    ):
        assert foreground.stderr is not None
        assert foreground.stderr.readline() == f"dormouse: ready: all processes are up, port {port}\n"
        said(run, "deploy", "f", str(function))
        admin, end_s = AdminClient(run), time.monotonic() + 60

        def until(state: str) -> None:
            while admin.functions()[0][state] != 1:
                assert time.monotonic() < end_s
                time.sleep(0.01)

        cut = pool.submit(httpx2.post, f"http://127.0.0.1:{port}/functions/f/invoke", json=3600, timeout=60)
        until("running")
        waits = pool.submit(command, run, "invoke", "f", "3600")
        until("queued")
        down = command(run, "down")
        assert (down.returncode, down.stdout) == (0, "stopped\n")
        assert "a request that ran there got no answer; `dormouse drain` waits" in down.stderr
        assert cut.result().status_code == 503
        assert "stopped in the middle of this request; send it again if" in cut.result().json()["error"]["message"]
        assert waits.result().returncode == 4
        assert "ended, or was stopped, before it had answered" in waits.result().stderr
        assert foreground.stderr.read() == "dormouse: stopping\n"
        assert foreground.wait(60) == 0


def status_says_why_a_request_waits(run: Path, file: Path) -> None:
    """While the only GPU is used; also a late request is next, because the order is by arrival."""
    file.write_text(KEEPER)
    go = file.with_name("go")
    said(run, "deploy", "keeper", str(file.parent))
    said(run, "deploy", "late", str(file), "--deadline", "1ms")
    client = AdminClient(run)
    with ThreadPoolExecutor(2) as pool:

        def until(ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            end_s = time.monotonic() + 60
            value = client.status()
            while not ready(value):
                assert time.monotonic() < end_s, value
                value = client.status()
            return value

        asleep = pool.submit(client.invoke, "keeper", json.dumps(str(go)).encode())
        try:
            until(lambda value: value["gpus"]["0"]["busy_with"] == "keeper")
            waits = pool.submit(client.invoke, "late", b"null")
            (told,) = until(lambda value: value["waiting"] == 1)["waits"]["oldest"]
            assert (told["function"], told["kind"]) == ("late", "busy")
            assert told["reason"].startswith("the only GPU is busy")
            assert told["reason"].endswith("; it comes next")
            assert "the only GPU is busy" in command(run, "status", "--all").stdout
        finally:
            go.touch()
        assert (asleep.result(), waits.result()) == (b"null", b"null")
    # The controller may hear of the lease's end after the client has its answer.
    service = until(lambda value: value["functions"]["late"]["service"]["counted"])["functions"]["late"]["service"]
    assert (service["deadline_ms"], service["complies"]) == (1.0, False)
    said(run, "rm", "keeper", "late", "-y")


# The trap: which operations run on tensors of the CPU in the instance while a model computes. Numbers (no dimensions)
# are left out, which a model may compute on the CPU on a GPU machine too.
TRAP = """

class Trap(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        values = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(v, torch.Tensor) and v.device.type == "cpu" and v.dim() and v.numel() for v in values):
            self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def load():
    return {name: build(name)[0].to("cuda") for name in CASES}


def handle(models, request):
    inputs = {key: value.to("cuda") for key, value in build(request["name"])[1].items()}
    with Trap() as trap:
        outputs = tensors(models[request["name"]](**inputs))
        torch.ones(2) + torch.ones(2)
    return {"outputs": [[list(v.shape), v.flatten().tolist()] for v in outputs], "computed_here": sorted(trap.seen)}
"""

OWN_ADDITION = ["aten::add"]
"""The function's, on the CPU: the trap sees it, so it works."""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node() as running:
        running.deployed("zoo", Path(architectures.__file__).read_text() + TRAP)
        yield running


@pytest.mark.filterwarnings("ignore")  # the libraries' own deprecations are not ours to fail on
@pytest.mark.parametrize("name", architectures.CASES)
def test_models_compute_on_the_gpu_only(name: str, node: TestNode) -> None:
    answer = node.result("zoo", {"name": name})
    model, inputs = architectures.build(name)
    with torch.no_grad():
        expected = architectures.tensors(model(**inputs))
    for (shape, values), native in zip(answer["outputs"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(values).reshape(shape), native.float(), rtol=1e-4, atol=1e-5)
    assert answer["computed_here"] == OWN_ADDITION
