"""What a function can read of others through a node: nothing. One GPU, so that all use the same memory in turn."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Final

import needs
import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node

COUNT: Final = 20_000  # elements of a secret, as in the trial that found it

WAYS: Final = """
    import gc, torch
    from dormouse.client_shim.stream.stream import Stream

    SECRET = 0x5EC2E7A9
    PATTERN = SECRET.to_bytes(4, "little")
    # elements of four bytes; what is empty and has at most 1 MiB is zeros for whoever made it, too
    SIZES = (10, 250, 1000, 5000, 20_000, 75_001, 1 << 18, 3 << 17, 5 << 18)
    CUDA = {"dtype": torch.int32, "device": "cuda"}

    def load():
        stream = next(thing for thing in gc.get_objects() if type(thing) is Stream)
        return {"arena": stream.backend.arena, "anchor": torch.ones(20_000, device="cuda") + 1}

    def leave(sizes=SIZES):
        # the secret, in several blocks of each size at once
        kept = [torch.full((n,), SECRET, **CUDA) for n in sizes for _ in range(3 + 500 // n)]
        return sum(x[-1].item() == SECRET for x in kept)

    def whole(tensor):
        # all bytes of the storage, also those between and behind the elements
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(tensor.untyped_storage())

    def ways(n, anchor):
        yield "empty", torch.empty(n, **CUDA)
        yield "empty_strided", whole(torch.empty_strided((n // 4,), (4,), **CUDA))
        yield "gaps", whole(torch.empty_strided((n // 4,), (4,), **CUDA).fill_(1))
        yield "new_empty", anchor.new_empty(n, dtype=torch.int32)
        yield "new_empty_strided", anchor.new_empty_strided((n,), (1,), dtype=torch.int32)
        yield "empty_like", torch.empty_like(torch.ones(n, dtype=torch.int32).to("cuda"))
        yield "resize_", torch.ones(3, **CUDA).resize_(n)
        yield "resize_ of nothing", torch.empty(0, **CUDA).resize_(n)
        out = torch.empty(n, **CUDA)
        torch.add(torch.ones(n // 2, **CUDA), 1, out=out[: n // 2])
        yield "out", out
        yield "storage", torch.empty(0, **CUDA).set_(torch.UntypedStorage(4 * n, device="cuda"))
        yield "nonzero", whole(torch.ones(n // 2, device="cuda").nonzero())  # last: whose block it was has no secret

    def look(state, left):
        # in memory as it is, or each way in memory in which the secret has just been left
        found, seen = {}, {}
        for n in SIZES:
            for again in range(1 + 500 // n):
                if left:
                    leave([n])
                for way, tensor in ways(n, state["anchor"]):
                    content = tensor.cpu().numpy().tobytes()
                    seen[way] = seen.get(way, 0) + len(content) // 4
                    found[way] = found.get(way, 0) + content.count(PATTERN)
                    if left:
                        leave([n])
        found["arena"] = bytes(state["arena"]).count(PATTERN)
        return {"found": found, "seen": seen}

    def handle(state, request):
        return leave() if request == "leave" else look(state, request == "look at what you leave")
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "192MiB"\npoison = true\n') as running:
        yield running


@needs.COMPILER
def test_d6_no_function_reads_what_another_left(node: TestNode) -> None:
    """And the way is real: the function that left the bytes finds them, as natively."""
    node.deployed("keeper", WAYS)
    node.deployed("spy", WAYS)
    pid = node.pids()["gpu0"]
    for _ in range(2):
        left = node.result("keeper", "leave")
        seen = node.result("spy", "look")
        assert min(seen["seen"].values()) >= COUNT
        assert {way: count for way, count in seen["found"].items() if count} == {}
        assert node.result("keeper", "leave") == left
        own = node.result("keeper", "look at what you leave")["found"]
        assert own["empty"] >= COUNT
        assert [way for way in own if not own[way]] == ["nonzero"], "which writes all that it takes"
    assert node.remove("keeper").status == 200
    assert not any(node.result("spy", "look")["found"].values()), "nor of one that is gone"
    assert node.pids()["gpu0"] == pid, "all of it happened in one process"


LAZY: Final = """
    import sys, torch

    calls = []

    def load():
        return {"weight": torch.ones(8, device="cuda") * 3, "grown": []}

    def handle(state, request):
        calls.append(request)
        index = torch.tensor([request.get("index", 0)]).to("cuda")
        if request["do"] == "calls":
            return len(calls)
        if "mask" not in state:
            state["mask"] = torch.ones(4, 4, device="cuda").tril()
        if request["do"] == "raise":
            raise KeyError("on purpose")
        if request["do"] == "unread":
            state["weight"][index]  # nobody reads this
            return "done"
        if request["do"] == "keep":
            state["picked"] = state["weight"][index]
            return state["picked"].tolist()
        if request["do"] == "write":
            state["weight"].index_fill_(0, index, 1.0)
            return "done"
        if request["do"] == "grow":
            state["grown"].append(torch.ones(1 << 20, device="cuda") * 2)
        if request["do"] == "wait":
            print("waits", file=sys.stderr, flush=True)
            while True:
                state["mask"].sum().item()
        return [state["mask"].sum().item(), state["weight"].tolist()]
"""
FINE: Final = [10.0, [3.0] * 8]


def log_of(node: TestNode, name: str) -> str:
    return (node.state / "logs" / f"fn-{name}.log").read_text()


def test_n1_and_n5_what_failed_requests_leave(node: TestNode) -> None:
    node.deployed("lazy", LAZY, quota="1MiB")

    def ask(do: str, **more: object) -> tuple[int, str, str]:
        answer = node.told("lazy", {"do": do, **more})
        error = answer.body["error"] if answer.status != 200 else {"code": "", "message": str(answer.body)}
        return answer.status, error["code"], error["message"]

    def replacements() -> int:
        return log_of(node, "lazy").count("this instance is replaced")

    # all commands were good: what it made is there in later requests, in the same instance
    for _ in range(2):
        assert ask("raise")[:2] == (500, "function_raised")
        assert node.result("lazy", {"do": "look"}) == FINE
    assert node.result("lazy", {"do": "calls"}) == 5
    assert replacements() == 0
    # a command failed whose result nobody read: the request fails, by name and line; nothing that is kept is touched
    status, code, text = ask("unread", index=99)
    assert (status, code) == (500, "function_raised")
    assert "IndexError" in text
    assert "aten::index" in text
    assert "lazy.py" in text
    assert node.result("lazy", {"do": "look"}) == FINE
    assert replacements() == 0
    # the result of the failing command is kept, or a kept tensor was being written: replaced, and the log says why
    for count, (do, op) in enumerate({"keep": "aten::index.Tensor", "write": "aten::index_fill_"}.items(), 1):
        assert ask(do, index=99)[:2] == (500, "function_raised")
        assert node.result("lazy", {"do": "look"}) == FINE
        assert node.result("lazy", {"do": "calls"}) == 2, "a new instance"
        assert replacements() == count
        line = [line for line in log_of(node, "lazy").splitlines() if "this instance is replaced" in line][-1]
        assert "it keeps a tensor that can never be used" in line
        assert op in log_of(node, "lazy").split("this instance is replaced")[-1]
    # growth beyond the quota fails; what Python holds of it is nowhere
    status, _, text = ask("grow")
    assert status == 500
    assert "quota" in text
    assert node.result("lazy", {"do": "look"}) == FINE
    assert replacements() == 3


def test_n1_an_executor_that_dies_takes_what_its_request_made(node: TestNode) -> None:
    node.deployed("lost", LAZY)
    pid = node.pids()["gpu0"]
    answers: list[HttpAnswer] = []
    caller = threading.Thread(target=lambda: answers.append(node.invoke("lost", {"do": "wait"})))
    caller.start()
    node.wait(lambda: "waits" in log_of(node, "lost"), 60, "the request to be under way")
    os.kill(pid, signal.SIGKILL)
    caller.join()
    assert (answers[0].status, answers[0].code) == (503, "executor_lost"), answers[0]
    node.replaced("gpu0", pid)
    assert node.result("lost", {"do": "look"}) == FINE
    assert "made by a request that lost its GPU" in log_of(node, "lost")
    assert node.result("lost", {"do": "calls"}) == 2, "a new instance"


@needs.COMPILER
def test_n5_what_can_never_fit_evicts_nothing(node: TestNode) -> None:
    source = """
        import torch
        def load(): return torch.ones(5 << 20).to("cuda")
        def handle(state, request):
            if request["mib"]:
                torch.empty(request["mib"] << 20, dtype=torch.uint8, device="cuda").fill_(1)
            return state.sum().item()
    """
    for name in ("big", "idle"):
        node.deployed(name, source.replace("ones", "full").replace("(5 << 20)", f"((5 << 20,), {len(name)}.0)"))
        node.result(name, {"mib": 0})

    def resident() -> int:
        return sum(node.status()["functions"]["idle"]["gpu_nbytes"].values())

    node.wait(lambda: resident() == 20 << 20, 60, "the end of its first lease to be heard of")
    answer = node.invoke("big", {"mib": 190})
    assert (answer.status, answer.code) == (507, "out_of_memory"), answer
    assert "none was evicted" in answer.message
    assert "190 MiB asked for" in answer.message
    assert resident() == 20 << 20
    assert node.result("big", {"mib": 160}) == 3.0 * (5 << 20), "what fits once others have gone, fits"
    node.wait(lambda: resident() == 0, 60, "that to be heard of")
