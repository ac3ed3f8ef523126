"""What the store holds outlives its processes: killed nodes, damaged files, full memory, full disks; on real nodes."""

import contextlib
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import safetensors.torch
import torch
from small_disk import fill, node_on_small_disk

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.core.quantities import size

MIB: Final = 1 << 20
WIDTH: Final = 1024  # a matrix of 4 MiB
LAYERS: Final = 2
MODEL_NBYTES: Final = LAYERS * WIDTH * WIDTH * 4 + WIDTH * 4

HANDLE = """
def handle(state, request):
    if "sleep_s" in request:
        state["bias"].sum().item()
        time.sleep(request["sleep_s"])
    x = torch.ones(1024, device="cuda")
    for number in range(len(state) - 1):
        x = torch.tanh(state[str(number)] @ x + state["bias"])
    bits = [value.view(torch.int32).to(torch.int64).sum().item() for value in state.values()]
    return {"x": x[:8].tolist(), "bits": bits}
"""

FROM_FILE = """
import time
from pathlib import Path
import torch
from safetensors.torch import load_file

def load():
    return load_file(Path(__file__).parent / "wSEED.safetensors", device="cuda")
"""

SEEDED = """
import time
import torch

def load():
    torch.manual_seed(SEED)
    state = {str(number): torch.randn(1024, 1024) / 32 for number in range(2)}
    return {name: value.to("cuda") for name, value in (state | {"bias": torch.randn(1024)}).items()}
"""


def source(seed: int, *, file: bool = False) -> str:
    """Of a function with the model of this seed."""
    return (FROM_FILE if file else SEEDED).replace("SEED", str(seed)) + HANDLE


def weights(seed: int) -> dict[str, torch.Tensor]:
    """The model of a seed."""
    generator = torch.Generator().manual_seed(seed)
    state = {str(number): torch.randn(WIDTH, WIDTH, generator=generator) / 32 for number in range(LAYERS)}
    return state | {"bias": torch.randn(WIDTH, generator=generator)}


def native(seed: int) -> dict[str, Any]:
    """What a function with this model answers."""
    state = weights(seed)
    x = torch.ones(WIDTH)
    for number in range(LAYERS):
        x = torch.tanh(state[str(number)] @ x + state["bias"])
    bits = [value.view(torch.int32).to(torch.int64).sum().item() for value in state.values()]
    return {"x": x[:8].tolist(), "bits": bits}


def right(answer: Any, seed: int) -> None:
    """Each bit of each tensor, and the arithmetic."""
    expected = native(seed)
    assert answer["bits"] == expected["bits"]
    assert answer["x"] == pytest.approx(expected["x"], abs=1e-5)


def config(memory: str = "256MiB", **limits: str) -> str:
    lines = [f'[gpu]\ncount = 1\nmemory = "{memory}"\npoison = true\n[limits]\n']
    return "".join([*lines, *(f'{name} = "{value}"\n' for name, value in limits.items())])


@pytest.fixture(scope="module")
def shared() -> Iterator[TestNode]:
    with running_node(config("300MiB")) as running:
        yield running


@pytest.fixture
def node(shared: TestNode) -> Iterator[TestNode]:
    """The module's, empty. What a test has removed, stopped or killed is there again, or it has failed."""
    yield shared
    for name in shared.status()["functions"]:
        assert shared.remove(name).status == 200
    shared.wait(lambda: not segment_files(shared), 60, "all files to be gone")


def save(node: TestNode, seed: int) -> Path:
    path = node.directory / f"w{seed}.safetensors"
    safetensors.torch.save_file(weights(seed), path)
    return path


def deploy(node: TestNode, seed: int, *, file: bool = False) -> str:
    """Function ``f<seed>``."""
    name = f"f{seed}"
    files = {f"w{seed}.safetensors": save(node, seed)} if file else None
    node.deployed(name, source(seed, file=file), files)
    return name


def function(node: TestNode, name: str) -> Any:
    return node.status()["functions"][name]


def in_files(node: TestNode, *names: str) -> None:
    """Wait until these models are on disk."""

    def there() -> bool:
        functions = node.status()["functions"]
        return all(functions[name]["file_nbytes"] == MODEL_NBYTES for name in names)

    node.wait(there, 60, f"{names} to be in files")


def known_files(node: TestNode) -> int:
    """How many ranges of users' files the store's index has come to know by the file's identity."""
    path = node.state / "store" / "index.sqlite3"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as index:
        (last,) = index.execute("SELECT coalesce(max(id), 0) FROM identities").fetchone()
    return int(last)


def segment_files(node: TestNode) -> set[Path]:
    return set((node.state / "store" / "segments").glob("??/*"))


@contextmanager
def new_files(node: TestNode) -> Iterator[set[Path]]:
    """The segment files that come to be in the block."""
    before, found = segment_files(node), set[Path]()
    yield found
    found |= segment_files(node) - before


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def killed_and_back(node: TestNode, role: str) -> None:
    """SIGKILL to one process, and wait until its successor and all others are ready."""
    pid = node.kill(role)
    node.replaced(role, pid)
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")


def status_json(node: TestNode) -> Any:
    """What `dormouse status --json` prints."""
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "status"]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    subprocess.run(command, capture_output=True, timeout=60, check=True)  # and that for people prints too
    return json.loads(said.stdout)


def role_log(node: TestNode, role: str) -> str:
    return (node.state / "logs" / f"{role}.log").read_text()


# --- killed


def test_a_node_killed_as_a_whole_serves_again_without_a_deploy(node: TestNode) -> None:
    names = [deploy(node, 1, file=True), deploy(node, 2)]
    for seed, name in enumerate(names, 1):
        right(node.result(name, {}), seed)
    in_files(node, *names)
    files = segment_files(node)
    names.append(deploy(node, 3))  # of which nothing need be in a file yet
    node.kill_all()
    node.start()
    for seed, name in enumerate(names, 1):
        right(node.result(name, {}), seed)
    in_files(node, *names)
    after = node.status()["store"]
    assert {path for path in files if path.exists()} == files, "equal bytes come to the same files"
    assert sum(path.stat().st_size for path in segment_files(node)) == after["file_nbytes"]
    assert after["file_nbytes"] == 3 * MODEL_NBYTES
    assert after["trouble"] == ""


def test_a_store_killed_while_it_writes_leaves_whole_files_only(node: TestNode) -> None:
    deploy(node, 1)
    in_files(node, "f1")
    # 100 MB, so that its write can be met; in ten tensors, so that part of it may be there.
    big = """
        import torch
        def load():
            torch.manual_seed(7)
            return [torch.randint(0, 1 << 30, (10 << 18,), dtype=torch.int32).to("cuda") for _ in range(10)]
        def handle(state, request):
            return [part.sum(dtype=torch.int64).item() for part in state]
    """
    torch.manual_seed(7)
    expected = [torch.randint(0, 1 << 30, (10 << 18,), dtype=torch.int32).sum().item() for _ in range(10)]
    folder = node.state / "store" / "segments"
    (folder / ".half").touch()  # what nobody will write again
    store = node.pids()["store"]
    met, over = threading.Event(), threading.Event()

    def kill_in_a_write() -> None:
        while not over.is_set():
            with suppress(FileNotFoundError):  # a file was complete before we had looked at it
                if sum(path.stat().st_size for path in folder.glob(".*")) > MIB:
                    os.kill(store, signal.SIGKILL)
                    met.set()
                    return

    def deployed() -> bool:
        try:
            return node.deploy("big", big).status in (200, 201)
        except Unreachable:  # the write came before the answer, and the router ends with the store
            return False

    def written() -> bool:
        return bool(function(node, "big")["file_nbytes"] == 100 * MIB)

    answered = False
    for _ in range(20):  # who is not given a core may miss all writes of one deploy
        over.clear()
        killer = threading.Thread(target=kill_in_a_write)
        killer.start()
        try:
            answered = deployed()
            node.wait(lambda: met.is_set() or written(), 60, "a write")
        finally:
            over.set()
            killer.join()
        if met.is_set():
            break
        assert node.remove("big").status == 200
        node.wait(lambda: node.status()["store"]["file_nbytes"] == MODEL_NBYTES, 60, "big's files to be gone")
    assert met.is_set(), "no write was met"
    node.replaced("store", store)
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")
    if not answered:
        node.deployed("big", big)
    assert node.result("big", {}) == expected
    right(node.result("f1", {}), 1)
    node.wait(lambda: function(node, "big")["file_nbytes"] == 100 * MIB, 60, "all to be in files")
    assert not list(folder.glob(".*"))
    assert sum(path.stat().st_size for path in segment_files(node)) == node.status()["store"]["file_nbytes"]


def test_a_process_killed_under_a_request_and_right_after_a_deploy(node: TestNode) -> None:
    names = [deploy(node, 1, file=True), deploy(node, 2)]
    answers: list[HttpAnswer] = []
    for role in ("store", "controller"):
        names.append(deploy(node, len(names) + 1))
        thread = threading.Thread(target=lambda: answers.append(node.invoke("f1", {"sleep_s": 50})))  # ended before
        thread.start()
        node.wait(lambda: node.status()["functions"]["f1"]["running"] == 1, 60, "f1 to run")
        killed_and_back(node, role)
        thread.join()
        answer = answers.pop()
        assert (answer.status, answer.code) == (503, "starting"), f"{answer}: the router answers before it ends"
        for seed, name in enumerate(names, 1):
            right(node.result(name, {}), seed)
    in_files(node, *names)


def test_what_loads_compute_lies_once_on_the_host() -> None:
    """Equal results of two functions' loads, and within each: they come back from the GPU, not from a file."""
    computed = """
        import torch
        def load():
            base = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
            return [base * 3, base * 3, base * NUMBER]
        def handle(state, request):
            return [part.sum(dtype=torch.float64).item() for part in state]
    """
    total = float((1 << 20) * ((1 << 20) - 1) // 2)
    with running_node(config("28MiB")) as node:  # not both, and what they compute with
        for number in (5, 7):
            node.deployed(f"c{number}", computed.replace("NUMBER", str(number)))

        def once() -> bool:
            store = node.status()["store"]
            return (store["host_nbytes"], store["file_nbytes"]) == (12 * MIB, 12 * MIB)

        for start in (1, 2):
            for number in (5, 7, 5):
                answer = node.result(f"c{number}", {})
                assert answer == pytest.approx([3 * total, 3 * total, number * total], rel=1e-6)
            node.wait(once, 60, "equal bytes to be there once")
            if start == 1:
                node.kill_all()
                node.start()


# --- damaged files


def answered_rightly_at_last(node: TestNode, name: str, seed: int) -> list[HttpAnswer]:
    """Invoke until there is an answer; each before it must be the retryable 503 of a damaged model."""
    refused: list[HttpAnswer] = []
    while (answer := node.invoke(name, {})).status != 200:
        assert (answer.status, answer.code) == (503, "model_damaged"), answer
        assert answer.headers["retry-after"]
        refused.append(answer)
        assert len(refused) < 5
    right(answer.body, seed)
    return refused


def test_segments_damaged_while_the_node_is_down(node: TestNode) -> None:
    """Of one model that came from a file, and of one that its load made; a third is whole."""
    deploy(node, 2)
    in_files(node, "f2")
    before = known_files(node)
    victims = []
    for seed in (1, 3):
        with new_files(node) as made:
            deploy(node, seed, file=seed == 1)
            in_files(node, f"f{seed}")
        victims.append(min(path for path in made if path.stat().st_size >= MIB))
    node.wait(lambda: known_files(node) >= before + LAYERS, 60, "the index to have the file's identity")
    node.kill_all()
    for victim in victims:
        flip_a_byte(victim)
    node.start()
    # What was known by its file was not read, and its first use has found it.
    (refused,) = answered_rightly_at_last(node, "f1", 1)
    assert victims[0].name[:8] in refused.message or "segment" in refused.message
    assert "segment_damaged" in role_log(node, "store")
    assert "model_damaged" in role_log(node, "controller")
    # The other's load() has made its bytes anew at the start.
    assert answered_rightly_at_last(node, "f3", 3) == []
    right(node.result("f2", {}), 2)
    outcomes = {name: row["outcomes"].get("model_damaged") for name, row in node.status()["functions"].items()}
    assert outcomes == {"f1": 1, "f2": None, "f3": None}
    in_files(node, "f1", "f3")
    right(node.result("f1", {}), 1)
    # What is on disk is right again: no fault is left for the next start.
    node.kill_all()
    node.start()
    for seed in (1, 2, 3):
        right(node.result(f"f{seed}", {}), seed)
    assert role_log(node, "store").count("segment_damaged") == 1


def test_a_segment_damaged_while_it_is_in_a_file_only() -> None:
    with running_node(config("24MiB", host="20MiB")) as node:
        with new_files(node) as made:
            deploy(node, 1)
            in_files(node, "f1")
        deploy(node, 2)
        deploy(node, 3, file=True)
        in_files(node, "f2", "f3")
        for seed in (2, 3):
            right(node.result(f"f{seed}", {}), seed)
        node.wait(lambda: bool(node.status()["store"]["answered"]), 60, "the store's own numbers")
        assert function(node, "f1")["host_nbytes"] < MODEL_NBYTES
        assert function(node, "f1")["gpu_nbytes"] == {}
        for path in made:
            flip_a_byte(path)
        refused = answered_rightly_at_last(node, "f1", 1)
        assert refused, "it was served without its files"
        assert "segment_damaged" in role_log(node, "store")
        for seed in (2, 3, 1):
            right(node.result(f"f{seed}", {}), seed)
        outcomes = {name: row["outcomes"] for name, row in node.status()["functions"].items()}
        assert outcomes["f1"]["model_damaged"] == len(refused)
        assert not {"model_damaged", "sandbox_died"} & {*outcomes["f2"], *outcomes["f3"]}


# --- no room


def test_a_host_budget_without_files_refuses_with_numbers() -> None:
    with running_node(config(host="20MiB", disk="0")) as node:
        for seed in (1, 2):
            deploy(node, seed)
        answer = node.deploy("f3", source(3))
        assert (answer.status, answer.code) == (422, "load_failed"), answer
        assert "no host memory" in answer.message
        assert "of 20.0 MiB" in answer.message
        assert "limits.host" in answer.message
        assert node.invoke("f3", {}).status == 404
        for seed in (1, 2):
            right(node.result(f"f{seed}", {}), seed)
        store = status_json(node)["store"]
        assert MODEL_NBYTES * 2 <= store["host_nbytes"] <= 20 * MIB
        assert (store["host_budget_nbytes"], store["file_nbytes"], store["file_budget_nbytes"]) == (20 * MIB, 0, 0)
        assert node.remove("f1").status == 200
        deploy(node, 3)  # there is room again at once
        right(node.result("f3", {}), 3)


def test_a_full_disk_is_said_and_stops_no_function() -> None:
    with running_node(config(disk="10MiB")) as node:
        deploy(node, 1)
        in_files(node, "f1")
        deploy(node, 2)
        node.wait(lambda: node.status()["store"]["trouble"] != "", 60, "the trouble to be said")
        trouble = status_json(node)["store"]["trouble"]
        assert "of 10.0 MiB: some models" in trouble
        assert "limits.disk" in trouble
        assert function(node, "f2")["file_nbytes"] < MODEL_NBYTES
        for seed in (1, 2):
            right(node.result(f"f{seed}", {}), seed)
        # A restart finds one of them in files and loads the other.
        node.kill_all()
        node.start()
        for seed in (1, 2):
            right(node.result(f"f{seed}", {}), seed)
        assert node.remove("f1").status == 200
        in_files(node, "f2")
        node.wait(lambda: node.status()["store"]["trouble"] == "", 60, "the trouble to be over")
        right(node.result("f2", {}), 2)


def test_a_disk_that_refuses_writes_is_said_and_tried_again(node: TestNode) -> None:
    deploy(node, 1)  # and with it comes the slab, whose size the limit below would refuse too
    in_files(node, "f1")
    store, files = node.pids()["store"], segment_files(node)
    # As on a full disk, writes fail in the middle of a file; here beyond its first MiB.
    unlimited = resource.prlimit(store, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    deploy(node, 2)
    node.wait(lambda: node.status()["store"]["trouble"] != "", 60, "the trouble to be said")
    assert "cannot be written" in status_json(node)["store"]["trouble"]
    for seed in (1, 2):
        right(node.result(f"f{seed}", {}), seed)
    assert segment_files(node) == files
    resource.prlimit(store, resource.RLIMIT_FSIZE, unlimited)
    in_files(node, "f2")
    node.wait(lambda: node.status()["store"]["trouble"] == "", 60, "the trouble to be over")
    assert node.pids()["store"] == store
    node.kill_all()
    node.start()
    for seed in (1, 2):
        right(node.result(f"f{seed}", {}), seed)


@contextmanager
def small_disk_node(size: str) -> Iterator[TestNode]:
    with node_on_small_disk(config(disk="1GiB"), size) as node:  # the store itself keeps no tenth of the disk free
        yield node


def test_d14_a_disk_without_a_byte_left_stops_no_process_and_brings_nothing_back() -> None:
    with small_disk_node("64m") as node:
        deploy(node, 1)
        in_files(node, "f1")
        chatty = """
            def load(): pass
            def handle(state, request): print("x" * 10_000, flush=True)
        """
        node.deployed("chatty", chatty)
        before = node.pids()
        filler = fill(node.state)
        right(node.result("f1", {}), 1)
        for _ in range(3):
            node.result("chatty", {})
        answer = node.deploy("f2", source(2))
        assert (answer.status, answer.code) == (507, "disk_full"), answer
        assert "free space" in answer.message
        assert node.invoke("f2", {}).code == "unknown_function"
        right(node.result("f1", {}), 1)
        assert node.pids() == before
        # What was deployed needs nothing of the disk, whoever dies.
        killed_and_back(node, "zygote")
        right(node.result("f1", {}), 1)
        fill(node.state)
        # Who removes a function may want to make space, and it is gone for good.
        assert node.remove("chatty").status == 200
        fill(node.state)
        node.kill_all()
        node.start()
        assert set(node.status()["functions"]) == {"f1"}
        right(node.result("f1", {}), 1)
        filler.unlink()
        deploy(node, 2)
        in_files(node, "f2")
        right(node.result("f2", {}), 2)


def test_d14_a_catalogue_that_cannot_be_written_refuses_deploys_and_removals(node: TestNode) -> None:
    for seed in (1, 2):
        deploy(node, seed)
    before = node.pids()
    unlimited = resource.prlimit(before["controller"], resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    for name, text in (("f3", source(3)), ("f1", source(3))):
        answer = node.deploy(name, text)
        assert (answer.status, answer.code) == (507, "not_kept"), answer
        assert "free space" in answer.message
    assert node.invoke("f3", {}).code == "unknown_function"
    with pytest.raises(CallRefused, match=r"^nothing was changed: .*cannot be written.*free space") as pin:
        node.admin.pin("f1", True)
    assert pin.value.code == "not_kept"
    answer = node.remove("f2")  # it would come back
    assert (answer.status, answer.code) == (507, "not_removed"), answer
    assert "free space" in answer.message
    for seed in (1, 2):
        right(node.result(f"f{seed}", {}), seed)
    assert node.pids() == before
    resource.prlimit(before["controller"], resource.RLIMIT_FSIZE, unlimited)
    assert node.remove("f2").status == 200
    assert node.invoke("f2", {}).code == "unknown_function"
    node.wait(lambda: node.status()["store"]["file_nbytes"] == MODEL_NBYTES, 60, "f2's files to be gone")
    deploy(node, 3)
    in_files(node, "f1", "f3")
    node.kill_all()
    node.start()
    assert set(node.status()["functions"]) == {"f1", "f3"}
    for seed in (1, 3):
        right(node.result(f"f{seed}", {}), seed)


def test_more_models_than_host_memory() -> None:
    with running_node(config("24MiB", host="20MiB")) as node:
        names = [deploy(node, seed, file=seed % 2 == 0) for seed in range(1, 6)]
        for _ in range(2):
            for seed, name in enumerate(names, 1):
                right(node.result(name, {}), seed)
        in_files(node, *names)
        said = status_json(node)
        assert said["store"]["host_nbytes"] <= 20 * MIB
        assert said["store"]["file_nbytes"] == 5 * MODEL_NBYTES
        assert said["store"]["trouble"] == ""
        for name in names:
            row = said["functions"][name]
            assert row["last_wake"]["file_nbytes"] > 0, row
            assert row["last_wake"]["file_nbytes"] <= row["last_wake"]["copied_nbytes"]
            assert row["copied_file_nbytes"] >= row["last_wake"]["file_nbytes"]


def test_a_version_too_large_for_the_pool_leaves_the_old_one(node: TestNode) -> None:
    deploy(node, 1)
    large = """
        import torch
        def load(): return torch.ones(400 << 18).to("cuda")
        def handle(state, request): return state.sum().item()
    """
    answer = node.deploy("f1", large)
    assert (answer.status, answer.code) == (507, "model_too_large"), answer
    capacity = node.status()["gpus"]["0"]["capacity_nbytes"]
    assert f"the model has 400 MiB and a GPU of this node {size(capacity)};" in answer.message, answer.message
    right(node.result("f1", {}), 1)
    in_files(node, "f1")
    node.kill_all()
    node.start()
    right(node.result("f1", {}), 1)
    node.wait(lambda: node.status()["store"]["file_nbytes"] == MODEL_NBYTES, 60, "its files to be gone")
