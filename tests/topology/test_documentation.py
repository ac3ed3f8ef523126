"""What README and docs show runs as it stands: their functions on a real node, their commands as they are written."""

import fnmatch
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
from guides import GUIDES, ROOT, Reader, blocks, commands
from PIL import Image

from benchmarks.nodes.testnode import TestNode, running_node

HELLO, MOOD = blocks("README.md", "python")
(SECRET,) = blocks("docs/secrets.md", "python")
(AGAIN,) = blocks("docs/types.md", "python")
(COMES,) = blocks("docs/loading.md", "python")
(LINEAR,) = blocks("docs/concurrency.md", "python")
(ROWS,) = blocks("docs/batching.md", "python")
(STEPS,) = blocks("docs/streams.md", "python")
(PICTURE,) = blocks("docs/binary-bodies.md", "python")
REQUEST = [1, 2, 3, 4.5]


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "256MiB"\n') as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a home directory often is: closed to everybody else."""
    (tmp_path / "function").mkdir(mode=0o700)
    return tmp_path / "function"


@pytest.fixture
def reader(node: TestNode, folder: Path, tmp_path: Path) -> Reader:
    return Reader(folder, tmp_path / "shell", node)


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


def test_n9_the_first_function_and_the_commands_beside_it(reader: Reader) -> None:
    """All but the first and the last command, which are of a node of the reader's own."""
    _, first, _ = blocks("README.md", "sh")
    up, *between, down = [each for each in commands("README.md") if f"{each}\n" in first]
    (reader.folder / "hello.py").write_text(HELLO)
    expected = {"y": pytest.approx(natively(HELLO, reader.folder, {"x": REQUEST})["y"])}
    said = {" ".join(command.split()[:2]): reader.types(command) for command in between}
    assert json.loads(said["dormouse invoke"]) == expected
    assert json.loads(said["curl --json"]) == expected
    assert list(said) == [
        "dormouse deploy", "dormouse invoke", "curl --json", "dormouse logs", "dormouse status", "dormouse rm",
    ]  # fmt: skip
    assert (up.split()[:2], down) == (["dormouse", "up"], "dormouse down")


ALONE = """import fcntl, socket, struct, subprocess, sys
with socket.socket() as any:  # the loopback of a new network is down
    fcntl.ioctl(any, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
for place in ("/run", "/var/lib"):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", place], check=True)
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def test_the_first_function_from_up_to_down(folder: Path, tmp_path: Path) -> None:
    """On a node of the reader's own, with its defaults: where no other has its port and its directories."""
    alone = ["unshare", "--net", "--mount", sys.executable, "-c", ALONE]
    if os.getuid() != 0 or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root that may make a network and mounts")
    _, first, _ = blocks("README.md", "sh")
    (folder / "hello.py").write_text(HELLO)
    reader = Reader(folder, tmp_path / "shell")
    (tmp_path / "first.sh").write_text(f"set -e\ntrap 'dormouse down >&2 || true' EXIT\n{first}")
    out = reader.types(f"{shlex.join(alone)} bash {tmp_path}/first.sh")
    expected = {"y": pytest.approx(natively(HELLO, folder, {"x": REQUEST})["y"])}
    assert [json.loads(answer) for answer in re.findall(r'{"y":.*?}', out)] == [expected] * 2, out


def test_n9_a_model_from_a_folder_beside_the_function(reader: Reader) -> None:
    """Also where its weights are for their owner alone, as `safetensors` writes them."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    model = reader.folder / "my-model"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "a", "nap"]))
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(1)
    config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertForSequenceClassification(config).save_pretrained(model)
    (model / "model.safetensors").chmod(0o600)
    (reader.folder / "mood.py").write_text(MOOD)
    request = {"text": "what a nap"}
    reader.types("dormouse deploy mood mood.py")
    answer = json.loads(reader.types(f"dormouse invoke mood '{json.dumps(request)}'"))
    expected = natively(MOOD, reader.folder, request)
    assert answer["label"] == expected["label"]
    assert answer["score"] == pytest.approx(expected["score"], rel=1e-4)


def test_n9_a_secret_that_is_given_and_none_in_the_environment(reader: Reader) -> None:
    asks, of_a_file, deploy, ls, rm, gone = commands("docs/secrets.md")
    (reader.folder / "secret.py").write_text(SECRET)
    (reader.folder / "FILE").write_text("abcdef\n")
    reader.types(asks, "abcd\n")
    reader.types(of_a_file)
    reader.types(deploy)
    assert json.loads(reader.types("dormouse invoke secret")) == {"length": 6}
    looks = "import os\ndef load(): pass\ndef handle(_, name): return os.environ.get(name)\n"
    (reader.folder / "looks.py").write_text(looks)
    reader.types("dormouse deploy looks looks.py")
    for name, value in (("HF_HUB_OFFLINE", "1"), ("DORMOUSE_RUN", None), ("TOKEN", None)):
        assert json.loads(reader.types(f"""dormouse invoke looks '"{name}"'""")) == value
    assert "TOKEN" in reader.types(ls)
    status, _, why = reader.tries(gone)
    assert (status, "secret" in why) == (5, True), why
    reader.types(rm)
    reader.types(gone)
    assert "TOKEN" not in reader.types(ls)


def test_n9_a_picture_there_and_one_back(reader: Reader) -> None:
    (reader.folder / "picture.py").write_text(PICTURE)
    Image.frombytes("RGB", (32, 32), bytes(range(256)) * 12).save(reader.folder / "picture.png")
    reader.types("dormouse deploy picture picture.py")
    (command,) = commands("docs/binary-bodies.md")
    reader.types(command)
    reader.types("dormouse invoke picture @picture.png > answer.png || true")
    mine = np.array(Image.open(reader.folder / "features.png"))
    module = ModuleType("native")
    with on_the_cpu():
        exec(compile(PICTURE, "native.py", "exec"), module.__dict__)
        upload = SimpleNamespace(data=(reader.folder / "picture.png").read_bytes())
        native = np.array(module.handle(module.load(), {"image": upload}))
    assert mine.shape == (30, 30, 3)
    assert np.abs(mine.astype(int) - native).max() <= 1  # rounded


def test_answers_in_parts_jobs_and_the_python_client(reader: Reader) -> None:
    tensors, _ = blocks("docs/open-inference.md", "python")
    for name, source in (("hello", HELLO), ("steps", STEPS), ("linear", tensors)):
        (reader.folder / f"{name}.py").write_text(source)
        reader.types(f"dormouse deploy {name} {name}.py")
    expected = natively(HELLO, reader.folder, {"x": [1, 2, 3, 4]})
    (command,) = commands("docs/streams.md")
    events = reader.types(command).split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["step"] for event in events if event.startswith("data: ")] == [
        *range(3)
    ]
    detached, again = commands("docs/jobs.md")
    head, _, job = reader.types(detached).replace("\r", "").partition("\n\n")
    assert head.startswith("HTTP/1.1 202 Accepted\n")
    answer = json.loads(reader.types(f"dormouse job {json.loads(job)['id']} --wait"))
    assert answer["y"] == pytest.approx(expected["y"])
    assert json.loads(reader.types(again))["y"] == pytest.approx(expected["y"])
    (program,) = blocks("docs/python-client.md", "python")
    assert 'key="dm_..."' in program
    program = reader.here(program).replace(', key="dm_..."', "")
    said = subprocess.check_output([sys.executable, "-P", "-c", program], text=True, timeout=120).splitlines()
    assert [line.startswith("{'step': ") for line in said[1:4]] == [True] * 3
    assert said[-1].partition(" ")[2].startswith("{'y': [")


def test_what_a_function_takes_is_checked(node: TestNode, reader: Reader) -> None:
    node.deployed("again", AGAIN)
    checked, schema = (json.loads(reader.types(command)) for command in commands("docs/types.md"))
    assert (checked["error"]["code"], checked["error"]["param"]) == ("invalid_request", "$.times")
    assert schema["request"]["$defs"]["Request"]["properties"]["times"]["maximum"] == 10


def test_a_function_comes_and_goes(node: TestNode) -> None:
    node.deployed("comes", COMES)
    assert isinstance(node.result("comes", 0), float)
    node.restart("comes")
    node.wait(lambda: "served 1" in node.log_of("comes"), 60, "unload() to print")


def test_many_requests_at_once(node: TestNode, reader: Reader) -> None:
    deploy, simulate = commands("docs/batching.md")
    assert simulate.startswith("dormouse simulate "), "tests/unit/test_simulate.py has this scenario"
    for name, source, command in (("linear", LINEAR, *commands("docs/concurrency.md")), ("rows", ROWS, deploy)):
        (reader.folder / f"{name}.py").write_text(source)
        assert f"{name} version " in reader.types(command)
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


LIKE_A_COMMAND = re.compile(r"(sudo|podman|make|python3?|git|pip) |(dormouse|curl) (?!.* \[--)")
NO_GUIDES = ("docs/benchmarks.md", "docs/gpu.md", "docs/papers.md")
"""They have numbers, and the commands that measured them."""


def test_the_commands_of_all_guides_are_typed_by_tests() -> None:
    """A test takes all commands of a page at once: it fails when there is one more."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("t*/test_*.py"))
    typed = re.findall(r'commands\("([\w./-]+\.md)"\)', tests)
    assert {page for page in GUIDES if commands(page)} == {*typed}
    for page in sorted({*GUIDES} - {*NO_GUIDES}):
        text = (ROOT / page).read_text()
        indented = re.findall(r"^    (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.M)
        lines = "".join(blocks(page, "")).splitlines() + indented
        assert [line for line in lines if LIKE_A_COMMAND.match(line)] == [], f"{page}: let its block be of ```sh"
