"""What a function can read of others through a node: nothing. One GPU, so that all use the same memory in turn."""

from collections.abc import Iterator
from typing import Final

import pytest

from dormouse.core.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(240)

COUNT: Final = 20_000  # elements of a secret, as in the trial that found it

WAYS: Final = """
    import gc, torch
    from dormouse.client_shim.stream import Stream

    SECRET = 0x5EC2E7A9
    PATTERN = SECRET.to_bytes(4, "little")
    SIZES = (10, 250, 1000, 5000, 20_000, 75_001, 1 << 18, 5 << 18)  # elements of four bytes
    CUDA = {"dtype": torch.int32, "device": "cuda"}

    def load():
        stream = next(thing for thing in gc.get_objects() if type(thing) is Stream)
        return {"arena": stream.backend.arena, "anchor": torch.ones(20_000, device="cuda") + 1}

    def leave():
        # the secret, in several blocks of each size at once
        kept = [torch.full((n,), SECRET, **CUDA) for n in SIZES for _ in range(3 + 500 // n)]
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
        yield "nonzero", whole(torch.ones(n // 2, device="cuda").nonzero())
        yield "storage", torch.empty(0, **CUDA).set_(torch.UntypedStorage(4 * n, device="cuda"))

    def look(state):
        found, seen = {}, {}
        for n in SIZES:
            for again in range(1 + 500 // n):
                for way, tensor in ways(n, state["anchor"]):
                    content = tensor.cpu().numpy().tobytes()
                    seen[way] = seen.get(way, 0) + len(content) // 4
                    found[way] = found.get(way, 0) + content.count(PATTERN)
        found["arena"] = bytes(state["arena"]).count(PATTERN)
        return {"found": found, "seen": seen}

    def handle(state, request):
        return leave() if request == "leave" else look(state)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "192MiB"\npoison = true\n') as running:
        yield running


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
        own = node.result("keeper", "look")["found"]
        assert own["empty"] >= COUNT
        assert all(own[way] for way in ("empty_strided", "gaps", "new_empty", "empty_like", "out", "storage")), own
    assert node.remove("keeper").status == 200
    assert not any(node.result("spy", "look")["found"].values()), "nor of one that is gone"
    assert node.pids()["gpu0"] == pid, "all of it happened in one process"
