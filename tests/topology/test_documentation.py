"""What README and docs show runs as it stands: their functions on a real node, their commands as they are written."""

import fnmatch
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dormouse.core.node.testing import TestNode, running_node

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    """The fenced code of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for of, text in found if of == language]


HELLO, MOOD = blocks("README.md", "python")
(SECRET,) = blocks("docs/secrets.md", "python")
(AGAIN,) = blocks("docs/types.md", "python")
(COMES,) = blocks("docs/loading.md", "python")
(LINEAR,) = blocks("docs/concurrency.md", "python")
(ROWS,) = blocks("docs/batching.md", "python")
(STEPS,) = blocks("docs/streams.md", "python")
(PICTURE,) = blocks("docs/binary-bodies.md", "python")


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "256MiB"\n') as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a home directory often is: closed to everybody else."""
    (tmp_path / "function").mkdir(mode=0o700)
    return tmp_path / "function"


def dormouse(node: TestNode, folder: Path, *words: str) -> str:
    """The command, in the folder, as a newcomer writes it."""
    environment = os.environ | {"DORMOUSE_RUN": str(node.run)}
    command = [sys.executable, "-P", "-m", "dormouse.core.node.cli", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def on_the_cpu() -> AbstractContextManager[Any]:
    sys.path.insert(0, str(ROOT))
    try:
        from examples.reference import OnTheCpu
    finally:
        sys.path.remove(str(ROOT))
    return OnTheCpu()


def natively(source: str, folder: Path, request: Any) -> Any:
    """The answer of the same file in this process, where ``cuda`` is the CPU."""
    module, before = ModuleType("native"), os.getcwd()
    os.chdir(folder)
    try:
        with on_the_cpu():
            exec(compile(source, "native.py", "exec"), module.__dict__)
            return json.loads(json.dumps(module.handle(module.load(), request)))
    finally:
        os.chdir(before)


def test_n9_the_first_function_and_the_commands_beside_it(node: TestNode, folder: Path) -> None:
    (commands,) = [block for block in blocks("README.md", "") if "deploy hello" in block]
    (folder / "hello.py").write_text(HELLO)
    expected = natively(HELLO, folder, {"x": [1, 2, 3, 4.5]})
    ran = []
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        ran.append(" ".join(words[:2]))
        if words[0] == "curl":
            _, _, body, url = words
            connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
            path = url.removeprefix("http://127.0.0.1:8700")  # all as curl does it, but for the port
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
            assert answer["y"] == pytest.approx(expected["y"])
        elif words[1] not in ("up", "down"):
            said = dormouse(node, folder, *words[1:])
            if words[1] == "invoke":
                assert json.loads(said)["y"] == pytest.approx(expected["y"])
    assert ran == [
        "dormouse up", "dormouse deploy", "dormouse invoke", "curl --json", "dormouse logs", "dormouse status",
        "dormouse rm", "dormouse down",
    ]  # fmt: skip


def test_n9_a_model_from_a_folder_beside_the_function(node: TestNode, folder: Path) -> None:
    """Also where its weights are for their owner alone, as `safetensors` writes them."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    model = folder / "my-model"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "a", "nap"]))
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(1)
    config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertForSequenceClassification(config).save_pretrained(model)
    (model / "model.safetensors").chmod(0o600)
    (folder / "mood.py").write_text(MOOD)
    request = {"text": "what a nap"}
    dormouse(node, folder, "deploy", "mood", "mood.py")
    answer = json.loads(dormouse(node, folder, "invoke", "mood", json.dumps(request)))
    expected = natively(MOOD, folder, request)
    assert answer["label"] == expected["label"]
    assert answer["score"] == pytest.approx(expected["score"], rel=1e-4)


def test_n9_a_secret_that_is_given_and_none_in_the_environment(node: TestNode, folder: Path) -> None:
    (folder / "secret.py").write_text(SECRET)
    (folder / ".token").write_text("abcdef\n")
    dormouse(node, folder, "secret", "set", "TOKEN", "--file", ".token")
    dormouse(node, folder, "deploy", "secret", "secret.py", "--secret", "TOKEN")
    assert json.loads(dormouse(node, folder, "invoke", "secret")) == {"length": 6}
    looks = "import os\ndef load(): pass\ndef handle(_, name): return os.environ.get(name)\n"
    (folder / "looks.py").write_text(looks)
    dormouse(node, folder, "deploy", "looks", "looks.py")
    assert json.loads(dormouse(node, folder, "invoke", "looks", '"HF_HUB_OFFLINE"')) == "1"
    assert json.loads(dormouse(node, folder, "invoke", "looks", '"DORMOUSE_RUN"')) is None


def test_n9_a_picture_there_and_one_back(node: TestNode, folder: Path) -> None:
    (folder / "picture.py").write_text(PICTURE)
    Image.frombytes("RGB", (32, 32), bytes(range(256)) * 12).save(folder / "picture.png")
    dormouse(node, folder, "deploy", "picture", "picture.py")
    (command,) = blocks("docs/binary-bodies.md", "")
    subprocess.run(command.replace(":8700", f":{node.port}"), shell=True, cwd=folder, check=True)
    mine = np.array(Image.open(folder / "features.png"))
    module = ModuleType("native")
    with on_the_cpu():
        exec(compile(PICTURE, "native.py", "exec"), module.__dict__)
        upload = SimpleNamespace(data=(folder / "picture.png").read_bytes())
        native = np.array(module.handle(module.load(), {"image": upload}))
    assert mine.shape == (30, 30, 3)
    assert np.abs(mine.astype(int) - native).max() <= 1  # rounded


def as_written(node: TestNode, command: str) -> str:
    """What a command of a page prints, all but the port as it stands there."""
    return subprocess.check_output(command.replace(":8700", f":{node.port}"), shell=True, text=True, timeout=120)


def test_answers_in_parts_jobs_and_the_python_client(node: TestNode, folder: Path) -> None:
    tensors, _ = blocks("docs/open-inference.md", "python")
    for name, source in (("hello", HELLO), ("steps", STEPS), ("linear", tensors)):
        (folder / f"{name}.py").write_text(source)
        dormouse(node, folder, "deploy", name, f"{name}.py")
    expected = natively(HELLO, folder, {"x": [1, 2, 3, 4]})
    (command,) = blocks("docs/streams.md", "sh")
    events = as_written(node, command).split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["step"] for event in events if event.startswith("data: ")] == [
        *range(3)
    ]
    detached, again = blocks("docs/jobs.md", "sh")
    head, _, job = as_written(node, detached).replace("\r", "").partition("\n\n")
    assert head.startswith("HTTP/1.1 202 Accepted\n")
    answer = json.loads(dormouse(node, folder, "job", json.loads(job)["id"], "--wait"))
    assert answer["y"] == pytest.approx(expected["y"])
    assert json.loads(as_written(node, again))["y"] == pytest.approx(expected["y"])
    (program,) = blocks("docs/python-client.md", "python")
    assert 'key="dm_..."' in program
    program = program.replace(":8700", f":{node.port}").replace(', key="dm_..."', "")
    said = subprocess.check_output([sys.executable, "-P", "-c", program], text=True, timeout=120).splitlines()
    assert [line.startswith("{'step': ") for line in said[1:4]] == [True] * 3
    assert said[-1].partition(" ")[2].startswith("{'y': [")


def test_what_a_function_takes_is_checked(node: TestNode) -> None:
    node.deployed("again", AGAIN)
    (commands,) = blocks("docs/types.md", "")
    checked, schema = (
        json.loads(subprocess.check_output(["curl", "-s", *shlex.split(line.replace(":8700", f":{node.port}"))[1:]]))
        for line in commands.splitlines()
    )
    assert (checked["error"]["code"], checked["error"]["param"]) == ("invalid_request", "$.times")
    assert schema["request"]["$defs"]["Request"]["properties"]["times"]["maximum"] == 10


def test_a_function_comes_and_goes(node: TestNode) -> None:
    node.deployed("comes", COMES)
    assert isinstance(node.result("comes", 0), float)
    node.restart("comes")
    node.wait(lambda: "served 1" in node.log_of("comes"), 60, "unload() to print")


def test_many_requests_at_once(node: TestNode) -> None:
    node.deployed("linear", LINEAR, concurrency=8)
    node.deployed("rows", ROWS, batch=8)
    for name in ("linear", "rows"):
        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(lambda n: node.result(name, [n, 0, 0, 0.0]), range(16)))  # noqa: B023
        first, second, third = rows[:3]
        assert all(abs(2 * b - a - c) < 1e-4 for a, b, c in zip(first, second, third, strict=True)), "it is linear"


def test_the_tests_that_security_names_are_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = re.findall(r"^(?:async )?def (test_\w+)", code, re.MULTILINE)
    named = re.findall(r"`(test_[\w*]+)`", page)
    assert len(named) > 30
    assert [name for name in named if not fnmatch.filter(known, name)] == []


def test_pages_link_to_what_is_there() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]:
        targets = re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text())
        assert [target for target in targets if not (page.parent / target).exists()] == [], page
